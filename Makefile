# `make demo` and `make test` do all of their own set-up on a machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV   ?= .venv
CORE   ?= build/core-venv
LOWEST ?= build/lowest-venv
SHIPPED := build/shipped-venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FUZZ_SECONDS ?= 120

.DEFAULT_GOAL := help
# Every target below is a command and no file.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(MAKEFILE_LIST))

CORE_TESTS := -m pytest --override-ini addopts= --import-mode=importlib --strict-markers -m "not slow" -q -rs tests

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) ## create VENV (default .venv) and install with every extra; again only when pyproject.toml changes

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rgpr needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all,dev]'
	touch $(STAMP)

demo: setup ## train two small networks, wrap them, print a table and draw the pictures
	$(BIN)/rgpr demo

test: setup ## the whole test suite, with doctests and the README's snippets
	$(BIN)/python -m pytest

test-core: ## the tests that need no extra, with rgpr installed without any in a venv of its own (CORE)
	test -x $(CORE)/bin/python || $(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --quiet --upgrade pip
	$(CORE)/bin/python -m pip install --quiet pytest hypothesis
	$(CORE)/bin/python -m pip install --quiet --upgrade --upgrade-strategy only-if-needed .
	$(CORE)/bin/python -m pip install --quiet --force-reinstall --no-deps .
	$(CORE)/bin/python $(CORE_TESTS)

# uv reads the lower bounds from pyproject.toml, which pip cannot, so no second list has to be kept.
# EXTRAS='[gp,cli]' takes these extras at their lowest versions too, and the tests that need them.
test-lowest: ## test-core with the lowest version of every dependency, in a venv of its own (LOWEST); Python 3.11
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip uv pytest hypothesis
	$(LOWEST)/bin/python -m uv pip install --python $(LOWEST)/bin/python --upgrade --reinstall-package rgpr \
	  --resolution lowest-direct '.$(EXTRAS)'
	$(LOWEST)/bin/python $(CORE_TESTS)

test-gpu: setup ## the tests that use a GPU, on a machine that has one, and the table of them in docs/trust.md
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch finds no GPU here")'
	$(BIN)/python -m pytest -m gpu --no-cov -rs --dist=worksteal --junitxml=build/gpu.xml
	PYTHONPATH=.:tests $(BIN)/python -m trust.on_gpu build/gpu.xml

LONG := RGPR_TALLY=$(CURDIR)/build/trust HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m ""

nightly: setup ## every test, those that take minutes too; then the figures of docs/trust.md
	rm -rf build/trust
	$(LONG)
	$(BIN)/python tests/trust/figures.py build/trust

trust: setup ## of the nightly tests those of trust alone, and the figures of docs/trust.md
	rm -rf build/trust
	$(LONG) --no-cov tests/trust
	$(BIN)/python tests/trust/figures.py build/trust

fuzz: setup ## coverage-guided fuzzing of everything that reads a file; FUZZ_SECONDS, 120 by default, with atheris
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	$(BIN)/python tests/trust/fuzz.py build/fuzz/corpus -max_total_time=$(FUZZ_SECONDS)

mutants: setup ## change the core in small ways and ask the tests; an interrupted run goes on; figures in docs/trust.md
	$(BIN)/python -m pip install --quiet --editable '.[mutants]'
	PYTHONPATH=tests $(BIN)/python -m trust.mutants

zoo: setup ## a hundred architectures of other libraries, checked anew; an interrupted run goes on by `rgpr paper run zoo --out results`
	$(BIN)/python -m pip install --quiet --editable '.[zoo]'
	rm -rf results/zoo
	$(BIN)/rgpr paper run zoo --seeds 0 --out results
	$(BIN)/rgpr paper report --out results
	$(BIN)/python tests/paper/test_results.py

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## ruff: mend both in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy --strict on src
	$(BIN)/mypy

bench: setup ## speed, as ratios within one run; JSON under build/benchmarks
	$(BIN)/python -m benchmarks

docs: setup ## the documentation as a site under site/, which loads nothing from elsewhere
	$(BIN)/zensical build --clean --strict
	@! grep -rnoE '<(script|link|img)[^>]* (src|href)="?(https?:)?//[^" >]*' site --include='*.html' \
	  | grep -vE 'rel="?(canonical|alternate|edit|next|prev)' || { echo 'site/ loads these from elsewhere'; exit 1; }

# Files inside the archives have the date of the commit, so a commit that is built again gives the same
# bytes. Without git they have the first date that a zip can hold.
wheel release: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)

wheel: setup ## the library as a wheel and a source archive under dist/
	$(BIN)/python -m build --no-isolation

# The list of materials is of a venv that holds the wheel, what it depends on, and nothing else.
release: ## the same from an empty dist/, with a list of materials (CycloneDX) and SHA256SUMS
	rm -rf dist $(SHIPPED)
	$(MAKE) wheel
	$(PYTHON) -m venv --without-pip $(SHIPPED)
	$(BIN)/python -m pip --python $(SHIPPED)/bin/python install --quiet dist/*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	  --output-file "$$(ls dist/*.tar.gz | sed 's/tar.gz$$/cdx.json/')" $(SHIPPED)/bin/python
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

# Without --strict, pip-audit passes over packages that the service does not know. rgpr itself is
# left out, because no index has it.
audit-dependencies: setup ## pip-audit: known vulnerabilities of all that `make setup` installs; asks pypi.org
	mkdir -p build
	$(BIN)/python -m pip freeze --exclude-editable > build/installed.txt
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement build/installed.txt

clean: ## everything that the targets above made
	rm -rf .venv build dist site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

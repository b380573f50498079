# `make demo` and `make test` do all of their own set-up on a machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV   ?= .venv
CORE   ?= build/core-venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-core nightly zoo lint format types bench docs wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

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
	$(CORE)/bin/python -m pytest --override-ini addopts= --import-mode=importlib --strict-markers \
	  -m "not slow" -q -rs tests

nightly: setup ## every test, those that take minutes too
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m ""

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

wheel: setup ## the library as a wheel and a source archive under dist/
	$(BIN)/python -m build --no-isolation

clean: ## everything that the targets above made
	rm -rf .venv build dist site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

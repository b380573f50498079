"""Start-up: ``import rgpr`` against ``import torch``, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from .timing import race


def run(device: str) -> Iterator[tuple[str, Any]]:
    def importing(what: str) -> Any:
        return lambda: subprocess.run([sys.executable, "-c", f"import {what}"], check=True)

    yield "import", race({name: importing(name) for name in ("torch", "rgpr")}, rounds=5)

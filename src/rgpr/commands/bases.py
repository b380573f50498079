"""``rgpr bases``: every base posterior on digits, without and with the residual."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._atomic import replacing
from .base import Command, register_command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--into", type=Path, help="a Markdown file whose marked part the table replaces"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the training, less to test"
    )


def _run(options: argparse.Namespace) -> int:
    from rgpr_paper.posterior_table import table

    _show(table(quick=options.quick), options.into)
    return 0


def _show(table: str, into: Path | None) -> None:
    """Print the table, or put it between the marks of a file."""
    if into is None:
        print(table)
        return
    before, mark, rest = into.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->")
    if not mark or not end:
        raise SystemExit(f"{into} has no lines <!-- table --> and <!-- end of table --> to fill")
    with replacing(into) as temporary:
        temporary.write_text(f"{before}{mark}{table}\n{end}{after}")


register_command(
    "bases",
    Command(
        "every base posterior on digits, without and with the residual, as a table",
        _add_options,
        _run,
        example="rgpr bases --quick",
    ),
)

"""``rgpr paper``: the paper's experiments, by name; the repository has them, the wheel does not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .base import Command, form, register_command


def _add_options(paper: argparse.ArgumentParser) -> None:
    paper_commands = paper.add_subparsers(dest="paper_command", metavar="COMMAND", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a .py file, with experiments or detectors of your own; its code is run, "
        "and no code outside the package is run that is not named here (can be repeated)",
    )
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument(
        "--out", type=Path, default=Path("paper"), help="folder for the files (default: paper)"
    )
    paper_commands.add_parser(
        "list", parents=[shared], help="the experiments that there are", **form("rgpr paper list")
    )
    run_paper = paper_commands.add_parser(
        "run",
        parents=[shared, out],
        help="run experiments, one or several or all, what is not there yet",
        **form("rgpr paper run moons --small --out paper"),
    )
    run_paper.add_argument(
        "names", nargs="+", metavar="name", help="see `rgpr paper list`, or `all`"
    )
    run_paper.add_argument("--data", type=Path, help="folder that holds the data sets")
    run_paper.add_argument("--device", default="cpu", help="where to train (default: cpu)")
    run_paper.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="one network each (default: 0 1 2)"
    )
    run_paper.add_argument(
        "--recipe",
        choices=("fast", "paper"),
        default="fast",
        help="plan by which image networks are trained (default: fast)",
    )
    run_paper.add_argument(
        "--sets", nargs="+", metavar="SET", help="in-distribution images: mnist, cifar10, ..."
    )
    run_paper.add_argument(
        "--small", action="store_true", help="small versions on digits or made data, in minutes"
    )
    run_paper.add_argument(
        "--download", action="store_true", help="let torchvision download missing sets"
    )
    paper_commands.add_parser(
        "report",
        parents=[shared, out],
        help="what was run, beside the paper's numbers: Markdown, HTML",
        **form("rgpr paper report --out paper"),
    )


def _run(options: argparse.Namespace) -> int:
    from rgpr_paper import all_experiments, import_from

    try:
        for module in options.imports:
            import_from(module)
        experiments = all_experiments()
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.paper_command == "list":
        for name, experiment in experiments.items():
            print(f"{name:18} {experiment.title} ({experiment.paper})")
        return 0
    if options.paper_command == "report":
        from rgpr_paper.report import write_report

        try:
            paths = write_report(options.out)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 1
        print("\n".join(str(path.resolve()) for path in paths))
        return 0
    for name in options.names:
        if name not in ("all", *experiments):
            known = ", ".join(experiments)
            print(f"no experiment '{name}'; there are: {known}, or all", file=sys.stderr)
            return 2
    return _run_experiments(options, list(experiments) if "all" in options.names else options.names)


def _run_experiments(options: argparse.Namespace, names: list[str]) -> int:
    """Run experiments. Missing data are named last, so that the reader sees them."""
    from rgpr_paper import Context, run_experiment

    gaps: list[str] = []
    try:
        context = Context(
            out=options.out,
            data=options.data,
            device=options.device,
            seeds=tuple(options.seeds),
            recipe=options.recipe,
            small=options.small,
            sets=tuple(options.sets) if options.sets else None,
            download=options.download,
            imports=tuple(options.imports),
        )
        for name in names:
            gaps += [f"{name}, {gap}" for gap in run_experiment(name, context)]
            page = context.out / name / f"{name}.md"
            if page.exists():
                print(page.resolve())
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if gaps and len(names) > 1:  # the run of a single experiment has just named them
        print("\n".join(["", "Left out:", *gaps]), file=sys.stderr)
    print(f"`rgpr paper report --out {options.out}` puts all that was run on one page")
    # Asked for by name, missing data are a failure; asked for all, a gap in the report.
    return 1 if gaps and "all" not in options.names else 0


register_command(
    "paper",
    Command(
        "the paper's experiments, by name",
        _add_options,
        _run,
        example="rgpr paper list\nrgpr paper run moons --small",
    ),
)

"""What commands over models and data share: options, how they answer, and how they fail."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._text import said
from .overwriting import refuse_overwriting

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from .._files.inputs.data import Data

__all__ = [
    "CODE",
    "Answer",
    "add_common",
    "add_data",
    "add_network",
    "answering",
    "count",
    "every_warning_shown",
    "file_in_a_folder",
    "model_file",
    "read_data",
    "settings_of",
    "size",
    "words",
]

CODE = """
Code is run only where you name it: --model package.module:factory and --preprocess
package.module:function are imported, with the current folder first on the path, and called. Data,
weights and model files hold numbers and are never run. A .pt2 file is opened only if it is a graph
of torch's own operators."""


@dataclass(frozen=True)
class Answer:
    """What a command did.

    Attributes:
        lines: For people.
        report: For ``--json``.
        status: The exit status.
    """

    lines: list[str]
    report: dict[str, Any] = field(default_factory=dict)
    status: int = 0


def answering(run: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], int]:
    """A command's ``run``: prints the answer to stdout; what goes wrong is a line on stderr."""

    def whole(options: argparse.Namespace) -> int:
        name = f"rgpr {options.command}"
        # A user's own code may print; with --json nothing but JSON belongs on stdout.
        aside = redirect_stdout(sys.stderr) if options.json else nullcontext()
        try:
            with _warnings_as_lines(name), aside:
                refuse_overwriting(options)
                answer = run(options)
        except (ValueError, TypeError, RuntimeError, OSError, KeyError, MemoryError) as error:
            if options.traceback:
                traceback.print_exc()
            print(f"{name}: {_in_words(error, options)}", file=sys.stderr)
            return 1
        if options.json:
            print(json.dumps(_plain({"command": options.command, **answer.report})))
        else:
            print("\n".join(answer.lines))
        return answer.status

    return whole


# Advice for programs, and the option that does the same.
_OPTIONS = (
    (re.compile(r"likelihood='(\w+)'"), r"--likelihood \1"),
    (re.compile(r"RGPR\(network, input='([^']*)'\)"), r"--input \1"),
    (re.compile(r"batch_size=(\d+)"), r"--batch-size \1"),
)


def _in_words(error: Exception, options: argparse.Namespace) -> str:
    """What went wrong, in which of the files, and by which option it can be mended."""
    import torch

    from .._files.inputs.data import Data

    text = said(error)
    if isinstance(error, MemoryError) and not text:
        text = "the memory does not suffice; a smaller --batch-size needs less"
    for advice, option in _OPTIONS:
        text = advice.sub(option, text)
    data, Data.begun = Data.begun, None
    # A file that cannot be read or written names itself, and a full memory is about no file.
    elsewhere = isinstance(error, OSError | MemoryError | torch.OutOfMemoryError)
    if data is None or elsewhere or str(data.path) in text:
        return text
    if "x.float() / 255" in text:
        text += ": --divide 255, or in general --preprocess module:function"
    elif re.search(r"\bx\.\w+\(", text) and options.preprocess is None:
        text += ". A function of yours can do that to every batch: --preprocess module:function"
    if not _about_shapes(error, text):
        return f"{data.name}: {text}"
    asks = ""
    if data.columns is not None and not data.source.labelled:
        asks = "If one of these columns holds the targets, name it by --target NAME. Else: "
    about = data.about.removeprefix(f"{data.path}: ")
    return f"{data.name}: {about}. {asks}{text}"


def _about_shapes(error: Exception, text: str) -> bool:
    """Whether inputs have another shape than the network or the fit expects."""
    return isinstance(error, RuntimeError) or "has shape" in text or "rows of shape" in text


@contextmanager
def _warnings_as_lines(name: str) -> Iterator[None]:
    """Say what is warned of in a line each."""
    with warnings.catch_warnings():
        # What torch says about its own parts is nothing that a user of a command can mend.
        warnings.filterwarnings("ignore", module="torch")

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            print(f"{name}: warning: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


@contextmanager
def every_warning_shown() -> Iterator[None]:
    """Let no filter hide what the library warns of: a line on stderr is all that is said of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module="rgpr")
        yield


def _plain(value: Any) -> Any:
    """The value in JSON's own words: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


# -- options ---------------------------------------------------------------------------------------


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every command over models."""
    group = parser.add_argument_group("what is printed")
    group.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    group.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")
    group.add_argument(
        "--traceback", action="store_true", help="where an error came from, as Python prints it"
    )


def add_network(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """How the network is named, and where it runs."""
    unless = "" if required else "; left out if FILE is a .pt2 file"
    parser.add_argument(
        "--model",
        required=required,
        metavar="M",
        help="the network: package.module:factory, whose code is run, or a .pt2 file of "
        f"torch.export.save, which needs no code{unless}",
    )
    parser.add_argument("--device", default="cpu", help="where the network runs (default: cpu)")


def add_data(parser: argparse.ArgumentParser) -> None:
    """How data are read."""
    group = parser.add_argument_group(
        "data",
        ".npz with inputs x, X, images or data, and targets y, labels or target; .parquet or\n"
        ".csv with a column for each number; a folder of images, alone or in folders of classes",
    )
    group.add_argument("--batch-size", type=count, default=256, help="rows at once (default: 256)")
    group.add_argument(
        "--target",
        metavar="NAME",
        help="the column or key of the targets, several with commas (default: y, label or target)",
    )
    group.add_argument(
        "--columns",
        type=words,
        metavar="A,B",
        help="the columns of the inputs, or their key in .npz (default: all other numbers)",
    )
    group.add_argument(
        "--classes", type=words, metavar="A,B", help="folders of classes, by label (default: a-z)"
    )
    group.add_argument(
        "--size", type=size, metavar="HxW", help="resize images (default: all must have one size)"
    )
    group.add_argument("--channels", type=int, choices=(1, 3), help="grey or colours, of images")
    group.add_argument(
        "--mean", type=_numbers, metavar="A,B,C", help="subtract this from channels in [0, 1]"
    )
    group.add_argument("--std", type=_positive, metavar="A,B,C", help="divide channels by this")
    group.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at an image that cannot be read (default: stop)",
    )
    group.add_argument(
        "--preprocess",
        metavar="F",
        help="package.module:function, whose code is run, for the inputs of every batch",
    )
    group.add_argument(
        "--divide",
        type=_divisor,
        metavar="N",
        help="divide the inputs by this, such as 255 for images that are bytes in .npz",
    )


def read_data(
    options: argparse.Namespace,
    path: Path,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,
) -> Data:
    """The data that the options describe.

    Args:
        options: With those of :func:`add_data`.
        path: Where the data are.
        dtype: Of the network.
        shape: Of one input of the model, which says whether images are grey.
    """
    from .._files.inputs.data import read
    from .._files.networks.networks import named

    channels, prepare = options.channels, options.preprocess
    if channels is None and prepare is None and shape is not None and len(shape) == 3:
        channels = shape[0] if shape[0] in (1, 3) else None
    return read(
        path,
        target=options.target,
        batch_size=options.batch_size,
        columns=options.columns,
        dtype=dtype,
        classes=options.classes,
        size=options.size,
        channels=channels,
        mean=options.mean,
        std=options.std,
        on_error=options.on_error,
        preprocess=None if prepare is None else named(prepare, "--preprocess"),
        divide=options.divide,
        option=_given_as(options, path),
    )


def _given_as(options: argparse.Namespace, path: Path) -> str | None:
    """The option that a path was given by."""
    for name, value in vars(options).items():
        if value is path:
            return "DATA" if name == "data" else f"--{name}"
        for part in value if isinstance(value, list) else ():  # --ood NAME=DATA
            if isinstance(part, tuple) and part[1] is path:
                return f"--{name} {part[0]}"
    return None


def settings_of(options: argparse.Namespace, *silent: str) -> dict[str, Any]:
    """All that the answers of a command over a model and data depend on, for JSON.

    Code that is named stands there by its name alone.

    Args:
        options: With the model as ``file`` and the data as ``data``.
        silent: Names of options that change nothing, beside those of :func:`add_common`.

    Raises:
        FileNotFoundError: The model or the data are not there.
    """
    import torch

    from .. import __version__
    from .._files.outputs.parts import fingerprint

    silent = (*silent, "json", "no_progress", "traceback", "version", "print_completion")
    found = {name: value for name, value in vars(options).items() if name not in silent}
    for name in ("file", "data"):
        path = found[name]
        if not path.exists():
            raise FileNotFoundError(f"no file or folder {path}")
        found[name] = f"{path.resolve()} ({fingerprint(path)})"
    return {**found, "rgpr": __version__, "torch": str(torch.__version__)}


def file_in_a_folder(path: Path, *, added_to: bool = False) -> None:
    """Refuse a file that could not be written, before the work.

    Args:
        path: The file.
        added_to: Lines are added to a file that is there. Otherwise it is replaced, for which the
            folder has to be writable and the file does not.

    Raises:
        FileNotFoundError: Its folder is not there.
        PermissionError: This user may not write it.
        ValueError: It is a folder itself.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} in; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    if added_to and path.exists():
        if not os.access(path, os.W_OK):
            raise PermissionError(f"you may not write to {path}; name another file")
    elif not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"you may not write {path.name} in {path.parent}; name a file in another folder"
        )


def model_file(text: str) -> Path:
    """A file that a model is written to."""
    if not text.endswith(".safetensors"):
        raise argparse.ArgumentTypeError(
            f"'{text}': expected a name that ends in .safetensors, as a model's file has"
        )
    return Path(text)


def words(text: str) -> tuple[str, ...]:
    """Words between commas."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"'{text}': expected names with commas between them")
    return found


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': expected numbers, as in 0.5,0.5,0.5") from None


def _positive(text: str) -> tuple[float, ...]:
    found = _numbers(text)
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError(f"'{text}': expected positive numbers")
    return found


def _divisor(text: str) -> float:
    found = _positive(text)
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"'{text}': expected one positive number, such as 255")
    return found[0]


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': expected a whole number of at least 1")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """Height and width."""
    height, _, width = text.partition("x")
    try:
        return count(height), count(width or height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}': expected 224x224, or 224") from None

"""Files changed at random, by their bytes and by what the bytes mean; every change has a seed.

A safetensors file is a length, a header in JSON and numbers. Half of the changes that know this
also put the right checksum in, which whoever writes a file on purpose can do as well. Each change
says whether it did.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np

__all__ = [
    "json_changed",
    "mutated_json",
    "mutated_npz",
    "mutated_safetensors",
    "resealed",
    "states_an_old_format",
]

_CHECKSUM, _DESCRIPTION = "rgpr_sha256", "rgpr"
_NOTHING = 64 * "0"
_HUGE = (10**9, 10**18, 2**31, 2**63, 2**64, 10**400, -1, -(10**18))
_FLOATS = (0.0, -1.0, 0.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"))
_WORDS = (
    "",
    "input",
    "1",
    "raw",
    "nan",
    "None",
    "../../x",
    "os.system",
    "__class__",
    "0",
    "é🙂\u2028",
)
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "C64", "F8_E4M3", "X", 3, None)


class Twice(dict[str, Any]):
    """A JSON object whose first key is written twice, with another value before its own."""


class Raw(str):
    """Text that stands for itself, such as JSON that is too deep to be made otherwise."""


# -- any bytes -------------------------------------------------------------------------------------


def _flipped(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    changed = bytearray(content)
    end = random.choice([8, min(len(content), 2000), len(content)])  # most bytes are numbers
    for _ in range(random.randint(1, 8)):
        changed[random.randrange(end)] ^= random.randint(1, 255)
    return bytes(changed)


def _cut(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def _spliced(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    other = random.choice(others)
    here = random.randrange(len(content))
    there = here if random.random() < 0.5 else random.randrange(len(other))
    return content[:here] + other[there:]


def _moved(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Some bytes are taken out, written twice, or replaced by others."""
    first = random.randrange(len(content))
    last = min(len(content), first + random.randint(1, 64))
    part = content[first:last]
    between = random.choice([b"", part + part, random.randbytes(len(part)), bytes(len(part))])
    return content[:first] + between + content[last:]


def _long(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    return content + random.randbytes(random.randint(1, 100))


_BYTES: tuple[Callable[[bytes, Sequence[bytes], Random], bytes], ...] = (
    _flipped, _cut, _spliced, _moved, _long,
)  # fmt: skip


# -- JSON ------------------------------------------------------------------------------------------


def anything(random: Random) -> Any:
    """A value of any type that JSON has, some of them huge or deep."""
    depth = random.choice([3, 50, 900, 5000])
    deep = Raw("[" * depth + "]" * depth if depth % 100 else '{"a":' * depth + "1" + "}" * depth)
    kinds: list[Any] = [
        None, True, False, 0, 1, 2, 3, random.choice(_HUGE), random.choice(_FLOATS),
        random.choice(_WORDS), random.choice(_WORDS) * 100, [], {}, deep, [0] * 1000,
        [random.choice(_WORDS)], {random.choice(_WORDS): random.choice(_HUGE)},
    ]  # fmt: skip
    return random.choice(kinds)


def json_changed(value: Any, random: Random) -> Any:
    """The same JSON with a change at a random place in it."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key, kind, found = random.choice(list(value)), random.randrange(8), dict(value)
        if kind == 0:
            del found[key]
        elif kind == 1:
            found[random.choice(_WORDS)] = anything(random)
        elif kind == 2:
            found[random.choice(_WORDS)] = found.pop(key)
        elif kind == 3:
            return Twice({key: found.pop(key), **found})
        else:
            found[key] = json_changed(value[key], random)
        return found
    if isinstance(value, list) and value and random.random() < 0.8:
        place, kind = random.randrange(len(value)), random.randrange(6)
        if kind == 0:
            return value[:place] + value[place + 1 :]
        if kind == 1:
            return [*value[:place], value[place], *value[place:]]
        return [*value[:place], json_changed(value[place], random), *value[place + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.5:
        return random.choice([*_HUGE, *_FLOATS, -value, value + 1, f"{value}"])
    return anything(random)


def text(value: Any) -> str:
    """JSON as safetensors lays it out, with the keys of :class:`Twice` written twice."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}:{text(part)}" for key, part in value.items()]
        if isinstance(value, Twice):
            pairs = [f"{json.dumps(next(iter(value)))}:[1]", *pairs]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def mutated_json(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A JSON file, changed."""
    if random.random() < 0.3:
        return random.choice(_BYTES)(content, others, random)
    return text(json_changed(json.loads(content), random)).encode()


# -- safetensors -----------------------------------------------------------------------------------


def mutated_safetensors(
    content: bytes, others: Sequence[bytes], random: Random
) -> tuple[bytes, bool]:
    """A file of ours, changed, and whether the change put the right checksum in."""
    if random.random() < 0.35:
        return random.choice(_BYTES)(content, others, random), False
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    kind = random.randrange(10)
    if kind == 0:  # another length of the header
        wrong = random.choice([0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, 2**64 - 1])
        return wrong.to_bytes(8, "little") + content[8:], False
    if kind <= 2:
        _change_entry(header, random)
    elif kind == 3:
        header["__metadata__"] = json_changed(header["__metadata__"], random)
    elif kind <= 5:
        _change_number(header, numbers, random)
    else:
        about = json.loads(header["__metadata__"][_DESCRIPTION])
        for _ in range(random.choice([1, 1, 1, 2, 5])):
            about = json_changed(about, random)
        header["__metadata__"][_DESCRIPTION] = text(about)
    written = text(header).encode("utf-8", "surrogatepass")
    made = len(written).to_bytes(8, "little") + written + bytes(numbers)
    found = resealed(made) if random.random() < 0.5 else made
    return found, found != made


def _change_entry(header: dict[str, Any], random: Random) -> None:
    """Change the name, the dtype, the shape or the place of a tensor."""
    name = random.choice([name for name in header if name != "__metadata__"])
    entry, kind = dict(header[name]), random.randrange(7)
    sizes = list(entry["shape"])
    if kind == 0:
        entry["dtype"] = random.choice(_DTYPES)
    elif kind == 1:
        entry["shape"] = random.choice([sizes[::-1], [*sizes, 1], [1, *sizes], sizes[1:], [0]])
    elif kind == 2:
        entry["shape"] = [random.choice(_HUGE) for _ in sizes] or [random.choice(_HUGE)]
    elif kind == 3:
        start, end = entry["data_offsets"]
        moved = random.choice([0, 4, 8, 10**12, 2**64])
        entry["data_offsets"] = random.choice([[start, end + moved], [moved, end], [end, start]])
    elif kind == 4:
        entry = json_changed(entry, random)
    elif kind == 5:
        header[random.choice([f"{name}x", "learned._references", "residual.onset"])] = entry
        if random.random() < 0.5:
            del header[name]
        return
    else:
        other = random.choice([each for each in header if each != "__metadata__"])
        header[name], header[other] = header[other], header[name]
        return
    header[name] = entry


def _change_number(header: dict[str, Any], numbers: bytearray, random: Random) -> None:
    """Write another number into a tensor."""
    kinds = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "U8": np.uint8}
    names = [n for n in header if n != "__metadata__" and header[n]["dtype"] in kinds]
    entry = header[random.choice(names)]
    start, end = entry["data_offsets"]
    array = np.frombuffer(bytes(numbers[start:end]), kinds[entry["dtype"]]).copy()
    for _ in range(random.randint(1, 3)):
        if not len(array):
            return
        if array.dtype.kind == "f":
            value: Any = random.choice([*_FLOATS, 1e30, -1e-3])
        else:
            value = random.choice([0, -1, 1, 2**62, -(2**62)]) if array.dtype == np.int64 else 255
        with np.errstate(over="ignore"):
            array[random.randrange(len(array))] = value
    numbers[start:end] = array.tobytes()


def resealed(content: bytes) -> bytes:
    """The same file with the right checksum, where its header has a place for one."""
    length = int.from_bytes(content[:8], "little")
    header, numbers = content[8 : 8 + length], content[8 + length :]
    try:
        written = json.loads(header)["__metadata__"][_CHECKSUM]
        mark = f'"{_CHECKSUM}":"{written}"'.encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return content
    if header.count(mark) != 1:
        return content
    empty = f'"{_CHECKSUM}":"{_NOTHING}"'.encode()
    start = (length - len(mark) + len(empty)).to_bytes(8, "little")
    whole = start + header.replace(mark, empty) + numbers
    seal = f'"{_CHECKSUM}":"{sha256(whole).hexdigest()}"'.encode()
    return start + header.replace(mark, seal) + numbers


def states_an_old_format(content: bytes) -> bool:
    """Whether a file says that it has format 1 or 2, and has no checksum, as these had none."""
    length = int.from_bytes(content[:8], "little")
    try:
        about = json.loads(content[8 : 8 + length])["__metadata__"]
        return about["rgpr_format"] in ("1", "2") and _CHECKSUM not in about
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


# -- npz -------------------------------------------------------------------------------------------


def mutated_npz(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A file of arrays, changed: its bytes, or the arrays and what their headers say of them."""
    if random.random() < 0.5:
        return random.choice(_BYTES)(content, others, random)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, kind = random.choice(list(members)), random.randrange(6)
    if kind == 0:
        del members[name]
    elif kind == 1:
        members[random.choice(["score.npy", "é.npy", "../x.npy", "plain"])] = members[name]
    elif kind == 2:
        members[name] = random.choice(_BYTES)(members[name], list(members.values()), random)
    else:
        members[name] = _npy(np.load(io.BytesIO(members[name])), random)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as z:
        for each, data in members.items():
            z.writestr(each, data)
    return made.getvalue()


def _npy(array: np.ndarray[Any, Any], random: Random) -> bytes:
    """An array in a file whose header says something else about it."""
    shapes = [(10**12,), (2**62, 2**62), (-1,), (len(array) - 1, *array.shape[1:]), ()]
    header = {
        "descr": random.choice([array.dtype.str, "|O", ">f8", "<c16", "|V7", "<M8[s]", "<U9"]),
        "fortran_order": random.random() < 0.2,
        "shape": random.choice([array.shape, *shapes]),
    }
    made = io.BytesIO()
    np.lib.format.write_array_header_2_0(made, header)
    made.write(array.tobytes())
    return made.getvalue()

"""Networks from code that the user names, and from files that run no code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rgpr._files.networks.networks import load_weights, named, network
from rgpr._files.networks.programs import _suspicious, open_program

CODE = """
from torch import nn
net = nn.Linear
made = nn.Linear(4, 3)
def sized(*, width, depth=2):
    return nn.Linear(4, width)
def factory():
    return nn.Linear(4, 3)
class Held:
    factory = staticmethod(factory)
def fails():
    raise ZeroDivisionError("mine")
def number():
    return 3
three = 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "audit_nets.py").write_text(CODE)
    (tmp_path / "audit_broken.py").write_text("1 / 0")
    (tmp_path / "audit_needs.py").write_text("import audit_missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "audit_nets", raising=False)


def test_a_factory_is_called() -> None:
    assert isinstance(network("audit_nets:factory"), nn.Linear)
    assert isinstance(network("audit_nets:Held.factory"), nn.Linear)


def test_a_network_stands_for_itself(tmp_path: Path) -> None:
    original = nn.Linear(4, 3)
    save_file(original.state_dict(), tmp_path / "w.safetensors")
    found = network("audit_nets:made", tmp_path / "w.safetensors")
    assert torch.equal(found.weight, original.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_weights_of_a_wrapped_network(prefix: str, tmp_path: Path) -> None:
    original, found = nn.Linear(4, 3), nn.Linear(4, 3)
    state = {f"{prefix}{name}": tensor for name, tensor in original.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match=f"begin with '{prefix}'.*read without it"):
        load_weights(found, tmp_path / "w.pt")
    assert torch.equal(found.weight, original.weight)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("audit_nets", "expected package.module:function"),
        ("audit_nets:", "expected package.module:function"),
        ("audit_nets:other", "audit_nets has no 'other'; it has .*factory"),
        ("audit_nets:three", "is a int; expected a function"),
        ("audit_nets:number", "returned a int; expected a torch.nn.Module"),
        ("audit_nets:fails", "failed with ZeroDivisionError: mine"),
        ("audit_nets:net", r"needs the arguments in_features, out_features, .* return net\(...\)"),
        ("audit_nets:sized", r"needs the arguments width, .* def net\(\): return sized\(...\)"),
        ("audit_nets.py:net", "leave out .py, and write audit_nets:net"),
        ("models/audit_nets.py:net", "leave out .py, and write models.audit_nets:net"),
        ("audit_missing:net", "No module named 'audit_missing'.* run this in the folder"),
        ("audit_needs:net", "No module named 'audit_missing'"),
        ("audit_broken:net", "importing audit_broken failed with ZeroDivisionError"),
    ],
)
def test_names_that_name_no_network(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"--model {spec}.*{said}|{said}"):
        network(spec)
    with pytest.raises(ValueError, match="--preprocess audit_nets:other: "):
        named("audit_nets:other", "--preprocess")


@pytest.mark.parametrize("form", ["safetensors", "pt", "pth", "wrapped.pt"])
def test_weights(form: str, tmp_path: Path) -> None:
    original = nn.Linear(4, 3)
    path = tmp_path / f"w.{form}"
    if form == "safetensors":
        save_file(original.state_dict(), path)
    else:
        state = original.state_dict()
        torch.save({"state_dict": state, "epoch": 3} if "wrapped" in form else state, path)
    found = network("audit_nets:factory", path)
    assert torch.equal(found.weight, original.weight)  # type: ignore[arg-type]


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    def refused(state: object, said: str) -> None:
        torch.save(state, tmp_path / "w.pt")
        with pytest.raises(ValueError, match=said):
            load_weights(nn.Linear(4, 3), tmp_path / "w.pt")

    good = nn.Linear(4, 3).state_dict()
    refused({"weight": good["weight"]}, "w.pt does not fit the network: the file lacks bias$")
    refused({**good, "more": good["bias"]}, "the network has no more$")
    refused(
        {"weight": torch.zeros(3, 5), "bias": good["bias"]},
        r"of other shapes are weight \(\(3, 5\), in the network \(3, 4\)\)",
    )
    refused([1, 2], "holds a list, not a state_dict")
    refused({"epoch": 3}, "not a state_dict of tensors")
    with pytest.raises(FileNotFoundError, match=r"no file none.pt"):
        load_weights(nn.Linear(4, 3), Path("none.pt"))
    (tmp_path / "w.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.safetensors")
    (tmp_path / "w.bin").touch()
    with pytest.raises(ValueError, match=r"expected a .safetensors, .pt or .pth file"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.bin")


class Spy:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("spied",)


def test_weights_run_no_code(tmp_path: Path) -> None:
    torch.save({"weight": Spy()}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="could run code"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes(pickle.dumps(Spy()))
    with pytest.raises(ValueError, match="could run code"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.pt")
    assert not (tmp_path / "spied").exists()


# -- programs --------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> Path:
    x = torch.zeros(2, 4)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (x,), dynamic_shapes=({0: batch},)
    )
    torch.export.save(exported, tmp_path / "n.pt2")
    return tmp_path / "n.pt2"


def changed(path: Path, part: str, new: bytes | None, old: bytes = b"") -> Path:
    """A copy of an archive in which one file, or some bytes in it, are others."""
    out = path.with_name("changed.pt2")
    with ZipFile(path) as source, ZipFile(out, "w") as target:
        assert any(name.endswith(part) for name in source.namelist())
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(part):
                assert old in content
                content = content.replace(old, new or b"") if old else new or b""
            target.writestr(name, content)
    return out


def test_a_program_is_a_network(program: Path) -> None:
    found = network(str(program))
    assert found(torch.zeros(5, 4)).shape == (5, 3)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_programs_run_no_code(program: Path, tmp_path: Path) -> None:
    target = b"torch.ops.aten.relu.default"
    for evil in (b"torch.os.mkdir", b"torch.ops.load_library", b"torch.hub.load", b"#x"):
        with pytest.raises(ValueError, match="where an operator of torch is expected"):
            open_program(changed(program, "model.json", evil, target))
    size = next(iter(expressions(program))).encode()
    for evil in (b"__import__('os')", b"exec(chr(49))", b"Symbol('s').func", b"(exec)(1)"):
        with pytest.raises(ValueError, match="where an operator of torch is expected"):
            open_program(changed(program, "model.json", evil, size))
    with ZipFile(program, "a") as archive:
        archive.writestr("n/data/constants/opaque_obj_0", pickle.dumps(Spy()))
    with pytest.raises(ValueError, match="opaque_obj_0', an object that is code"):
        open_program(program)
    assert not (tmp_path / "spied").exists()


def test_a_pickle_among_the_sample_inputs_is_not_run(program: Path, tmp_path: Path) -> None:
    torch.save({"x": Spy()}, tmp_path / "spy.pt")
    spied = changed(program, "sample_inputs/model.pt", (tmp_path / "spy.pt").read_bytes())
    with pytest.raises(ValueError, match="cannot be read as a program"):
        open_program(spied)
    assert not (tmp_path / "spied").exists()


def expressions(path: Path) -> set[str]:
    with ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("model.json"))
        text = archive.read(name).decode()
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("expr_str"), str):
                found.add(value["expr_str"])
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(json.loads(text))
    return found


@pytest.mark.parametrize(
    "size", ["Symbol('s77', positive=True, integer=True)", "2*s0", "Max(1, s0)", "floor(s0/2)"]
)
def test_sizes_of_programs_are_understood(size: str) -> None:
    assert list(_suspicious({"expr_str": size})) == []


def test_what_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "n.pt2").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"is no complete .pt2 file"):
        open_program(tmp_path / "n.pt2")
    with pytest.raises(FileNotFoundError, match="no file"):
        open_program(tmp_path / "none.pt2")
    with ZipFile(tmp_path / "n.pt2", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(ValueError, match="cannot be read as a program"):
        open_program(tmp_path / "n.pt2")

"""Two processes with uneven shards against one with all the data."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import blobs, mlp
from rgpr.integrations.laplace import merge_laplace

SCRIPT = """
import os, sys
import torch
from torch import distributed
sys.path.insert(0, {tests!r})
from test_distributed import data, build, laplace, sharded, taught
from rgpr.integrations.laplace import merge_laplace
rank = int(os.environ["RANK"])
distributed.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
import rgpr, warnings
warnings.simplefilter("ignore")
(x, y), (v, w), out = data()
case = {case!r}
if case == "fails" and rank == 1:
    x = x.clone(); x[40] = float("nan")
cut = {{"empty": len(x), "sharded": 60}}.get(case, 31)
mine = slice(0, cut) if rank == 0 else slice(cut, None)
train = [(a, b) for a, b in zip(x[mine].split(7), y[mine].split(7))]
try:
    if case in ("kron", "diag", "full"):
        la = merge_laplace(laplace(case, x[mine], y[mine]))
        assert la.n_data == len(x)
        model = rgpr.RGPR(la, residual="paper")
    elif case == "sharded":
        model = rgpr.RGPR(sharded())
    else:
        model = build(case)
    if case == "other statistics" and rank == 1:
        with torch.no_grad():
            model.posterior.network[0].weight[0, 0] += 1
    model.fit(train, r=2.0 if case == "other options" and rank == 1 else 1.0)
    if case == "other temperature":
        model.temperature = 1.5 + rank
    v_mine = slice(0, 50) if rank == 0 else slice(50, None)
    o_mine = slice(0, 11) if rank == 0 else slice(11, None)
    taught(model, [(v[v_mine], w[v_mine])], [out[o_mine]])
    model.save({store!r} + f".{{rank}}.safetensors")
    code = 0
except Exception as error:
    print(type(error).__name__, error)
    code = 3
distributed.barrier()  # or the one that leaves last may find its connection gone
distributed.destroy_process_group()
sys.exit(code)
"""


def taught(model: rgpr.RGPR, validation: Any, out: Any) -> rgpr.RGPR:
    """Tuned if it is a sum that can be, and calibrated."""
    if model.recipe.combine == "sum":
        model.tune(validation, objective="ood", ood=out, ood_weight=2.0, max_examples=60)
    model.calibrate(validation)
    return model


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    x, _ = blobs(3, n=240)
    y = network()(x).argmax(1)  # what it gets right: or no variance would be too large
    return (
        (x[:120], y[:120]),
        (x[120:], y[120:]),
        4 * torch.randn(90, 4, generator=torch.Generator().manual_seed(2)),
    )


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return mlp()


def build(case: str) -> rgpr.RGPR:
    recipe = rgpr.ResidualRecipe(
        input=rgpr.Strategy(offset=1.0), hidden=rgpr.Strategy("prototypes", "pooled")
    )
    residual = {"offset": recipe, "paper": "paper"}.get(case, "onset")
    return rgpr.RGPR(network(), residual=residual)


def sharded() -> nn.Sequential:
    """The network with its weights shared out among the ranks, by FSDP 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, whole = init_device_mesh("cpu", (2,)), network()
    fully_shard(whole[0], mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return whole


def laplace(structure: str, x: Tensor, y: Tensor) -> Any:
    from laplace import Laplace

    la = Laplace(network(), "classification", "last_layer", structure)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=13))
    return la


def two_processes(case: str, folder: Path) -> list[tuple[int, str]]:
    code = SCRIPT.format(tests=str(Path(__file__).parent), store=str(folder / "store"), case=case)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    return [(p.returncode, output) for p, output in zip(running, outputs, strict=True)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["onset", "paper", "offset", "empty", "sharded"])
def test_two_processes_give_the_model_of_one(case: str, tmp_path: Path) -> None:
    (x, y), validation, out = data()
    alone = taught(build(case).fit([(x, y)]), [validation], [out])
    results = two_processes(case, tmp_path)
    assert [code for code, _ in results] == [0, 0], results
    models = [rgpr.load(tmp_path / f"store.{rank}.safetensors", mlp()) for rank in range(2)]
    points = torch.cat([x, 5 * x])
    assert torch.equal(models[0](points), models[1](points))  # to the last bit
    assert torch.equal(models[0].score(points), models[1].score(points))
    torch.testing.assert_close(models[0].sigma2, alone.sigma2, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(models[0](points), alone(points).detach(), rtol=0, atol=1e-6)
    # What was learned from the held-out data of both.
    for name in ("temperature", "_references", "_label_scores"):
        ours, theirs = getattr(models[0], name), getattr(alone, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if case in ("onset", "empty", "sharded"):
        for name in ("onset", "typical"):
            ours, theirs = (getattr(model.residual, name) for model in (models[0], alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        share = (alone.variance(points) == 0).double().mean()
        assert 0.1 < float(share) < 0.9  # there is something to compare on both sides
    assert models[0]._fit_count == len(x)
    assert len(models[0]._references) == len(validation[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "structure",
    ["kron", *(pytest.param(name, marks=pytest.mark.slow) for name in ("diag", "full"))],
)
def test_laplace_of_two_shards_is_that_of_all_data(structure: str, tmp_path: Path) -> None:
    (x, y), validation, out = data()
    la = laplace(structure, x, y)
    assert merge_laplace(la) is la
    alone = taught(rgpr.RGPR(la, residual="paper").fit([(x, y)]), [validation], [out])
    results = two_processes(structure, tmp_path)
    assert [code for code, _ in results] == [0, 0], results
    models = [rgpr.load(tmp_path / f"store.{rank}.safetensors", mlp()) for rank in range(2)]
    points = torch.cat([x, 5 * x])
    assert torch.equal(models[0](points), models[1](points))
    torch.testing.assert_close(models[0](points), alone(points).detach(), rtol=0, atol=1e-6)


def test_what_fails_on_one_fails_on_both(tmp_path: Path) -> None:
    results = two_processes("fails", tmp_path)
    assert [code for code, _ in results] == [3, 3], results
    assert "rank 1 failed, so this one stops too" in results[0][1]
    assert "not finite" in results[1][1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other statistics", "the network's weights have other values"),
        ("other options", "r is 2.0 on rank 1 and 1.0 on rank 0"),
        ("other temperature", "temperature is ['2.5'] on rank 1 and ['1.5'] on rank 0"),
    ],
)
def test_ranks_with_other_models_are_refused(case: str, words: str, tmp_path: Path) -> None:
    """As DistributedDataParallel leaves them, where the network has BatchNorm."""
    results = two_processes(case, tmp_path)
    assert [code for code, _ in results] == [3, 3], results
    for _, output in results:
        assert f"need the same model and the same options: {words}" in output
        assert ("broadcast(t, 0)" in output) == (case == "other statistics")


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """What docs/scaling-out.md shows, started by torchrun, gives the model of one process."""
    page = (Path(__file__).parents[1] / "docs" / "scaling-out.md").read_text()
    program = page[page.index("# fit.py\n") :].partition("```")[0]
    (tmp_path / "fit.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    places = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    run = [*torchrun, "fit.py"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.count(b"200") == 1  # the report says of how many examples it is, once
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(1000, 4)
    y = alone(x).argmax(1)
    expected = rgpr.RGPR(alone).fit(x[:800], y[:800], progress=False)
    expected.calibrate(x[800:], y[800:], progress=False)
    model = rgpr.load(tmp_path / "model.safetensors", copy.deepcopy(alone))
    assert model._fit_count == 800
    torch.testing.assert_close(model.score(3 * x), expected.score(3 * x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model._references, expected._references, rtol=1e-5, atol=1e-6)

"""Networks inside of wrappers, parametrised ones, and torch.func around a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import rgpr
from networks import mlp


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one process; several are in test_distributed.py."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_replicas_are_refused() -> None:
    for wrapped in (nn.DataParallel(mlp()), nn.parallel.DistributedDataParallel(mlp())):
        with pytest.raises(TypeError, match=r"replicas .* pass network\.module"):
            rgpr.RGPR(wrapped)
        rgpr.RGPR(wrapped.module)


@pytest.mark.usefixtures("alone")
def test_fully_sharded(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(100, 4)
    plain, network = mlp(), mlp()
    network.load_state_dict(plain.state_dict())
    fully_shard(network[0], mesh=mesh)
    fully_shard(network, mesh=mesh)
    model, expected = rgpr.RGPR(network).fit(x), rgpr.RGPR(plain).fit(x)
    assert model.layers == expected.layers
    torch.testing.assert_close(model(x), expected(x))
    model.save(tmp_path / "m")
    torch.testing.assert_close(rgpr.load(tmp_path / "m", mlp())(x), expected(x))
    # A state of the sharded network is one of the plain network, too.
    rgpr.FitState(model).update(x).save(tmp_path / "s")
    fitted = rgpr.RGPR(plain)
    fitted.fit(rgpr.FitState.load(tmp_path / "s", fitted))
    torch.testing.assert_close(fitted.score(5 * x), expected.score(5 * x))
    held_out = rgpr.CalibrationState(model).update(torch.randn(60, 4))
    held_out.save(tmp_path / "c")
    assert rgpr.CalibrationState.load(tmp_path / "c", model).seen == 60
    with pytest.raises(ValueError, match=r"'0\.weight' is sharded .* shard it afterwards"):
        rgpr.load(tmp_path / "m", network)
    for flattened in (
        FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")),
        nn.Sequential(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))),
    ):
        with pytest.raises(TypeError, match=r"network itself, or shard it with .*fully_sh"):
            rgpr.RGPR(flattened)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "parametrise",
    [
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        spectral_norm,
        weight_norm,
    ],
)
def test_parametrised(parametrise: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    def network() -> nn.Module:
        layers = mlp()
        parametrise(layers[0])
        parametrise(layers[2])
        return layers

    x = torch.randn(100, 4)
    model = rgpr.RGPR(network()).fit(x)
    assert model.layers == ["input", "1", "3"]
    model.save(tmp_path / "m")
    fresh = rgpr.RGPR(network())
    fresh.load_state_dict(model.state_dict())
    for other in (rgpr.load(tmp_path / "m", network()), fresh):
        assert torch.equal(other(x), model(x))
    assert (model(1e9 * x) - 1 / 3).abs().max() < 1e-3


def adapted(network: nn.Module, *targets: str, **options: Any) -> nn.Module:
    """A network with low-rank adapters that do something."""
    peft = pytest.importorskip("peft")
    network = peft.get_peft_model(
        network, peft.LoraConfig(target_modules=list(targets), r=2, **options)
    )
    for parameter in network.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return network


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_channels=1,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("kind", ["plain", "transformer"])
def test_adapters(kind: str, tmp_path: Path) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        if kind == "plain":
            return adapted(mlp(), "0", "2")
        targets = ("query", "value", "q_proj", "v_proj")  # as versions of transformers call them
        return adapted(vit(), *targets, modules_to_save=["classifier"])

    x = torch.randn(60, 4) if kind == "plain" else torch.randn(60, 1, 16, 16)
    lora = network()
    model = rgpr.RGPR(lora).fit(x)
    merged: Any = copy.deepcopy(lora)
    expected = rgpr.RGPR(merged.merge_and_unload()).fit(x)
    assert len(model.layers) == len(expected.layers) > 2
    torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "m")
    fresh = rgpr.RGPR(network())
    fresh.load_state_dict(model.state_dict())
    for other in (rgpr.load(tmp_path / "m", network()), fresh):
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_torch_func(residual: str) -> None:
    x = torch.randn(200, 4)
    model = rgpr.RGPR(mlp(), residual=residual).fit(x, torch.arange(200) % 3)
    rows = torch.cat([x[:4], 1e3 * x[:2], 1e30 * x[:1]])

    def answer(row: Tensor) -> Tensor:
        found = model(row[None])
        assert isinstance(found, Tensor)
        return found[0]

    def strange(row: Tensor) -> Tensor:
        return model.score(row[None])[0]

    torch.testing.assert_close(torch.func.vmap(answer)(rows), model(rows))
    torch.testing.assert_close(
        torch.func.vmap(strange)(rows), model.score(rows), rtol=1e-5, atol=1e-5
    )
    wanted = rows[:6].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.score(wanted).sum(), wanted)
    for found in (
        torch.func.vmap(torch.func.grad(strange))(rows[:6]),
        torch.stack([torch.func.jacrev(strange)(row) for row in rows[:6]]),
        torch.stack([torch.func.jacfwd(strange)(row) for row in rows[:6]]),
    ):
        torch.testing.assert_close(found.to(slope), slope, rtol=1e-3, atol=1e-5)
    assert torch.func.vmap(torch.func.jacrev(answer))(rows[:6]).shape == (6, 3, 4)

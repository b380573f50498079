from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from networks import blobs, mlp
from rgpr.posteriors.swag import SWAGCollector
from rgpr_paper import training
from rgpr_paper.training import History, RunOptions, TrainingPlan
from rgpr_paper.training.augment import crop_flip

SHORT = TrainingPlan.paper_adam(epochs=4, batch_size=32, lr=1e-2, milestones=(2,))


def train(
    network: nn.Module, data: Any, plan: TrainingPlan, *, validation: Any = None, **options: Any
) -> History:
    """A run without a progress bar; the options are those of :class:`RunOptions`."""
    run = RunOptions(progress=False, **options)
    return training.train(network, data, plan, run, validation=validation)


def noisy_network() -> nn.Module:
    """Draws random numbers, and has state beside its parameters."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.LazyLinear(3),
    )


def images(n: int = 97, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    x = torch.randint(256, (n, 1, 6, 6))
    return x.to(dtype), torch.arange(n) % 3


def built(data: tuple[Tensor, Tensor]) -> nn.Module:
    network = noisy_network()
    with torch.no_grad():
        network.eval()(data[0][:2].float())  # the lazy layer learns its size
    return network


def state(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stop_after(epoch: int) -> Callable[[int, nn.Module], None]:
    def callback(now: int, network: nn.Module) -> None:
        if now > epoch:
            raise KeyboardInterrupt

    return callback


# -- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "lr"), [(TrainingPlan.paper_adam(), 1e-3), (TrainingPlan.paper_sgd(), 0.1)]
)
def test_paper_plans_divide_by_ten_at_50_75_90(plan: TrainingPlan, lr: float) -> None:
    assert (plan.epochs, plan.weight_decay) == (100, 5e-4)
    expected = [lr] * 50 + [lr / 10] * 25 + [lr / 100] * 15 + [lr / 1000] * 10
    for position in (0, 6):  # the first and the last step of an epoch of seven
        rates = [plan.learning_rate(7 * epoch + position, 7) for epoch in range(100)]
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_one_cycle_is_torchs(steps: int) -> None:
    plan = TrainingPlan.fast()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.lr, total_steps=plan.epochs * steps, cycle_momentum=False
    )
    for step in range(plan.epochs * steps):
        assert plan.learning_rate(step, steps) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < plan.epochs * steps:
            schedule.step()


def test_plans_become_the_optimisers_they_name() -> None:
    network = mlp()
    adam = TrainingPlan.paper_adam().build_optimizer(network)
    assert isinstance(adam, torch.optim.Adam)
    assert adam.defaults["weight_decay"] == 5e-4
    sgd = TrainingPlan.paper_sgd().build_optimizer(network)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.9, False)
    assert TrainingPlan.fast().build_optimizer(network).defaults["nesterov"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "lion"}, r"optimizer = 'lion'; expected one of adam, adamw, sgd"),
        ({"augment": "flip"}, r"augment = 'flip'"),
        ({"epochs": 0}, r"epochs = 0; expected at least 1"),
        ({"lr": -1.0}, r"lr = -1.0; the learning rate must be positive"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingPlan(**change)


# -- the loop -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels * 255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return (x[:1300], y[:1300]), (x[1300:], y[1300:])


def test_the_fast_plan_learns_digits(digits_data) -> None:  # type: ignore[no-untyped-def]
    data, held_out = digits_data
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    plan = TrainingPlan.fast(epochs=8, batch_size=64, augment="none")
    history = train(network, data, plan, validation=held_out)
    assert history.epochs == 8
    assert history.validation[-1] > 0.95
    assert history.losses[-1] < 0.2 < history.losses[0]
    assert len(history.seconds) == len(history.accuracies) == 8
    assert not network.training
    with torch.no_grad():
        right = (network(held_out[0].float() / 255).argmax(1) == held_out[1]).double().mean()
    assert history.validation[-1] == pytest.approx(right.item())


def test_regression_finds_a_line() -> None:
    x = torch.randn(256, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 3
    network = nn.Linear(3, 1)
    plan = replace(SHORT, loss="regression", lr=0.1, epochs=30, milestones=(20,), weight_decay=0.0)
    history = train(network, (x, y), plan, validation=(x, y))
    assert history.accuracies == []
    assert history.validation[-1] < 1e-4
    assert network.weight.flatten().tolist() == pytest.approx([1, -2, 0.5], abs=0.01)


def test_one_step_of_sgd_by_hand() -> None:
    x, y = blobs(n=8)
    network = nn.Linear(4, 3)
    weight, bias = (p.detach().clone().requires_grad_() for p in network.parameters())
    plan = TrainingPlan.paper_sgd(epochs=1, batch_size=8, augment="none")
    history = train(network, (x, y), plan)
    loss = -(x @ weight.T + bias).log_softmax(1)[torch.arange(8), y].mean()
    loss.backward()
    assert history.losses == pytest.approx([loss.item()], rel=1e-5)
    expected = weight - 0.1 * (weight.grad + 5e-4 * weight)
    torch.testing.assert_close(network.weight, expected)


def test_training_repeats_itself_and_leaves_the_global_generator_alone() -> None:
    data = images()
    plan = replace(SHORT, augment="crop-flip")
    first, second, other = built(data), built(data), built(data)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(first, data, plan)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    train(second, data, plan)
    train(other, data, plan, seed=1)
    assert_same(state(first), state(second))
    assert not torch.equal(first[0].weight, other[0].weight)


def test_uint8_images_are_scaled() -> None:
    x, y = images()
    first, second = built((x, y)), built((x, y))
    train(first, (x, y), SHORT)
    train(second, (x.float() / 255, y), SHORT)
    assert_same(state(first), state(second))


def test_a_loader_takes_the_same_steps_as_tensors_in_its_order() -> None:
    x, y = blobs(n=64)
    plan = replace(SHORT, batch_size=64)  # one step per epoch: the order is only rounding
    first = mlp()
    second = mlp()
    second.load_state_dict(first.state_dict())
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    train(first, (x, y), plan)
    train(second, loader, plan)
    torch.testing.assert_close(first[0].weight, second[0].weight, rtol=1e-3, atol=1e-5)


def test_a_last_example_on_its_own_is_left_for_another_epoch() -> None:
    data = images(65)  # batch normalisation cannot train on one example
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    train(network, data, replace(SHORT, batch_size=32))
    assert network[2].num_batches_tracked == 4 * 2


def test_callback_sees_every_epoch() -> None:
    network = mlp()
    collector = SWAGCollector(network)
    epochs = []

    def callback(epoch: int, seen: nn.Module) -> None:
        assert seen is network
        epochs.append(epoch)
        collector.collect()

    train(network, blobs(), SHORT, callback=callback)
    assert epochs == [0, 1, 2, 3]
    assert collector.count == 4


def test_a_loss_that_is_not_finite_names_its_step(tmp_path: Path) -> None:
    x, y = blobs(n=96)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    path = tmp_path / "run.safetensors"

    def spoil(epoch: int, network: nn.Module) -> None:
        if epoch == 1:
            x[40] = torch.nan

    with pytest.raises(FloatingPointError, match=r"became nan in epoch 2, step 1; lower the"):
        train(mlp(), loader, SHORT, checkpoint=path, callback=spoil)
    x[40] = 0.0
    history = train(mlp(), loader, SHORT, checkpoint=path)
    assert history.epochs == 4


@pytest.mark.parametrize(
    ("data", "change", "error", "message"),
    [
        ((torch.rand(8, 4), torch.arange(8)), {}, ValueError, r"between 0 and 7, .* 3 outputs"),
        ((torch.rand(8, 4), torch.rand(8)), {}, TypeError, r"dtype torch.float32 .* y.long\(\)"),
        ((torch.rand(8, 4), torch.zeros(7).long()), {}, ValueError, "8 inputs and 7 targets"),
        (
            (torch.rand(8, 4), torch.zeros(8).long()),
            {"augment": "crop"},
            ValueError,
            r"takes images \(N, C, H, W\)",
        ),
        (
            (torch.rand(8, 4), torch.rand(8, 2)),
            {"loss": "regression"},
            ValueError,
            r"targets have shape \(8, 2\) and the outputs \(8, 3\)",
        ),
        (torch.rand(8, 4), {}, TypeError, r"expected a pair \(x, y\)"),
        ([(torch.rand(8, 4), torch.arange(8))], {"augment": "crop"}, ValueError, "let the loader"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    data: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(mlp(), data, replace(SHORT, **change))


def test_a_frozen_network_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        train(mlp().requires_grad_(False), blobs(), SHORT)


# -- checkpoints ----------------------------------------------------------------------------------

RECIPES = {
    "adam": replace(SHORT, augment="crop"),
    "sgd": TrainingPlan.paper_sgd(epochs=4, batch_size=32, milestones=(2,)),
    "fast": TrainingPlan.fast(epochs=4, batch_size=32, lr=0.05),
}


def without_time(history: History) -> tuple[list[float], ...]:
    return history.losses, history.accuracies, history.validation


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_resumed_equals_uninterrupted_bit_for_bit(name: str, epochs: int, tmp_path: Path) -> None:
    data, plan, path = images(), RECIPES[name], tmp_path / "run.safetensors"
    whole = built(data)
    expected = train(whole, data, plan, validation=data)
    stopped = built(data)
    with pytest.raises(KeyboardInterrupt):
        train(
            stopped,
            data,
            plan,
            validation=data,
            checkpoint=path,
            callback=stop_after(epochs - 1),
        )
    resumed = built(data)
    torch.manual_seed(11)
    seen: list[int] = []
    history = train(
        resumed,
        data,
        plan,
        validation=data,
        checkpoint=path,
        callback=lambda epoch, _: seen.append(epoch),
    )
    assert seen == list(range(epochs, 4))
    assert_same(state(whole), state(resumed))
    assert without_time(history) == without_time(expected)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("own", [False, True])
def test_a_shuffling_loader_resumes_bit_for_bit(own: bool, tmp_path: Path) -> None:
    data, path = images(dtype=torch.float32), tmp_path / "run.safetensors"

    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(5) if own else None
        return DataLoader(TensorDataset(*data), batch_size=32, shuffle=True, generator=generator)

    whole, resumed = built(data), built(data)
    train(whole, loader(), SHORT)
    with pytest.raises(KeyboardInterrupt):
        train(built(data), loader(), SHORT, checkpoint=path, callback=stop_after(1))
    train(resumed, loader(), SHORT, checkpoint=path)
    assert_same(state(whole), state(resumed))


def test_a_complete_run_is_only_loaded(tmp_path: Path) -> None:
    data, path = images(), tmp_path / "run.safetensors"
    first, second = built(data), built(data)
    expected = train(first, data, SHORT, checkpoint=path)
    written = path.read_bytes()
    assert train(second, data, SHORT, checkpoint=path) == expected
    assert_same(state(first), state(second))
    assert path.read_bytes() == written


def test_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    data, path = blobs(), tmp_path / "run.safetensors"
    train(mlp(), data, SHORT, checkpoint=path)
    network = mlp()
    before = state(network)
    with pytest.raises(ValueError, match=r"another training run: lr was 0.01 and is 0.02"):
        train(network, data, replace(SHORT, lr=0.02), checkpoint=path)
    with pytest.raises(ValueError, match=r"seed was 0 and is 1"):
        train(network, data, SHORT, seed=1, checkpoint=path)
    with pytest.raises(ValueError, match=r"steps per epoch was 4 and is 2"):
        train(network, blobs(n=60), SHORT, checkpoint=path)
    assert_same(before, state(network))
    with pytest.raises(ValueError, match=r"saved with another network"):
        train(mlp(width=8), data, SHORT, checkpoint=path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    import rgpr

    x, y = blobs()
    path = tmp_path / "model.safetensors"
    rgpr.RGPR(mlp()).fit([x]).save(path)
    with pytest.raises(ValueError, match="holds no training run"):
        train(mlp(), (x, y), SHORT, checkpoint=path)
    path.write_bytes(b"cut short")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        train(mlp(), (x, y), SHORT, checkpoint=path)


# -- augmentation ---------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shifts(image: Tensor, padding: int = 2) -> list[Tensor]:
    C, H, W = image.shape
    padded = torch.zeros(C, H + 2 * padding, W + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + H, padding : padding + W] = image
    offsets = range(2 * padding + 1)
    return [padded[:, i : i + H, j : j + W] for i in offsets for j in offsets]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("flip", [False, True])
def test_each_image_is_one_of_its_shifts(dtype: torch.dtype, flip: bool) -> None:
    x = torch.randint(1, 256, (64, 2, 5, 7)).to(dtype)
    out = crop_flip(x, generator(), padding=2, flip=flip)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    mirrored = 0
    for image, result in zip(x, out, strict=True):
        plain = any(torch.equal(result, shift) for shift in shifts(image))
        assert plain or any(torch.equal(result, shift) for shift in shifts(image.flip(2)))
        mirrored += not plain
    assert 15 < mirrored < 50 if flip else mirrored == 0


def test_augmentation_is_seeded() -> None:
    x = torch.rand(16, 1, 8, 8)
    first = crop_flip(x, generator(), flip=True)
    assert torch.equal(first, crop_flip(x, generator(), flip=True))
    assert not torch.equal(first, crop_flip(x, generator(1), flip=True))
    assert not torch.equal(first, x)

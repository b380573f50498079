"""One training loop for the experiments: data on the device, no waiting for it, resumable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from rgpr._network.checks import network_dtype_device
from rgpr._network.loaders import labelled
from rgpr._network.running import evaluating

from . import checkpoint as checkpoints
from .augment import crop_flip
from .recipe import Recipe

__all__ = ["History", "train"]

Data = tuple[Tensor, Tensor] | Iterable[Any]


@dataclass
class History:
    """What happened in each epoch, those before a resumption included.

    Attributes:
        losses: Mean training loss.
        accuracies: Share of training examples that were right when their step was made, in
            training mode; empty for regression.
        validation: Accuracy on the validation data after the epoch, or the mean squared error for
            regression; empty without such data.
        seconds: Time of the epoch's steps.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """How many epochs the weights have seen."""
        return len(self.losses)


def train(
    network: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    validation: Data | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    callback: Callable[[int, nn.Module], None] | None = None,
) -> History:
    """Train ``network`` in place; afterwards it is on ``device`` and in evaluation mode.

    The global random generators are left as they were. With the same seed a run repeats itself
    bit for bit on a CPU, also when it was interrupted and resumed; on a GPU the order of sums may
    differ.

    Args:
        network: Returns logits ``(B, C)``, or outputs ``(B, K)`` for regression.
        data: A pair ``(x, y)`` of tensors, kept on the device as a whole, or a DataLoader.
            Images in uint8 are divided by 255, a batch at a time. A pair is shuffled, and
            augmented if the recipe says so; a loader does both itself.
        recipe: The optimiser's settings; see :class:`Recipe`.
        validation: Data in the same form, looked at after every epoch.
        device: Where to train; by default where the network is.
        seed: Of the order of the data, the augmentation and dropout. The network is already
            initialised: seed that where it is built.
        checkpoint: A file that is replaced at the end of every epoch. If it exists the run goes
            on from there, and nothing is trained if it was complete. Of a loader, only random
            numbers that it draws from torch repeat themselves.
        progress: Show a progress bar where there is a terminal.
        callback: Called as ``callback(epoch, network)`` after each epoch, counted from zero;
            before the checkpoint is written, so an epoch that it interrupts is run again.

    Raises:
        FloatingPointError: The loss is not finite; names epoch and step. The checkpoint keeps the
            epoch before.
        TypeError: The data are not tensors, or targets not of the kind that the loss takes.
        ValueError: The data do not fit the recipe or the network, or the checkpoint is of
            another run.
    """
    device = torch.device(device or network_dtype_device(network)[1] or "cpu")
    network.to(device)
    source = _source(data, network, recipe, device, seed)
    held_out = None if validation is None else _source(validation, network, recipe, device, None)
    images = isinstance(source, _Tensors) and source.x.dim() == 4
    if images and device.type == "cuda":
        network.to(memory_format=torch.channels_last)
    optimizer = recipe.build_optimizer(network)
    history = History()
    run = checkpoints.identity(recipe, seed, len(source))
    own_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=own_devices), _tuned_convolutions(device):
        _seed(seed, device)
        generators = checkpoints.Generators(device, run=source.generator)
        if checkpoint is not None and Path(checkpoint).exists():
            saved = checkpoints.load(checkpoint, network, optimizer, generators, run)
            history = History(**saved)
        epochs = tqdm(
            range(history.epochs, recipe.epochs),
            initial=history.epochs,
            total=recipe.epochs,
            desc="training",
            leave=False,
            disable=None if progress else True,
        )
        for epoch in epochs:
            _epoch(network, source, recipe, optimizer, epoch, history)
            if held_out is not None:
                history.validation.append(_evaluate(network, held_out, recipe))
            if callback is not None:
                callback(epoch, network)
            if checkpoint is not None:
                checkpoints.save(checkpoint, network, optimizer, generators, run, asdict(history))
            measures = (history.losses, history.accuracies, history.validation)
            names = ("loss", "accuracy", "validation")
            epochs.set_postfix(
                {n: f"{m[-1]:.4g}" for n, m in zip(names, measures, strict=True) if m}
            )
    if images and device.type == "cuda":
        network.to(memory_format=torch.contiguous_format)  # as it came
    network.eval()
    return history


def _epoch(
    network: nn.Module,
    source: _Tensors | _Loader,
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    history: History,
) -> None:
    """All steps of one epoch. The device is asked for numbers once, at the end."""
    started = time.perf_counter()
    network.train()
    losses: list[Tensor] = []
    sizes: list[int] = []
    right = torch.zeros((), device=source.device)
    for step, (x, y) in enumerate(source.batches()):
        rate = recipe.learning_rate(epoch * len(source) + step, len(source))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        outputs, loss = _loss(network, x, y, recipe)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        sizes.append(len(x))
        if recipe.loss == "classification":
            right += (outputs.detach().argmax(1) == y).sum()
    if not losses:
        raise ValueError("the loader gave no batch; is it an iterator that was used up before?")
    values = torch.stack(losses).double()
    finite = values.isfinite().tolist()
    if not all(finite):
        step = finite.index(False)
        raise FloatingPointError(
            f"the loss became {values[step].item()} in epoch {epoch}, step {step}; lower the "
            f"learning rate (lr = {recipe.lr}), or look for values in the data that are not finite"
        )
    examples = sum(sizes)
    weights = torch.tensor(sizes, dtype=torch.float64, device=values.device) / examples
    history.losses.append((weights @ values).item())
    if recipe.loss == "classification":
        history.accuracies.append(right.item() / examples)
    history.seconds.append(time.perf_counter() - started)


def _loss(network: nn.Module, x: Tensor, y: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.bf16 and x.is_cuda):
        outputs = network(x)
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if recipe.loss == "classification":
        return outputs, F.cross_entropy(outputs, y, label_smoothing=recipe.label_smoothing)
    y = y.to(outputs.dtype)
    if y.dim() == 1:
        y = y[:, None]
    if y.shape != outputs.shape:
        raise ValueError(
            f"targets have shape {tuple(y.shape)} and the outputs {tuple(outputs.shape)}; they "
            "must agree for the mean squared error"
        )
    return outputs, F.mse_loss(outputs, y)


@torch.no_grad()
def _evaluate(network: nn.Module, source: _Tensors | _Loader, recipe: Recipe) -> float:
    """Accuracy, or the mean squared error for regression."""
    total = torch.zeros((), dtype=torch.float64, device=source.device)
    examples = 0
    with evaluating(network):
        for x, y in source.batches():
            outputs, loss = _loss(network, x, y, recipe)
            if recipe.loss == "classification":
                total += (outputs.argmax(1) == y).sum()
            else:
                total += len(x) * loss
            examples += len(x)
    return total.item() / examples


def _source(
    data: Data, network: nn.Module, recipe: Recipe, device: torch.device, seed: int | None
) -> _Tensors | _Loader:
    """The data in a form that gives batches on the device; no seed means in order, unchanged."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        return _Tensors(data[0], data[1], network, recipe, device, seed)
    return _Loader(data, network, recipe, device)


class _Tensors:
    """A data set held on the device as a whole."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        network: nn.Module,
        recipe: Recipe,
        device: torch.device,
        seed: int | None,
    ) -> None:
        if len(x) != len(y) or len(x) < 2:
            raise ValueError(f"{len(x)} inputs and {len(y)} targets; expected two or more of each")
        if recipe.augment != "none" and seed is not None and x.dim() != 4:
            raise ValueError(
                f"augment = '{recipe.augment}' takes images (N, C, H, W), and the inputs have "
                f"shape {tuple(x.shape)}; use augment='none'"
            )
        self.x, self.y, self.device, self.recipe = x.to(device), y.to(device), device, recipe
        self.dtype = network_dtype_device(network)[0] or torch.get_default_dtype()
        self.generator = None
        if seed is not None:
            self.generator = torch.Generator(device).manual_seed(seed)
        if recipe.loss == "classification":
            with torch.no_grad(), evaluating(network):
                self._check_labels(network(self._prepare(self.x[:2])).shape[-1])

    def __len__(self) -> int:
        full, rest = divmod(len(self.x), self.recipe.batch_size)
        return full + (rest > 1)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        n, size, generator = len(self.x), self.recipe.batch_size, self.generator
        if generator is None:
            for rows in torch.split(torch.arange(n, device=self.device), size):
                yield self._prepare(self.x[rows]), self.y[rows]
            return
        order = torch.randperm(n, generator=generator, device=self.device)
        # One example alone has no spread for batch normalisation: it waits for another epoch.
        for rows in torch.split(order, size)[: len(self)]:
            x = self.x[rows]
            if self.recipe.augment != "none":
                x = crop_flip(x, generator, flip=self.recipe.augment == "crop-flip")
            yield self._prepare(x), self.y[rows]

    def _prepare(self, x: Tensor) -> Tensor:
        return _prepare(x, self.dtype)

    def _check_labels(self, classes: int) -> None:
        if self.y.dtype != torch.long or self.y.dim() != 1:
            raise TypeError(
                f"labels have dtype {self.y.dtype} and shape {tuple(self.y.shape)}; expected one "
                "class index for each example, as y.long()"
            )
        low, high = self.y.min().item(), self.y.max().item()
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels lie between {low} and {high}, but the network has {classes} outputs; "
                f"they must lie between 0 and {classes - 1}"
            )


class _Loader:
    """A loader of the user's: its own order, batches and augmentation."""

    def __init__(
        self, loader: Iterable[Any], network: nn.Module, recipe: Recipe, device: torch.device
    ) -> None:
        if isinstance(loader, Tensor) or not hasattr(loader, "__len__"):
            raise TypeError(
                f"the data are a {type(loader).__name__}; expected a pair (x, y) of tensors or a "
                "loader with a length"
            )
        self.loader, self.device = loader, device
        self.dtype = network_dtype_device(network)[0] or torch.get_default_dtype()
        self.generator: torch.Generator | None = getattr(loader, "generator", None)
        if recipe.augment != "none":
            raise ValueError(
                f"augment = '{recipe.augment}' is for tensors held on the device; let the loader's "
                "data set do it and use augment='none', or pass (x, y)"
            )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in labelled(self.loader, progress=False, description=""):
            x = x.to(self.device, non_blocking=True)
            yield _prepare(x, self.dtype), y.to(self.device, non_blocking=True)


def _prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.uint8:
        x = x.to(dtype) / 255
    elif x.is_floating_point():
        x = x.to(dtype)
    if x.dim() == 4 and x.is_cuda:
        x = x.to(memory_format=torch.channels_last)
    return x


def _seed(seed: int, device: torch.device) -> None:
    """Seed the global generators that this run draws from, and not those of other devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def _tuned_convolutions(device: torch.device) -> Iterator[None]:
    """Let cuDNN try its algorithms: the shapes stay the same for thousands of steps."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before

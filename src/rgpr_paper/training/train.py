"""One training loop for the experiments, which can be stopped and resumed after any epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rgpr._network.checks import network_dtype_device
from rgpr._network.guards import evaluating
from rgpr._progress import bar

from . import checkpoint as checkpoints
from .batches import Batches, Data, HeldTensors, batches_of
from .plan import TrainingPlan

__all__ = ["History", "RunOptions", "train"]


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

    def latest(self) -> dict[str, str]:
        """The measures of the last epoch, for a progress bar."""
        measures = {
            "loss": self.losses,
            "accuracy": self.accuracies,
            "validation": self.validation,
        }
        return {name: f"{values[-1]:.4g}" for name, values in measures.items() if values}


@dataclass(frozen=True)
class RunOptions:
    """How a run goes, beside its plan. Of all of these the seed alone changes what is learnt.

    Compiling and the device change it within rounding.

    Attributes:
        seed: Seed of the order of the data, the augmentation and dropout. The network is already
            initialised: seed that where it is built.
        device: Where to train; by default where the network is.
        checkpoint: A file that is replaced at the end of every epoch. If it exists the run goes
            on from there, and nothing is trained if it was complete. A loader repeats only those
            random numbers that it draws from torch.
        compile: Let ``torch.compile`` fuse the passes of a network on a CUDA device. It takes about
            a minute, once for each architecture and machine, and pays where several networks are
            trained.
        progress: Show a progress bar where there is a terminal.
        callback: Called as ``callback(epoch, network)`` after each epoch, counted from zero, and
            before the checkpoint is written, so that an epoch it interrupts is run again.
    """

    seed: int = 0
    device: torch.device | str | None = None
    checkpoint: str | os.PathLike[str] | None = None
    compile: bool = False
    progress: bool = True
    callback: Callable[[int, nn.Module], None] | None = None


def train(
    network: nn.Module,
    data: Data,
    plan: TrainingPlan,
    options: RunOptions | None = None,
    *,
    validation: Data | None = None,
) -> History:
    """Train ``network`` in place; afterwards it is on the run's device and in evaluation mode.

    The global random generators are left as they were. With the same seed a run repeats itself
    bit for bit on a CPU, also when it was interrupted and resumed; on a GPU the order of sums may
    differ.

    Args:
        network: Returns logits ``(B, C)``, or outputs ``(B, K)`` for regression.
        data: A pair ``(x, y)`` of tensors, kept on the device as a whole, or a DataLoader.
            Images in uint8 are divided by 255, a batch at a time. A pair is shuffled, and
            augmented if the plan says so; a loader does both itself.
        plan: The optimiser's settings; see :class:`TrainingPlan`.
        options: Seed, device, checkpoint and the like; see :class:`RunOptions`.
        validation: Data in the same form, looked at after every epoch.

    Raises:
        FloatingPointError: The loss is not finite; names epoch and step. The checkpoint keeps the
            epoch before.
        TypeError: The data are not tensors, or targets not of the kind that the loss takes.
        ValueError: The data do not fit the plan or the network, or the checkpoint is of
            another run.
    """
    options = options or RunOptions()
    device = torch.device(options.device or network_dtype_device(network)[1] or "cpu")
    network.to(device)
    source = batches_of(data, network, plan, device, options.seed)
    held_out = None if validation is None else batches_of(validation, network, plan, device, None)
    images = isinstance(source, HeldTensors) and source.x.dim() == 4
    if images and device.type == "cuda":
        network.to(memory_format=torch.channels_last)
    own_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=own_devices), _tuned_convolutions(device):
        _seed(options.seed, device)
        history = _epochs(network, source, held_out, plan, options)
    if images and device.type == "cuda":
        network.to(memory_format=torch.contiguous_format)  # as the caller gave it
    network.eval()
    return history


def _epochs(
    network: nn.Module,
    source: Batches,
    held_out: Batches | None,
    plan: TrainingPlan,
    options: RunOptions,
) -> History:
    """All epochs that the checkpoint does not have yet."""
    optimizer = plan.build_optimizer(network)
    history = History()
    run = checkpoints.identity(plan, options.seed, len(source))
    generators = checkpoints.Generators(source.device, run=source.generator)
    file = options.checkpoint
    if file is not None and Path(file).exists():
        history = History(**checkpoints.load(file, network, optimizer, generators, run))
    left = range(history.epochs, plan.epochs)
    epochs = bar(left, "training", options.progress, initial=history.epochs, total=plan.epochs)
    fused = options.compile and source.device.type == "cuda"
    call = _compiled(network, plan) if fused else network
    for epoch in epochs:
        network.train()
        _epoch(call, source, plan, optimizer, epoch, history)
        if held_out is not None:
            history.validation.append(_evaluate(network, held_out, plan))
        if options.callback is not None:
            options.callback(epoch, network)
        if file is not None:
            checkpoints.save(file, network, optimizer, generators, run, asdict(history))
        epochs.set_postfix(history.latest())
    return history


def _compiled(network: nn.Module, plan: TrainingPlan) -> Callable[[Tensor], Tensor]:
    """Compiles the network for whole batches; a smaller last one is not worth another graph."""
    compiled = torch.compile(network, dynamic=False)
    return lambda x: compiled(x) if len(x) == plan.batch_size else network(x)


def _epoch(
    network: Callable[[Tensor], Tensor],
    source: Batches,
    plan: TrainingPlan,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    history: History,
) -> None:
    """All steps of one epoch. The device is asked for numbers once, at the end."""
    started = time.perf_counter()
    losses: list[Tensor] = []
    sizes: list[int] = []
    right = torch.zeros((), device=source.device)
    for step, (x, y) in enumerate(source.batches()):
        rate = plan.learning_rate(epoch * len(source) + step, len(source))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        outputs, loss = _loss(network, x, y, plan)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        sizes.append(len(x))
        if plan.loss == "classification":
            right += (outputs.detach().argmax(1) == y).sum()
    if not losses:
        raise ValueError("the loader gave no batch; is it an iterator that was used up before?")
    values = torch.stack(losses).double()
    finite = values.isfinite().tolist()
    if not all(finite):
        step = finite.index(False)
        raise FloatingPointError(
            f"the loss became {values[step].item()} in epoch {epoch}, step {step}; lower the "
            f"learning rate (lr = {plan.lr}), or look for values in the data that are not finite"
        )
    examples = sum(sizes)
    weights = torch.tensor(sizes, dtype=torch.float64, device=values.device) / examples
    history.losses.append((weights @ values).item())
    if plan.loss == "classification":
        history.accuracies.append(right.item() / examples)
    history.seconds.append(time.perf_counter() - started)


def _loss(
    network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, plan: TrainingPlan
) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=plan.bf16 and x.is_cuda):
        outputs = network(x)
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if plan.loss == "classification":
        return outputs, F.cross_entropy(outputs, y, label_smoothing=plan.label_smoothing)
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
def _evaluate(network: nn.Module, source: Batches, plan: TrainingPlan) -> float:
    """Accuracy, or the mean squared error for regression."""
    total = torch.zeros((), dtype=torch.float64, device=source.device)
    examples = 0
    with evaluating(network) as modes, modes:
        for x, y in source.batches():
            outputs, loss = _loss(network, x, y, plan)
            if plan.loss == "classification":
                total += (outputs.argmax(1) == y).sum()
            else:
                total += len(x) * loss
            examples += len(x)
    return total.item() / examples


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

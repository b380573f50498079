"""The training data as batches on the device: tensors held there as a whole, or a user's loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rgpr._network.checks import network_dtype_device
from rgpr._network.guards import evaluating
from rgpr._network.loaders import labelled, on_device

from .augment import crop_flip, strong
from .plan import TrainingPlan

__all__ = ["Batches", "Data", "HeldTensors", "UsersLoader", "batches_of"]

Data = tuple[Tensor, Tensor] | Iterable[Any]


def batches_of(
    data: Data, network: nn.Module, plan: TrainingPlan, device: torch.device, seed: int | None
) -> Batches:
    """The data in a form that gives batches on the device; no seed means in order, unchanged."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        return HeldTensors(data[0], data[1], network, plan, device, seed)
    return UsersLoader(data, network, plan, device)


class HeldTensors:
    """A data set held on the device as a whole."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        network: nn.Module,
        plan: TrainingPlan,
        device: torch.device,
        seed: int | None,
    ) -> None:
        if len(x) != len(y) or len(x) < 2:
            raise ValueError(f"{len(x)} inputs and {len(y)} targets; expected two or more of each")
        if plan.augment != "none" and seed is not None and x.dim() != 4:
            raise ValueError(
                f"augment = '{plan.augment}' takes images (N, C, H, W), and the inputs have "
                f"shape {tuple(x.shape)}; use augment='none'"
            )
        self.x, self.y, self.device, self.plan = x.to(device), y.to(device), device, plan
        self.dtype = network_dtype_device(network)[0] or torch.get_default_dtype()
        self.generator = None
        if seed is not None:
            self.generator = torch.Generator(device).manual_seed(seed)
        if plan.loss == "classification":
            with torch.no_grad(), evaluating(network) as modes, modes:
                self._check_labels(network(self._prepare(self.x[:2])).shape[-1])

    def __len__(self) -> int:
        full, rest = divmod(len(self.x), self.plan.batch_size)
        return full + (rest > 1)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        n, size, generator = len(self.x), self.plan.batch_size, self.generator
        if generator is None:
            for rows in torch.split(torch.arange(n, device=self.device), size):
                yield self._prepare(self.x[rows]), self.y[rows]
            return
        order = torch.randperm(n, generator=generator, device=self.device)
        # One example alone has no spread for batch normalisation: it waits for another epoch.
        for rows in torch.split(order, size)[: len(self)]:
            x = self.x[rows]
            if self.plan.augment == "strong":
                x = strong(x, generator)
            elif self.plan.augment != "none":
                x = crop_flip(x, generator, flip=self.plan.augment == "crop-flip")
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


class UsersLoader:
    """A loader of the user's: its own order, batches and augmentation."""

    def __init__(
        self, loader: Iterable[Any], network: nn.Module, plan: TrainingPlan, device: torch.device
    ) -> None:
        if isinstance(loader, Tensor) or not hasattr(loader, "__len__"):
            raise TypeError(
                f"the data are a {type(loader).__name__}; expected a pair (x, y) of tensors or a "
                "loader with a length"
            )
        self.loader, self.device = loader, device
        self.dtype = network_dtype_device(network)[0] or torch.get_default_dtype()
        self.generator: torch.Generator | None = getattr(loader, "generator", None)
        if plan.augment != "none":
            raise ValueError(
                f"augment = '{plan.augment}' is for tensors held on the device; let the loader's "
                "data set do it and use augment='none', or pass (x, y)"
            )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in labelled(self.loader, progress=False, description=""):
            moved: Tensor = on_device(x, self.device)
            yield _prepare(moved, self.dtype), y.to(self.device, non_blocking=True)


def _prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.uint8:
        x = x.to(dtype) / 255
    elif x.is_floating_point():
        x = x.to(dtype)
    if x.dim() == 4 and x.is_cuda:
        x = x.to(memory_format=torch.channels_last)
    return x


Batches = HeldTensors | UsersLoader

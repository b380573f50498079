r"""SWAG: a Gaussian fitted to the iterates of SGD (Maddox et al., 2019).

The mean is the average of the iterates. The covariance is half a diagonal, half low rank: with
:math:`\Sigma_\text{diag} = \overline{\theta^2} - \bar\theta^2` and :math:`D` the deviations of the
last :math:`K` iterates from the running mean,

.. math:: \theta = \bar\theta + \sqrt{s}\,\Big(\tfrac{1}{\sqrt2}\,\Sigma_\text{diag}^{1/2} z_1
          + \tfrac{1}{\sqrt{2(K-1)}}\, D z_2\Big), \qquad z_1, z_2 \sim N(0, I).

Batch normalisation's running statistics belong to one set of weights. They are estimated anew for
every sample, which takes a pass over the training data each, so with such layers the samples are a
fixed bank: only their statistics and seeds are kept, not their weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn

from .._network.batches import run
from .._network.loaders import inputs, on_device
from .._network.running import plain_module
from .._network.sources import as_batches, check_read_again
from .._progress import bar
from .sampled import WeightPosterior, normal_like, seed_from

__all__ = ["SWAG", "SWAGCollector"]

_running_mean = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]


class SWAG(WeightPosterior):
    """Samples of weights from the Gaussian of SGD iterates; see :class:`SWAGCollector`.

    Args:
        network: The network with the averaged weights.
        tensors: For each parameter ``spread_i`` (the diagonal's standard deviations) and
            ``deviations_i`` of shape ``(K, ...)``; for each running statistic ``statistic_i`` of
            shape ``(n_samples, ...)``.
        scale: Factor on the covariance.
        n_samples: Number of samples behind the moments, and in the bank if there is one.
        seed: Their seed.
    """

    kind = "swag"

    def __init__(
        self,
        network: nn.Module,
        tensors: Mapping[str, Tensor],
        *,
        scale: float = 1.0,
        n_samples: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__(network, n_samples=n_samples, seed=seed)
        if not scale >= 0:
            raise ValueError(f"scale = {scale} must not be negative: it multiplies a covariance")
        self.scale = scale
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())

    def weights(self, generator: torch.Generator | None) -> Iterator[Mapping[str, Tensor]]:
        statistics = _statistics(self.network)
        if not statistics:
            while True:
                yield self._draw(generator)
        names = list(statistics)
        while True:
            for index in torch.randperm(self.n_samples, generator=_on_cpu(generator)).tolist():
                weights = self._draw(torch.Generator().manual_seed(self.seed + index))
                own = {n: self.get_buffer(f"statistic_{i}")[index] for i, n in enumerate(names)}
                yield {**weights, **own}

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        rank = len(self.get_buffer("deviations_0"))
        low_rank = normal_like(self.get_buffer("spread_0").new_empty(rank), generator)
        weights = {}
        for i, (name, mean) in enumerate(self.network.named_parameters()):
            spread, deviations = self.get_buffer(f"spread_{i}"), self.get_buffer(f"deviations_{i}")
            step = spread * normal_like(spread, generator) / 2**0.5
            step = step + torch.tensordot(low_rank, deviations, 1) / (2 * (rank - 1)) ** 0.5
            weights[name] = mean + (self.scale**0.5 * step).to(mean)
        return weights

    def estimate_statistics(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Running statistics of every sample in the bank, by a pass over the data each."""
        check_read_again(train_loader, "SWAG")
        twin = copy.deepcopy(self.network)
        collected: list[list[Tensor]] = []
        for index in bar(range(self.n_samples), "SWAG statistics", progress):
            weights = self._draw(torch.Generator().manual_seed(self.seed + index))
            twin.load_state_dict(weights, strict=False)
            _update_statistics(twin, train_loader)
            collected.append([t.clone() for t in _statistics(twin).values()])
        for i, rows in enumerate(zip(*collected, strict=True)):
            self.register_buffer(f"statistic_{i}", torch.stack(rows))
        return self

    def config(self) -> dict[str, Any]:
        return {"scale": self.scale, "n_samples": self.n_samples, "seed": self.seed}


class SWAGCollector:
    """Collects iterates in anyone's training loop.

    Call :meth:`collect` after each epoch (or every so many steps) once SGD moves around its
    optimum, with a constant, fairly large learning rate; then :meth:`posterior`.

    Args:
        network: The network in training.
        rank: Number of iterates whose deviations are kept.
    """

    def __init__(self, network: nn.Module, *, rank: int = 20) -> None:
        if rank < 2:
            raise ValueError(f"rank = {rank}; the low-rank part needs at least two deviations")
        self.network, self.rank = plain_module(network), rank
        self._average = AveragedModel(self.network, multi_avg_fn=_running_mean)
        self._squares = [torch.zeros_like(p) for p in self.network.parameters()]
        self._deviations: list[list[Tensor]] = []
        self.count = 0

    @torch.no_grad()
    def collect(self) -> None:
        """Take in the network's present weights."""
        self._average.update_parameters(self.network)
        self.count += 1
        pairs = zip(self.network.parameters(), self._average.module.parameters(), strict=True)
        self._deviations.append([(p - mean).detach().clone() for p, mean in pairs])
        del self._deviations[: -self.rank]
        for square, p in zip(self._squares, self.network.parameters(), strict=True):
            square += (p.detach().square() - square) / self.count

    def posterior(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        scale: float = 1.0,
        n_samples: int = 20,
        seed: int = 0,
        progress: bool = True,
    ) -> SWAG:
        """The Gaussian of what was collected.

        Args:
            train_loader: Needed for networks with batch normalisation.
            scale: Factor on the covariance.
            n_samples: Number of samples behind the moments.
            seed: Their seed.
            progress: Show a progress bar where there is a terminal.

        Raises:
            ValueError: Fewer than two iterates, or no loader where statistics are needed.
        """
        if self.count < 2:
            raise ValueError(
                f"{self.count} SWAG iterates were collected, and two is the least; call "
                "collector.collect() after each epoch of SGD"
            )
        network = copy.deepcopy(self._average.module)
        if _statistics(network):
            if train_loader is None:
                raise ValueError(
                    "the network has batch normalisation, whose statistics must be estimated for "
                    "every sample: pass the training loader"
                )
            check_read_again(train_loader, "SWAG")
            _update_statistics(network, train_loader)
        tensors: dict[str, Tensor] = {}
        means = list(network.parameters())
        for i, (mean, square) in enumerate(zip(means, self._squares, strict=True)):
            tensors[f"spread_{i}"] = (square - mean.detach().square()).clamp_min(0).sqrt()
            tensors[f"deviations_{i}"] = torch.stack([row[i] for row in self._deviations])
        swag = SWAG(network, tensors, scale=scale, n_samples=n_samples, seed=seed)
        if _statistics(network) and train_loader is not None:
            swag.estimate_statistics(train_loader, progress=progress)
        return swag

    @classmethod
    def from_checkpoints(
        cls, network: nn.Module, checkpoints: Iterable[Mapping[str, Tensor]], *, rank: int = 20
    ) -> Self:
        """From saved ``state_dict``s of the network, in the order of training.

        The network itself is not changed.
        """
        twin = copy.deepcopy(plain_module(network))
        collector = cls(twin, rank=rank)
        for checkpoint in checkpoints:
            twin.load_state_dict(checkpoint)
            collector.collect()
        return collector


def _statistics(network: nn.Module) -> dict[str, Tensor]:
    """The running statistics of batch normalisation layers, by name."""
    return {
        name: buffer
        for name, buffer in network.named_buffers()
        if name.rpartition(".")[2] in ("running_mean", "running_var")
    }


class _Called(nn.Module):
    """The network as torch's function runs it: on one argument."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        return run(self.network, x)


def _update_statistics(network: nn.Module, train_loader: Iterable[Any]) -> None:
    device = next(network.parameters()).device
    data = as_batches(train_loader, network)
    given = inputs(data, network, progress=False, description="SWAG statistics")
    update_bn(((on_device(x, device),) for x in given), _Called(network))
    network.eval()


def _on_cpu(generator: torch.Generator | None) -> torch.Generator | None:
    """A generator for ``randperm`` on the CPU, seeded by one that may live elsewhere."""
    if generator is None or generator.device.type == "cpu":
        return generator
    return torch.Generator().manual_seed(seed_from(generator))

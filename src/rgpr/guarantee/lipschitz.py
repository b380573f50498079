r"""An upper bound on how fast a network's outputs can grow: rigorous, layer by layer.

The network is traced with ``torch.fx`` and a Euclidean Lipschitz constant is carried along its
graph: products along a chain, sums at residual connections. Every factor is an upper bound, never
an estimate from below:

- linear: the spectral norm;
- convolution: the least of several bounds, each valid for every size of the image, zero padding
  and stride: Schur's test; the norm of the kernel as a matrix times the root of how often a pixel
  is used; and for small kernels the largest norm of their Fourier symbol on a grid plus what it can
  change between grid points (zero padding compresses the convolution on the infinite grid);
- batch normalisation in evaluation mode: the largest factor of a channel;
- pooling: the root of the largest row sum times the largest column sum, or for maxima the root of
  how many windows share a pixel;
- activations by their steepest slope; flattening, dropout in evaluation mode and the like by one.

Anything else is refused by name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .._network.running import evaluating

__all__ = ["NotBoundedError", "lipschitz"]

# Roundings of the factors themselves.
_SLACK = 1 + 1e-6
# Symbols are formed for kernels of at most so many numbers, on a grid of this side.
_SYMBOL, _GRID = 64 * 64 * 9, 32

_SLOPES: dict[type[nn.Module], float] = {
    nn.Identity: 1.0,
    nn.Flatten: 1.0,
    nn.Unflatten: 1.0,
    nn.Dropout: 1.0,
    nn.Dropout1d: 1.0,
    nn.Dropout2d: 1.0,
    nn.Dropout3d: 1.0,
    nn.ReLU: 1.0,
    nn.ReLU6: 1.0,
    nn.Hardtanh: 1.0,
    nn.Softplus: 1.0,
    nn.Tanh: 1.0,
    nn.Softsign: 1.0,
    nn.LogSigmoid: 1.0,
    nn.Hardsigmoid: 1 / 6,
    nn.Sigmoid: 0.25,
    nn.GELU: 1.13,
    nn.SiLU: 1.1,
    nn.Mish: 1.09,
    nn.Hardswish: 1.5,
    nn.SELU: 1.7581,
}
_PIECEWISE_AFFINE = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.PReLU)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)

_SAME_FUNCTIONS: set[Any] = {
    torch.flatten,
    torch.reshape,
    torch.squeeze,
    torch.unsqueeze,
    torch.relu,
    torch.permute,
    torch.transpose,
    torch.tanh,
    F.relu,
    F.relu_,
    F.relu6,
    F.hardtanh,
    F.softplus,
    F.tanh,
}
_SAME_METHODS = {
    "contiguous",
    "flatten",
    "permute",
    "relu",
    "relu_",
    "reshape",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
    "tanh",
    "float",
}
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_SUMS: set[Any] = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub}


class NotBoundedError(TypeError):
    """A part of the network for which no bound is known."""


def lipschitz(
    network: nn.Module, center: Tensor, scale: Tensor, *, quick: bool = False
) -> tuple[float, Tensor, bool]:
    """A bound for ``z -> network(center + scale * z)``.

    Args:
        network: The network.
        center: One input, without a batch dimension.
        scale: Of each of its entries, of the same shape.
        quick: Give a number that the bound is not below, without decomposing any matrix. Whoever
            has no use for a bound that large need not compute it.

    Returns:
        The constant, the outputs ``(C,)`` at the center, and whether all is piecewise affine.

    Raises:
        NotBoundedError: Names the first part that has no bound.
    """
    # Inside another module, the network's own hooks and defaults are part of what is traced.
    whole = nn.Sequential(network)
    with evaluating(network), torch.no_grad():
        try:
            graph = fx.symbolic_trace(whole)
        except Exception as error:  # whatever a forward pass may raise on symbols
            raise NotBoundedError(
                f"the network cannot be traced ({error}), so its parts are not known; its forward "
                "pass must not depend on the values of its input"
            ) from error
        walk = _Walk(graph, scale, quick)
        walk.extra_traceback = False  # the message says which part it is
        output = walk.run(center[None])
        if not isinstance(output, Tensor) or walk.result is None:
            raise NotBoundedError(
                f"the network returns {type(output).__name__}, not a tensor of outputs"
            )
        if not quick:
            _check_graph(graph, network, center, scale)
    return walk.result * _SLACK, output.reshape(-1), walk.affine


def _check_graph(graph: fx.GraphModule, network: nn.Module, center: Tensor, scale: Tensor) -> None:
    """Refuse a graph that is not the network: a branch on types or values that tracing lost."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((4, *center.shape), generator=generator).to(center)
    sizes = torch.tensor([0.0, 1.0, 10.0, 1000.0]).to(center).reshape(-1, *[1] * center.dim())
    x = center + scale.to(center) * noise * sizes
    ours, theirs = graph(x.clone()), network(x.clone())
    close = isinstance(theirs, Tensor) and torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2)
    if not close:
        raise NotBoundedError(
            "the network's traced graph does not compute what the network does: its forward pass "
            "depends on more than its input, so no bound is known"
        )


class _Walk(fx.Interpreter):
    """Runs the graph on one input and carries the constants along."""

    def __init__(self, graph: fx.GraphModule, scale: Tensor, quick: bool) -> None:
        super().__init__(graph)
        self.scale, self.quick = scale, quick
        self.constants: dict[fx.Node, float] = {}
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.result: float | None = None
        self.affine = True
        # Nodes that are still the input, entry by entry.
        self.plain: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if module is not None:
            self._refuse(n, module)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if _in_place(n, module, kwargs):
            _refuse_aliases(n)
        value = super().run_node(n)
        if n.op == "output":
            source = n.args[0]
            self.result = self.constants.get(source) if isinstance(source, fx.Node) else None
        elif isinstance(value, Tensor):
            self.shapes[n] = value.shape
            if module is None:
                self.constants[n] = self._call(n, value, args, kwargs)
            else:
                self.constants[n] = self._module(module, n, _operands(n, self.constants)[0])
        elif module is not None:
            raise NotBoundedError(_unknown(n, module))
        return value

    def _refuse(self, n: fx.Node, module: nn.Module) -> None:
        if isinstance(module, _NORMALISATIONS) and module.running_var is None:
            raise NotBoundedError(
                f"{_name(n)} is a {type(module).__name__} without running statistics; it divides "
                "by the batch's own spread, which has no bound"
            )
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotBoundedError(
                f"{_name(n)} has hooks, which may change its outputs; remove them"
            )

    def _call(self, n: fx.Node, value: Tensor, args: Any, kwargs: Any) -> float:
        """The constant after an input, a parameter, a function or a method."""
        if n.op == "placeholder":
            self.plain.add(n)
            return float(self.scale.double().abs().max())
        if n.op == "get_attr":
            return 0.0
        before = _operands(n, self.constants)
        if not before:
            return 0.0  # made of constants alone
        known = [self.constants[a] for a in before]
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", n.target)
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, int | float)]
        if n.target in _SUMS and "alpha" not in kwargs:
            # An operand that is repeated to fit the others counts as often.
            return sum(
                k * math.sqrt(value.numel() / max(1, self.shapes[a].numel()))
                for k, a in zip(known, before, strict=True)
            )
        if n.target is torch.cat:
            return math.sqrt(sum(k * k for k in known))
        if len(before) == 1:
            factor = self._unary(n, name, value, args, kwargs, numbers, before[0])
            if factor is not None:
                return factor * known[0]
        raise NotBoundedError(f"the network calls {name}, for which no Lipschitz bound is known")

    def _unary(
        self,
        n: fx.Node,
        name: Any,
        value: Tensor,
        args: Any,
        kwargs: Any,
        numbers: list[Any],
        source: fx.Node,
    ) -> float | None:
        """The factor of a function of one tensor, or ``None`` for one that is not known."""
        if n.target in _DROPOUTS:
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            return None if training else 1.0
        if n.target in _SAME_FUNCTIONS or (n.op == "call_method" and n.target in _SAME_METHODS):
            if name in ("tanh", "softplus"):
                self.affine = False
            if source in self.plain and _moves_nothing(name):
                self.plain.add(n)
            return 1.0
        if n.target is F.gelu:
            self.affine = False
            return _SLOPES[nn.GELU]
        if n.target in (operator.mul, torch.mul) and len(numbers) == 1:
            return abs(float(numbers[0]))
        divides = n.target in (operator.truediv, torch.div) and "rounding_mode" not in kwargs
        if divides and len(numbers) == 1 and isinstance(args[0], Tensor):
            return 1 / abs(float(numbers[0]))
        if n.target in (torch.mean, "mean"):
            return math.sqrt(value.numel() / max(1, self.shapes[source].numel()))
        if n.target in (F.adaptive_avg_pool2d, F.avg_pool2d):
            pool: Any = n.target
            return _averaging(lambda x: pool(x, *args[1:], **kwargs), self.shapes[source])
        if n.target in (F.max_pool2d, torch.max_pool2d):
            kernel = args[1] if len(args) > 1 else kwargs["kernel_size"]
            stride = args[2] if len(args) > 2 else kwargs.get("stride")
            dilation = args[4] if len(args) > 4 else kwargs.get("dilation", 1)
            return _shared(kernel, stride or kernel, dilation, 2)
        return None

    def _module(self, module: nn.Module, n: fx.Node, source: fx.Node) -> float:
        before, given = self.constants[source], self.shapes[source]
        slope = _SLOPES.get(type(module))
        if slope is not None:
            if source in self.plain and isinstance(module, nn.Flatten | nn.Identity | nn.Dropout):
                self.plain.add(n)
            if not isinstance(module, (*_PIECEWISE_AFFINE, nn.Identity, nn.Flatten, nn.Unflatten)):
                self.affine = self.affine and "Dropout" in type(module).__name__
            return slope * before
        if isinstance(module, nn.LeakyReLU):
            return max(1.0, abs(module.negative_slope)) * before
        if isinstance(module, nn.PReLU):
            return max(1.0, float(module.weight.abs().max())) * before
        if isinstance(module, nn.ELU | nn.CELU):
            self.affine = False
            alpha = abs(module.alpha) if isinstance(module, nn.ELU) else 1.0
            return max(1.0, alpha) * before
        if isinstance(module, nn.Linear):
            weight = module.weight.double()
            if source in self.plain and given[1:] == (self.scale.numel(),):
                # Each entry by its own scale, instead of all by the largest.
                weight, before = weight * self.scale.double().reshape(1, -1), 1.0
            return (_least(weight) if self.quick else _norm(weight)) * before
        if isinstance(module, _CONVOLUTIONS):
            return _convolution(module, self.quick) * before
        if isinstance(module, _NORMALISATIONS):
            assert module.running_var is not None
            factor = (module.running_var.double() + module.eps).rsqrt()
            if module.weight is not None:
                factor = factor * module.weight.double().abs()
            return float(factor.max()) * before
        dimensions = len(given) - 2
        if isinstance(module, _MAX_POOLS):
            return before * _shared(module.kernel_size, module.stride, module.dilation, dimensions)
        if isinstance(module, (*_AVERAGE_POOLS, *_ADAPTIVE)):
            return before * _averaging(module, given)
        raise NotBoundedError(_unknown(n, module))


def _name(n: fx.Node) -> str:
    """The module's name in the user's network."""
    name = str(n.target).partition(".")[2]
    return f"'{name}'" if name else "the network"


def _unknown(n: fx.Node, module: nn.Module) -> str:
    return f"{_name(n)} is a {type(module).__name__}, for which no Lipschitz bound is known"


def _operands(n: fx.Node, known: Mapping[fx.Node, float]) -> list[fx.Node]:
    """The tensors that go into a node, each as often as it does."""
    found: list[fx.Node] = []
    fx.map_arg((n.args, n.kwargs), found.append)
    return [a for a in found if a in known]


def _in_place(n: fx.Node, module: nn.Module | None, kwargs: Mapping[str, Any]) -> bool:
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    known = n.target in (operator.iadd, operator.isub) or bool(kwargs.get("inplace"))
    return n.op != "placeholder" and (known or (name.endswith("_") and not name.startswith("_")))


def _refuse_aliases(n: fx.Node) -> None:
    """A tensor that is changed in place must not be used again under its old name."""
    changed = n.all_input_nodes[0] if n.all_input_nodes else None
    while changed is not None:
        if len(changed.users) > 1:
            raise NotBoundedError(
                f"the network changes '{changed.name}' in place and uses it again, for which no "
                "Lipschitz bound is known"
            )
        views = {"flatten", "reshape", "view", "squeeze", "unsqueeze", "transpose", "permute"}
        name = changed.target if isinstance(changed.target, str) else changed.target.__name__
        is_view = changed.op in ("call_function", "call_method") and name in views
        changed = changed.all_input_nodes[0] if is_view and changed.all_input_nodes else None


def _moves_nothing(name: Any) -> bool:
    return name in ("flatten", "reshape", "view", "contiguous", "float")


def _norm(matrices: Tensor) -> float:
    """The largest spectral norm of matrices ``(..., M, N)``.

    By the eigenvalues of the smaller product with the transpose, ten times faster than singular
    values. Squaring costs digits of small ones alone, and the largest is asked for.
    """
    if not matrices.numel():
        return 0.0
    wide = matrices.shape[-1] > matrices.shape[-2]
    gram = matrices @ matrices.mH if wide else matrices.mH @ matrices
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[..., -1].max())))


def _least(matrix: Tensor) -> float:
    """What no bound of the norm of this matrix, or of a convolution with it, is below.

    The mean square of the singular values is the squared Frobenius norm over their number.
    """
    return float(matrix.norm()) / math.sqrt(max(1, min(matrix.shape)))


def _tuple(value: Any, dimensions: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (int(value),) * dimensions


def _uses(kernel: Any, stride: Any, dilation: Any, dimensions: int) -> int:
    """How many windows can hold one pixel."""
    parts = zip(
        _tuple(kernel, dimensions),
        _tuple(stride, dimensions),
        _tuple(dilation, dimensions),
        strict=True,
    )
    return math.prod(math.ceil(k / s) if d == 1 else k for k, s, d in parts)


def _shared(kernel: Any, stride: Any, dilation: Any, dimensions: int) -> float:
    """The largest of each window: a change of one pixel reaches all windows that hold it."""
    return math.sqrt(_uses(kernel, stride, dilation, dimensions))


def _averaging(pool: Callable[[Tensor], Tensor], given: torch.Size) -> float:
    """Weights are non-negative: Schur's test with sums of rows and of columns."""
    x = torch.ones(given, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        rows = pool(x)
        [columns] = torch.autograd.grad(rows.sum(), x)
    return math.sqrt(float(rows.max()) * float(columns.max()))


def _convolution(module: nn.Module, quick: bool) -> float:
    weight: Tensor = module.weight.detach().double()  # type: ignore[operator]
    groups: int = module.groups  # type: ignore[assignment]
    if quick:
        return max(_least(part.flatten(1)) for part in weight.chunk(groups))
    dimensions = weight.dim() - 2
    uses = _uses(module.kernel_size, module.stride, module.dilation, dimensions)
    taps = math.prod(weight.shape[2:])
    bound = max(_group(part, uses, taps, dimensions) for part in weight.chunk(groups))
    return bound * math.sqrt(_copies(module, dimensions))


def _copies(module: nn.Module, dimensions: int) -> int:
    """How often padding that is not zeros can repeat a pixel."""
    mode = module.padding_mode
    if mode == "zeros":
        return 1
    sides: Any = module._reversed_padding_repeated_twice
    pairs = [sides[2 * i] + sides[2 * i + 1] for i in range(dimensions)]
    # The edge is repeated by every padded pixel; wrapped or mirrored ones at most twice.
    return math.prod(1 + both if mode == "replicate" else min(1 + both, 3) for both in pairs)


def _group(weight: Tensor, uses: int, taps: int, dimensions: int) -> float:
    outputs, inputs = weight.shape[:2]
    flat = weight.flatten(2)
    bounds = [
        _schur(weight),
        _norm(weight.flatten(1)) * math.sqrt(uses),
        _norm(flat.transpose(1, 2).reshape(outputs * taps, inputs)) * math.sqrt(taps),
    ]
    if dimensions <= 2 and weight.numel() <= _SYMBOL:
        bounds.append(_symbol(weight))
    return min(bounds)


def _schur(weight: Tensor) -> float:
    size = weight.abs()
    rows, columns = size.flatten(1).sum(1).max(), size.transpose(0, 1).flatten(1).sum(1).max()
    return math.sqrt(float(rows) * float(columns))


def _symbol(weight: Tensor) -> float:
    """The largest norm of the Fourier symbol: on a grid, plus its steepest slope in between."""
    outputs, inputs, *kernel = weight.shape
    positions = torch.cartesian_prod(*[torch.arange(k).double() - (k - 1) / 2 for k in kernel])
    positions = positions.reshape(-1, len(kernel)).to(weight.device)
    taps = weight.flatten(2).permute(2, 0, 1)  # (K, O, I)
    steps = torch.arange(_GRID, device=weight.device).double() * (2 * math.pi / _GRID)
    # A real kernel's symbol at minus a frequency is its conjugate: half of the grid is enough.
    ranges = [steps[: _GRID // 2 + 1]] + [steps] * (len(kernel) - 1)
    grid = torch.cartesian_prod(*ranges).reshape(-1, len(kernel))
    phase = torch.exp(1j * (grid @ positions.T))  # (G, K)
    symbol = (phase @ taps.flatten(1).to(phase.dtype)).reshape(-1, outputs, inputs)
    largest = _norm(symbol)
    norms = torch.stack([taps.new_tensor(_norm(tap)) for tap in taps])
    # No frequency is further than half a step from the grid in each direction.
    slope = float((norms * positions.abs().sum(1)).sum())
    return largest + slope * math.pi / _GRID

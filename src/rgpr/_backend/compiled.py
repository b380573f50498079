"""A module's calls as compiled graphs; see :meth:`rgpr.RGPR.compile`.

Hooks, which read the representations, would cut a graph into pieces, so the module is exported
first. The graph holds the module's own tensors, so it sees values that change in place. If a tensor
was replaced by another one, the graph is compiled again. On a GPU the graph holds copies of the
prototypes, so it is also compiled again if these changed in place.

Where ``torch.compile`` is asked for CUDA graphs, we record them ourselves
(:mod:`rgpr._backend.recording`): what torch checks before it replays one takes longer than the
kernels of a small network.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .arithmetic import few_rows, kernels_in_graphs, within_transform
from .consistency import Consistency
from .recording import Recordings, recorder_of
from .small_layers import Packed, Packing

__all__ = ["CompiledCall"]

# On a GPU some operations of an exported graph take no more rows.
_MOST_ROWS = 65535
# torch exports and compiles for one thread at a time.
_making = threading.RLock()


Export = Callable[[Any, Tensor, bool], torch.export.ExportedProgram]


class CompiledCall:
    """A function of one tensor that a module is, or has, as compiled graphs.

    Args:
        model: The module.
        export: ``export(model, x, dynamic)`` gives the function as a program, for any number of
            rows if ``dynamic``.
        check: ``check(x)`` refuses an input that the module cannot take: a graph does not.
        options: What ``torch.compile`` is given.
        allowed: ``allowed()`` says whether a graph may do a call just now.
    """

    def __init__(
        self,
        model: nn.Module,
        export: Export,
        check: Callable[[Tensor], None],
        options: dict[str, Any],
        allowed: Callable[[], bool],
    ) -> None:
        self._model, self._export, self._check, self._options = model, export, check, options
        self._allowed, self._made = allowed, _Graphs(model)
        # Hooks that are there now become parts of graphs.
        self._known = self._made.places_of_hooks()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """What is called in place of the module, if the function is its plain call."""
        if not options and len(given) == 1:
            answer = self.of(given[0])
            if answer is not None:
                return answer
        return self._model._call_impl(*given, **options)  # type: ignore[no-untyped-call]

    def of(self, x: Any) -> Any | None:
        """What a graph answers, or ``None`` if none can do this call."""
        made = self._made
        if not self._plain(x):
            return None
        hooks_changed = made.hooks() != made.held
        if hooks_changed and made.places_of_hooks() - self._known:
            return None  # no graph would call a hook that came later
        if hooks_changed or made.changed:
            if _lent(self._model):
                return None
            made = self._made = _Graphs(self._model)
        form = (x.shape, x.dtype, x.device, x.layout, x.is_nested)
        if form not in made.checked:
            self._check(x)
            made.checked.add(form)
        graph = made.by_key.get(made.key(x))
        return self._first(x, made) if graph is None else graph(x)

    def _first(self, x: Tensor, made: _Graphs) -> Any:
        """Make a graph, and what it answers."""
        key, model = made.key(x), self._model
        with _making:
            graph = made.by_key.get(key)
            if graph is None:
                with kernels_in_graphs(x) as kernels:
                    if kernels:
                        made.pack()
                    exported = _unchecked(self._export(model, x, key[-1] is None))
                graph = _compiled(exported, x, spelled_out(self._options, in_order=kernels))
            if key[-1] is None:
                # Else the next size would compile again, while other threads call this graph.
                x = x.detach()
                torch._dynamo.mark_dynamic(x, 0)
            answer = graph(x)  # which compiles
            made.by_key[key] = graph
            return answer

    def _plain(self, x: Any) -> bool:
        """Whether the graph can do this call: one real tensor, no gradients, autocast or hooks.

        Neither can it be part of a graph that somebody else traces, nor of a transform.
        """
        model = self._model
        return (
            isinstance(x, Tensor)
            and self._allowed()
            and x.is_floating_point()
            and not x.is_meta
            and x.dim() > 0
            and len(x) > 0
            and not (torch.is_grad_enabled() and x.requires_grad)
            and not torch.compiler.is_compiling()
            and not within_transform()
            and not torch.is_autocast_enabled(x.device.type)
            and not (x.is_cuda and len(x) > _MOST_ROWS)
            and not model._forward_hooks
            and not model._forward_pre_hooks
            and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        )


def _lent(model: nn.Module) -> bool:
    """Whether tensors stand in for parameters, as ``torch.func.functional_call`` lends them."""
    values = (value for module in model.modules() for value in module._parameters.values())
    return any(value is not None and not isinstance(value, nn.Parameter) for value in values)


def _compiled(
    exported: torch.fx.GraphModule, x: Tensor, options: dict[str, Any]
) -> Callable[[Tensor], Any]:
    """The compiled graph, which is recorded if CUDA graphs were asked for and can be had."""
    without = without_cuda_graphs(options)
    if without is None or torch.is_grad_enabled() or recorder_of(x.device) is None:
        return torch.compile(exported, **options)
    graph = torch.compile(exported, **without)
    held = [value for value in vars(exported).values() if isinstance(value, Tensor)]
    recordings = Recordings([*exported.parameters(), *exported.buffers(), *held])
    return lambda x: recordings(graph, x)


def _unchecked(exported: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The program without checks of its input, which was checked before."""
    knows = "check_guards" in signature(exported.module).parameters  # since torch 2.9
    module = exported.module(**({"check_guards": False} if knows else {}))
    module._forward_pre_hooks.clear()
    _network_first(module.graph)
    module.recompile()
    return module


def _network_first(graph: torch.fx.Graph) -> None:
    """Let the network use a tensor before one of our kernels reads it.

    The compiler lays a tensor out in memory for its first use. Our kernels take every layout, but a
    convolution does not. If it came second, the tensor would be written twice, which takes longer
    than all our kernels.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", None) != "rgpr":
            continue
        for read in node.all_input_nodes:
            later = [user for user in read.users if place[user] > place[node]]
            if not later:
                continue
            use = min(later, key=place.__getitem__)
            known = all(place[given] < place[node] for given in use.all_input_nodes)
            between = list(graph.nodes)[place[node] + 1 : place[use] + 1]
            if known and not any(map(_writes, between)):
                node.prepend(use)
                place = {each: number for number, each in enumerate(graph.nodes)}


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation may write into a tensor that it is given."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def spelled_out(options: dict[str, Any], *, in_order: bool) -> dict[str, Any]:
    """The options of ``torch.compile`` with what their mode stands for, if its own compiler runs.

    Args:
        options: The options.
        in_order: Have the compiler leave operations in the order of the graph. It would move each
            to the place before its result is used first, and so undo :func:`_network_first`.
    """
    mode, inner = options.get("mode"), options.get("options")
    # Torch itself refuses a mode beside options.
    if not _own_compiler(options) or (mode is not None and inner is not None):
        return options
    from torch._inductor import list_mode_options

    inner = {**({} if mode is None else list_mode_options(mode)), **(inner or {})}
    if in_order:
        inner = {"reorder_for_locality": False, **inner}
    others = {name: value for name, value in options.items() if name not in ("mode", "options")}
    return {**others, "options": inner}


def without_cuda_graphs(options: dict[str, Any]) -> dict[str, Any] | None:
    """The same spelled-out options without CUDA graphs; ``None`` if they ask for none."""
    inner = options.get("options") or {}
    if not _own_compiler(options) or not inner.get("triton.cudagraphs"):
        return None
    return {**options, "options": {**inner, "triton.cudagraphs": False}}


def _own_compiler(options: dict[str, Any]) -> bool:
    return bool(options.get("backend", "inductor") == "inductor")


class _Graphs:
    """Graphs of a model by what they are for, and what it consisted of when they were made.

    Every call looks at that, so it is done in few, fast steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self.by_key: dict[tuple[Any, ...], Any] = {}
        # Forms of inputs that the model takes.
        self.checked: set[tuple[Any, ...]] = set()
        every = list(model.modules())
        self._packing = [m for m in every if isinstance(m, Packing)]
        self._packed: list[Packed | None] = []
        self._consistency = Consistency(every)
        self._hooks = [
            table
            for module in every
            if module is not model
            for table in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self.held = self.hooks()

    def key(self, x: Tensor) -> tuple[Any, ...]:
        """As torch.compile does: a graph for the first size of a batch, and one for all others.

        A single row has a graph of its own, because torch takes a size of one for a constant.
        """
        kind = torch.is_grad_enabled(), x.is_cuda and few_rows(x)
        sizes = [size for *known, size in list(self.by_key) if tuple(known) == kind]
        own = len(x) == 1 or len(x) in sizes or set(sizes) <= {1}
        return (*kind, len(x)) if own else (*kind, None)

    def hooks(self) -> list[tuple[int, ...]]:
        """The numbers of the hooks that each part of the model has now."""
        return [*map(tuple, self._hooks)]

    def places_of_hooks(self) -> set[tuple[int, int]]:
        """The same with the tables that hold them: copies of a module share the numbers."""
        return {(id(table), number) for table in self._hooks for number in table}

    @property
    def changed(self) -> bool:
        """Whether there are other modules or tensors, or other values where copies were made."""
        if self._consistency.changed:
            return True
        return not all(copies is None or copies.is_current for copies in self._packed)

    def pack(self) -> None:
        """Make the copies for kernels that the graphs hold."""
        self._packed = [module.pack() for module in self._packing]

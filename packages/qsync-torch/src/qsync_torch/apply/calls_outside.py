"""Products that a script computes with planned weights outside of every forward of the model.

A plan replaces what runs inside a forward of the model or of one of its modules.  A functional call in another method, which the
script calls itself (``training_step``), is inside none: it runs in full precision, and nothing is there to see it.  The graph that
a backward pass begins with has it all the same: a product that reads a planned weight, and whose node was made while no forward
ran.  PyTorch numbers the nodes of a thread one after the other, so a forward only notes between which numbers it ran.

A graph is looked at when the number of nodes that the script made outside of forwards since the last backward pass is new, and in
the 1st, 2nd, 4th, 8th, ... pass: an ordinary script pays for its first steps.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from qsync_core.ir.op_id import OpId
from qsync_torch.apply.functional_calls import WeightPlace
from qsync_torch.apply.interception import RIGHT_FACTORS
from qsync_torch.apply.recomputation import is_of_the_user, runs_again

_FACTORS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("Mm", "Bmm"), (0, ("self",), ("mat2",))),
    **dict.fromkeys(("Linear", "MkldnnLinear"), (0, ("input", "self"), ("weight",))),
    **dict.fromkeys(("Addmm", "Addbmm", "Baddbmm"), (1, ("mat1", "batch1"), ("mat2", "batch2"))),
    **dict.fromkeys(
        [f"{kind}Convolution" for kind in ("", "Cudnn", "Mkldnn", "Mps", "Miopen")] + ["ConvolutionOverrideable"],
        (0, ("input", "self"), ("weight",)),
    ),
}
"""What autograd calls products, without ``Backward0``: the place of the first of their two factors among what they read, and names
under which they keep them.  ``Mv`` and ``Dot`` are no linears: those of one sample are ``Mm``."""
_VIEWS = frozenset(
    [
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Expand", "Clone"),
        *("Slice", "Select", "Split", "SplitWithSizes", "Unbind", "AsStrided"),
    ]
)
_CASTS = frozenset(["ToCopy"])
_COMPILED_PRODUCTS = frozenset(
    [torch.nn.functional.linear, torch.conv2d, torch.addmm, "addmm", *RIGHT_FACTORS, *(one.__name__ for one in RIGHT_FACTORS)]
)
_COMPILED_VIEWS = frozenset(
    ["t", "transpose", "permute", "view", "reshape", "contiguous", "squeeze", "unsqueeze", "getitem", "getattr"]
)


class Stretch(enum.Enum):
    """What nodes of a graph were made in."""

    PLAIN = enum.auto()
    """A forward in which nothing is replaced (eval mode), or the formulas of a backward pass."""
    PLANNED = enum.auto()
    """A forward under the plan."""


_MOST_STRETCHES = 4096
_FREE_LOOKS = 32

_number_now: Callable[[], int] = torch.autograd._get_sequence_nr


@attrs.define
class _Stretches:
    """The stretches of one thread, by the numbers of their first node and of the node after their last, in order."""

    begins: list[int] = attrs.Factory(list)
    ends: list[int] = attrs.Factory(list)
    kinds: list[Stretch] = attrs.Factory(list)
    open: list[tuple[int, Stretch]] = attrs.Factory(list)
    known_from: int = 0
    has_entered: bool = False
    inside: int = 0
    last: int = 0

    def add(self, begin: int, kind: Stretch) -> None:
        """Add a stretch that ends now; those within it are a part of it."""
        end = _number_now()
        while self.begins and self.begins[-1] >= begin:
            self._pop()
        if end == begin:
            return
        if self.ends and self.ends[-1] == begin and self.kinds[-1] == kind:
            self.inside -= begin - self.begins[-1]
            begin = self.begins.pop()
            self.ends.pop()
            self.kinds.pop()
        self.begins.append(begin)
        self.ends.append(end)
        self.kinds.append(kind)
        self.inside += end - begin
        if len(self.begins) > _MOST_STRETCHES:
            half = _MOST_STRETCHES // 2
            self.known_from = self.ends[half - 1]
            del self.begins[:half], self.ends[:half], self.kinds[:half]

    def _pop(self) -> None:
        self.inside -= self.ends.pop() - self.begins.pop()
        self.kinds.pop()

    def kind_of(self, number: int) -> Stretch | None:
        """What a node was made in; None for one that was made outside."""
        if number < self.known_from:
            return Stretch.PLAIN
        at = bisect.bisect_right(self.begins, number) - 1
        if at >= 0 and number < self.ends[at]:
            return self.kinds[at]
        return next((kind for begin, kind in reversed(self.open) if number >= begin), None)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_NUMBERS = itertools.count()
_BEING_READ: set[str] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def compiler_reads(name: str) -> bool:
    """A compiler reads the forward of a model, by its :attr:`NodesInside.name`; this runs while it reads."""
    _BEING_READ.add(name)
    return True


class NodesInside:
    """Which nodes of autograd's graphs the forwards of a model have made.

    Attributes:
        name: of the model, for :func:`compiler_reads`.
    """

    def __init__(self) -> None:
        self.name = str(next(_NUMBERS))
        self._here = threading.local()
        self._by_thread: dict[int, _Stretches] = {}

    def begin(self, kind: Stretch) -> None:
        """A forward begins, in this thread."""
        own = self.of_thread()
        own.open.append((_number_now(), kind))
        own.has_entered = own.has_entered or not _in_backward()

    def end(self) -> None:
        """The forward that began last in this thread has ended, or failed."""
        own = self.of_thread()
        own.add(*own.open.pop())

    def of_thread(self) -> _Stretches:
        """Return the stretches of this thread: each counts its own nodes."""
        found: _Stretches | None = getattr(self._here, "stretches", None)
        if found is None:  # a thread that has ended may have had the same name
            found = self._here.stretches = self._by_thread[threading.get_ident()] = _Stretches()
            found.last = _number_now()
        return found

    def kind_of(self, number: int) -> Stretch | None:
        """What a node of a graph that this thread differentiates was made in; None for one that was made outside."""
        own: _Stretches | None = getattr(self._here, "stretches", None)
        # In a backward pass, what runs again is this thread's; what one began with is another's where no forward has run here.
        if own is not None and (own.has_entered or _in_backward()):
            return own.kind_of(number)
        found = [kind for stretches in tuple(self._by_thread.values()) if (kind := stretches.kind_of(number))]
        return found[0] if found else None


@attrs.frozen
class Product:
    """A product that reads a planned weight.

    Attributes:
        op_id: the planned operator.
        place: its weight's.
        name: what autograd calls the product.
        inside: whether a forward under the plan made it.
        of_cast: whether it reads a 16-bit copy.
        of_function: whether it is an autograd function of the user's, which may be none.
        compiled: whether ``torch.compile`` has it in a function of the script's.
        plain: whether a forward made it in which nothing was replaced, and the weight gets a gradient.
    """

    op_id: OpId
    place: WeightPlace
    name: str
    inside: bool
    of_cast: bool = False
    of_function: bool = False
    compiled: bool = False
    plain: bool = False


Judge = Callable[[list[Product]], None]


class CallsOutside:
    """Looks for products in the graphs of backward passes.

    Args:
        model: whose operators they are.
        places: planned weights, by their operator.
        nodes: what the forwards of the model have made.
        judge: called with the products in a graph that is looked at; what it raises comes out of the backward pass.
        is_running: whether a compiled forward of the model runs now.

    Attributes:
        has_compiled: whether ``torch.compile`` has read a forward of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Iterable[tuple[OpId, WeightPlace]],
        nodes: NodesInside,
        judge: Judge,
        is_running: Callable[[], bool] = bool,
    ) -> None:
        self._model, self._places, self._nodes, self._judge, self._is_running = model, list(places), nodes, judge, is_running
        self.has_compiled = False
        self._compiled: dict[OpId, str] = {}
        self._compiled_inside: dict[OpId, str] = {}
        self._read_inside: set[OpId] = set()
        self._checkpointed: dict[OpId, str] = {}
        self._seen: set[int] = set()
        self._passes = 0
        self._looks_next = False
        _watch_backward()
        _watch_compiler()
        _WATCHING.add(self)

    def stop(self) -> None:
        """Look no more."""
        _WATCHING.discard(self)

    def look_next(self) -> None:
        """Look at the graph of the next backward pass."""
        self._looks_next = True

    def backward_begins(self, outputs: Iterable[Any], trains: bool = True) -> int:
        """A backward pass begins, from these tensors or edges; what :meth:`backward_ended` takes.

        Args:
            outputs: the tensors or edges.
            trains: whether it is for all parameters, and not for chosen tensors.
        """
        own, now = self._nodes.of_thread(), _number_now()
        made = now - own.inside - own.last
        self._passes += 1
        is_new = made not in self._seen and len(self._seen) < _FREE_LOOKS + self._passes // 64
        if is_new or self._looks_next or self._passes & (self._passes - 1) == 0:
            self._looks_next = False
            self._judge([product for product in self.products(outputs) if trains or not product.plain])
            self._seen.add(made)
        return now

    def backward_ended(self, begin: int) -> None:
        """The backward pass has ended, or failed."""
        own = self._nodes.of_thread()
        own.add(begin, Stretch.PLAIN)
        own.last = _number_now() - own.inside

    def products(self, outputs: Iterable[Any]) -> Iterator[Product]:
        """Find products with planned weights in a graph."""
        present = [(weight, at) for at in self._places if (weight := at[1].weight) is not None]
        weights = {id(weight): at for weight, at in present}
        addresses = {address: at for weight, at in present if (address := _address(weight))}
        stored = {storage for tensor in _stored(self._model) if (storage := _storage(tensor))}
        for node in _graph(outputs):
            if isinstance(node, BackwardCFunction):
                compiled = type(node).__name__ == "CompiledFunctionBackward"
                yield from (self._of_compiled if compiled else self._of_function)(node, weights)
                continue
            name = type(node).__name__
            factors = _FACTORS.get(name.rpartition("Backward")[0])
            if factors is None:
                continue
            kind = self._nodes.kind_of(node._sequence_nr())
            first, *names = factors
            read = [_Factor.of(node, first + i, names[i], weights, addresses, stored) for i in range(2)]
            for factor, other in (read, reversed(read)):
                if factor.planned is not None and not other.is_stored:
                    op_id, place = factor.planned
                    if kind == Stretch.PLAIN:
                        if place.weight is not None and place.weight.requires_grad:
                            yield Product(op_id, place, name, inside=False, plain=True)
                        break
                    by_compiler = op_id in self._compiled  # of a backend that leaves the graph to autograd
                    inside = kind is not None or op_id in self._read_inside
                    yield Product(*factor.planned, name, inside, of_cast=factor.is_cast, compiled=by_compiler)
                    break

    def _of_compiled(self, node: Any, weights: Mapping[int, tuple[OpId, WeightPlace]]) -> Iterator[Product]:
        for source in map(_source, (following for following, _ in node.next_functions)):
            if source is not None and (at := weights.get(id(source[0]))) is not None:
                outside, inside = self._compiled.get(at[0]), self._compiled_inside.get(at[0])
                product = outside or inside or self._checkpointed.get(at[0])
                is_inside, unknown = not outside and inside is not None, product is None
                yield Product(*at, product or node.name(), unknown or is_inside, of_function=unknown, compiled=outside is not None)

    def _of_function(self, node: Any, weights: Mapping[int, tuple[OpId, WeightPlace]]) -> Iterator[Product]:
        kind = self._nodes.kind_of(node._sequence_nr())
        if not is_of_the_user(node) or runs_again(node) or kind == Stretch.PLAIN:
            return
        sources = [_source(following) for following, _ in node.next_functions]
        stored = {id(parameter) for parameter in self._model.parameters()}
        if all(source is not None and id(source[0]) in stored for source in sources):
            return
        for weight, is_cast in filter(None, sources):
            if (at := weights.get(id(weight))) is not None:
                yield Product(*at, node.name(), kind is not None, of_cast=is_cast, of_function=True)

    def compiles(self, graph: torch.fx.GraphModule) -> None:
        """``torch.compile`` has read a graph: what is a product with a planned weight itself there is none of the plan's.

        Where it has read the model's forward too, such a product is taken for a part of it.
        """
        is_models = self._nodes.name in _BEING_READ or self._is_running()
        _BEING_READ.discard(self._nodes.name)
        if not (self._model.training and torch.is_grad_enabled()):
            return
        places = {id(weight): op_id for op_id, place in self._places if (weight := place.weight) is not None}
        stored = {id(tensor) for tensor in _stored(self._model)}
        read: dict[Any, OpId | None] = {}
        for node in graph.graph.find_nodes(op="placeholder"):
            example = getattr(node.meta.get("grapharg"), "example", None)
            if id(example) in stored:
                read[node] = places.get(id(example))
        if is_models:
            self.has_compiled = True
            self._read_inside.update(op_id for op_id in read.values() if op_id is not None)
            _find_products(graph, read, self._compiled_inside, self._compiled_inside)
        else:
            _find_products(graph, read, self._compiled, self._checkpointed)


def _find_products(
    graph: torch.fx.GraphModule, read: dict[Any, OpId | None], found: dict[OpId, str], inside: dict[OpId, str]
) -> None:
    """Products with planned weights in a graph, and in those that it checkpoints.

    Args:
        graph: as the compiler has read it.
        read: its nodes that are stored in the model, and which operator's weight they are.
        found: gets the products, by operator.
        inside: gets those in graphs inside this one.
    """
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        arguments = node.all_input_nodes
        sources = [argument for argument in arguments if argument in read]
        attributes = [(one, getattr(graph, str(one.target), None)) for one in arguments if one.op == "get_attr"]
        parts = [(one, part) for one, part in attributes if isinstance(part, torch.fx.GraphModule)]
        if parts and sources:
            at, part = parts[0]
            given = [argument for argument in node.args if argument is not at]
            inputs = part.graph.find_nodes(op="placeholder")
            read_there = {one: read[argument] for one, argument in zip(inputs, given, strict=False) if argument in read}
            _find_products(part, read_there, inside, inside)
        elif name in _COMPILED_VIEWS and sources:
            read[node] = read[sources[0]]
        elif (node.target in _COMPILED_PRODUCTS or name == "matmul") and len(sources) < len(arguments):
            found.update((op_id, f"{name} of a compiled function") for source in sources if (op_id := read[source]))


@attrs.frozen
class _Factor:
    """What a product reads: whose weight it is, and whether the model stores it."""

    planned: tuple[OpId, WeightPlace] | None
    is_stored: bool
    is_cast: bool = False

    @classmethod
    def of(
        cls,
        node: Any,
        place: int,
        names: Iterable[str],
        weights: Mapping[int, tuple[OpId, WeightPlace]],
        addresses: Mapping[int, tuple[OpId, WeightPlace]],
        stored: set[int],
    ) -> _Factor:
        edge = node.next_functions[place][0] if place < len(node.next_functions) else None
        if edge is not None:
            if (found := _source(edge)) is None:
                return cls(None, False)
            leaf, is_cast = found
            return cls(weights.get(id(leaf)), _storage(leaf) in stored, is_cast)
        kept = next((tensor for name in names if (tensor := _kept(node, name)) is not None), None)
        if kept is None:
            return cls(None, False)
        return cls(addresses.get(_address(kept)), _storage(kept) in stored)


def _address(tensor: torch.Tensor) -> int:
    """Where its first element is; 0 for one that is nowhere, as of ``torch.func``'s."""
    return tensor.data_ptr() if _storage(tensor) else 0


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else 0
    except (NotImplementedError, RuntimeError):
        return 0


def _kept(node: Any, name: str) -> torch.Tensor | None:
    """What a node keeps for its formula; None where hooks have it, which may compute it again."""
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or raw.unpack_hook is not None:
            return None
        found = raw.data
    except (AttributeError, RuntimeError):  # freed by an earlier backward pass
        return None
    return found if isinstance(found, torch.Tensor) else None


def _source(node: Any) -> tuple[torch.Tensor, bool] | None:
    """The leaf of which a node is a view, and whether by way of a cast; None for anything else."""
    is_cast = False
    while node is not None:
        if (leaf := getattr(node, "variable", None)) is not None:
            return leaf, is_cast
        kind = type(node).__name__.rpartition("Backward")[0]
        if kind not in _VIEWS and kind not in _CASTS:
            return None
        is_cast = is_cast or kind in _CASTS
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _stored(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _graph(outputs: Iterable[Any]) -> Iterator[Any]:
    """The nodes that a backward pass from these tensors or edges meets."""
    todo = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            yield node


_WATCHING: weakref.WeakSet[CallsOutside] = weakref.WeakSet()


@functools.cache
def _watch_backward() -> None:
    """Have each backward pass, of ``backward`` or ``torch.autograd.grad``, looked at before it runs; once in a process."""
    run = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not _WATCHING or torch.compiler.is_compiling():
            return run(t_outputs, *args, **kwargs)
        trains = kwargs.get("accumulate_grad", False) and not args[3]  # of chosen inputs
        begun = [(one, one.backward_begins(t_outputs, trains)) for one in tuple(_WATCHING)]
        try:
            return run(t_outputs, *args, **kwargs)
        finally:
            for one, begin in begun:
                one.backward_ended(begin)

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run_backward


@functools.cache
def _watch_compiler() -> None:
    """Have each graph looked at that ``torch.compile`` makes of what it reads; once in a process."""
    from torch._dynamo.output_graph import OutputGraph

    compile_graph = OutputGraph.call_user_compiler

    @functools.wraps(compile_graph)
    def call_user_compiler(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for one in tuple(_WATCHING):
            one.compiles(gm)
        return compile_graph(self, gm, *args, **kwargs)

    OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]

"""What a node of a graph from ``torch.compile`` is: the functions that chains are made of, and what nodes change or switch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from qsync_core.ir.chain import Activation
from qsync_torch.dtypes import PRECISION
from qsync_torch.operators.products import LOWERED, OFFSET_OF_STEP
from qsync_torch.torch_internals import OpOverload, OpOverloadPacket, is_higher_order

_BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"),
}
_LAYER_NORMS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    torch.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
}
_RMS_NORMS: dict[Any, tuple[str, ...]] = {
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_PRODUCTS = (operator.mul, torch.mul, "mul")
_ROOTS = (torch.rsqrt, "rsqrt")
_MEANS = (torch.mean, "mean")
_POWERS = (operator.pow, torch.pow, "pow")
_SQUARES = (torch.square, "square")
_CASTS = ("to", "float", "type_as", "type")
_RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
_NAMED: dict[str, Collection[Any]] = {
    "batch_norm": _BATCH_NORMS,
    "layer_norm": _LAYER_NORMS,
    "rms_norm": _RMS_NORMS,
    "rsqrt": _ROOTS,
    "relu": _RELUS,
    "gelu": (F.gelu,),
    "silu": (F.silu,),
}
_CHANGING = frozenset(
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")
)
_SWITCHES = ("_set_grad_enabled", "set_grad_enabled", "_enter", "_exit", "_saved_tensors_hooks")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = "eager_input_vals"
"""What a node's description calls the layouts in which inductor must give its operands."""


def value_of(node: object) -> torch.Tensor | None:
    """The tensor that a node stands for, without numbers; None for what is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def float_of(node: object) -> torch.Tensor | None:
    """The same where it is float32 or a 16-bit float."""
    value = value_of(node)
    return value if value is not None and value.dtype in _FLOATS and value.dtype in PRECISION else None


def named_arguments(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """All arguments of a call by their names."""
    return _DEFAULTS | dict(zip(names, node.args, strict=False)) | node.kwargs


def batch_norm_of(node: object) -> dict[str, Any] | None:
    """The arguments of a batch norm by the statistics of the batch; None for anything else."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in _BATCH_NORMS:
        return None
    call = named_arguments(node, _BATCH_NORMS[node.target])
    return call if call["training"] is True else None


def layer_norm_of(node: object) -> dict[str, Any] | None:
    """The arguments of a layer norm over the last dimension; None for anything else."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in _LAYER_NORMS:
        return None
    call = named_arguments(node, _LAYER_NORMS[node.target])
    return call if len(call["normalized_shape"]) == 1 else None


@attrs.frozen
class RmsNorm:
    """An RMS norm over the last dimension, be it one node or several.

    Attributes:
        x: what it normalizes; weight: what it is multiplied with, a node or None.
        eps: None: what PyTorch takes by itself.
        members: its nodes, but for the last one in no order.
        head: the one that it is named after: of a norm that is written out the ``rsqrt``.
    """

    x: Node
    weight: object
    eps: object
    members: tuple[Node, ...]
    head: Node


def rms_norm_of(node: object) -> RmsNorm | None:
    """The RMS norm whose result a node is: PyTorch's function, or x·rsqrt(mean(x²) + eps) written out; None for anything else.

    Casts to float32 before it, and to another format before its weight, are a part of it, as models write them that normalize in
    float32 (transformers, torchtitan).  Their members but the last are read by each other alone.
    """
    if not isinstance(node, Node):
        return None
    if node.op == "call_function" and node.target in _RMS_NORMS:
        call: dict[str, Any] = {"weight": None, "eps": None}
        call |= dict(zip(_RMS_NORMS[node.target], node.args, strict=False)) | node.kwargs
        return RmsNorm(call["input"], call["weight"], call["eps"], (node,), node) if len(call["normalized_shape"]) == 1 else None
    factors = _two_of(node, _PRODUCTS)
    for normalized, weight in (*_orders(factors), (node, None)):
        found = _written_out(normalized, node, weight)
        if found is not None:
            return found
    return None


def _written_out(result: Node, last: Node, weight: Node | None) -> RmsNorm | None:
    """The norm whose normalized numbers, perhaps cast, are ``result``, which ``weight`` makes ``last`` of."""
    if weight is not None and (value := value_of(weight)) is not None and value.ndim != 1:
        return None
    members = [last] if weight is not None else []
    while (source := cast_of(result)) is not None:
        members.append(result)
        result = source
    members.append(result)
    for wide, root in _orders(_two_of(result, _PRODUCTS)):
        if (inside := _argument_of(root, _ROOTS)) is None or (total := _plus_number(inside)) is None:
            continue
        squares = _mean_of(total[0])
        if squares is None or _square_of(squares) is not wide:
            continue
        members += [root, inside, total[0], squares]
        x = wide
        while (source := cast_of(x)) is not None and set(x.users) <= set(members):
            members.append(x)
            x = source
        own = set(members)
        if all(set(member.users) <= own for member in members if member is not last):
            return RmsNorm(x, weight, total[1], (*(member for member in members if member is not last), last), root)
    return None


def _orders(pair: tuple[Node, Node] | None) -> tuple[tuple[Node, Node], ...]:
    return () if pair is None else (pair, pair[::-1])


def _two_of(node: Node, targets: Collection[Any]) -> tuple[Node, Node] | None:
    """The two tensors that a node of these targets takes, and nothing else."""
    if node.op not in ("call_function", "call_method") or node.target not in targets or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    return (first, second) if isinstance(first, Node) and isinstance(second, Node) else None


def _argument_of(node: Node, targets: Collection[Any]) -> Node | None:
    """The one tensor that a node of these targets takes, and nothing else."""
    if node.op not in ("call_function", "call_method") or node.target not in targets or node.kwargs or len(node.args) != 1:
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def cast_of(node: Node) -> Node | None:
    """What a node is a cast of that keeps device and layout."""
    if node.op != "call_method" or node.target not in _CASTS or not isinstance(source := node.args[0], Node):
        return None
    before, after = float_of(source), float_of(node)
    if before is None or after is None or before.device != after.device or before.stride() != after.stride():
        return None
    return source


def _plus_number(node: Node) -> tuple[Node, float] | None:
    """The tensor and the number that a node adds."""
    if node.op not in ("call_function", "call_method") or node.target not in (operator.add, torch.add, "add"):
        return None
    if node.kwargs or len(node.args) != 2:
        return None
    tensor, number = node.args if isinstance(node.args[0], Node) else node.args[::-1]
    return (tensor, float(number)) if isinstance(tensor, Node) and isinstance(number, (int, float)) else None


def _mean_of(node: Node) -> Node | None:
    """What a node is the mean of over the last dimension, which is kept."""
    if node.op not in ("call_function", "call_method") or node.target not in _MEANS:
        return None
    call = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    source, dim = call.pop("input"), call.pop("dim", None)
    dims = tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)
    value = value_of(source)
    if value is None or dims not in ((-1,), (value.ndim - 1,)) or call.pop("keepdim", False) is not True or call:
        return None
    return source if isinstance(source, Node) else None


def _square_of(node: Node) -> Node | None:
    """What a node is the square of."""
    if node.op not in ("call_function", "call_method") or node.kwargs or not node.args:
        return None
    source, *others = node.args
    is_square = node.target in _SQUARES and not others
    is_power = node.target in _POWERS and others == [2]
    is_product = node.target in _PRODUCTS and len(others) == 1 and others[0] is source
    return source if isinstance(source, Node) and (is_square or is_power or is_product) else None


def summands_of(node: object) -> tuple[Node, Node] | None:
    """The two tensors that a node adds, the one that is written to first where it is in place."""
    if not isinstance(node, Node) or node.target not in _ADDITIONS or len(node.args) > 2:
        return None
    call = dict(zip(("input", "other"), node.args, strict=False)) | node.kwargs
    if call.pop("alpha", 1) != 1 or call.keys() != {"input", "other"}:
        return None
    first, second = call["input"], call["other"]
    return (first, second) if isinstance(first, Node) and isinstance(second, Node) and first is not second else None


def activation_of(node: object) -> tuple[Activation, Node] | None:
    """The function that a node is, and what it is of."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(source, Node):
        return None
    if node.target in _RELUS:
        return Activation.RELU, source
    if node.target is F.silu:
        return Activation.SILU, source
    if node.target is F.gelu:
        approximate = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
        known = {"none": Activation.GELU, "tanh": Activation.GELU_TANH}
        return (known[str(approximate)], source) if str(approximate) in known else None
    return None


def factors_of(node: object) -> tuple[Node, Node] | None:
    """The two tensors that a node multiplies, into a third one."""
    return _two_of(node, _PRODUCTS) if isinstance(node, Node) else None


def function_of(node: Node) -> str:
    """What a trace calls the function of a node that chains are named after; empty for any other."""
    if node.op in ("call_function", "call_method"):
        for name, targets in _NAMED.items():
            if node.target in targets:
                return name
    return ""


def changed_by(node: Node) -> Iterator[Node]:
    """The arguments that a node writes to; all of them where what it calls says nothing."""
    target = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return
    first = [argument for argument in node.args[:1] if isinstance(argument, Node)]
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, OpOverload):
        arguments = zip(target._schema.arguments, node.args, strict=False)
        yield from (a for spec, a in arguments if spec.alias_info and spec.alias_info.is_write and isinstance(a, Node))
        return
    if is_higher_order(target) or node.op == "call_module":
        yield from node.all_input_nodes
        return
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target in _BATCH_NORMS:
        call = named_arguments(node, _BATCH_NORMS[target])
        yield from (call[name] for name in ("running_mean", "running_var") if isinstance(call[name], Node))
    in_place = node.kwargs.get("inplace") is True or (True in node.args[1:] and getattr(target, "__module__", "") == F.__name__)
    if target in _CHANGING or name == "setitem" or (name.endswith("_") and not name.endswith("__")) or in_place:
        yield from first
    if isinstance(out := node.kwargs.get("out"), Node):
        yield out


def storage_of(node: object) -> int | None:
    """What tensors that share memory have in common."""
    value = value_of(node)
    return None if value is None else id(value.untyped_storage())


def is_in_place(node: Node) -> bool:
    """Whether a node's result is an argument that it has written to."""
    return any(storage_of(argument) == storage_of(node) for argument in changed_by(node))


def is_quantized(node: object) -> bool:
    """Whether it is an 8-bit operator of a plan whose random numbers are known."""
    return isinstance(node, Node) and node.target is LOWERED and all(isinstance(seed, int) for seed in node.args[4:7])


def makes_its_copy(node: Node) -> bool:
    """Whether it is an 8-bit operator of a plan that quantizes its activation by itself, perhaps over factors of its channels."""
    return node.target is LOWERED and (len(node.args) == 8 or node.args[8] is None)


def checkpointed_parts(module: GraphModule) -> Iterator[GraphModule]:
    """Parts that are checkpointed: each is a graph of its own."""
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            yield cast(GraphModule, getattr(module, str(node.args[0].target)))


def offsets(graph: Graph) -> Iterator[Node]:
    """Nodes that are the offset of a step's random numbers: what the model's forward names, or what operators read."""
    yield from (cast(Node, node.args[0]) for node in graph.nodes if node.target is OFFSET_OF_STEP)
    yield from (node.args[7] for node in graph.nodes if node.target is LOWERED and isinstance(node.args[7], Node))


def is_switch(node: Node) -> bool:
    """Whether a node changes how those after it run: recorded for backward or not, autocast, hooks."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op == "call_function" and any(name.startswith(switch) for switch in _SWITCHES)


def sizes(value: torch.Tensor) -> tuple[int, ...] | None:
    """The shape in numbers, of a dynamic shape those that it was compiled for; None where there are none."""
    found = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return None if any(size is None for size in found) else tuple(map(int, found))


def same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two shapes are equal whatever sizes a graph runs with."""
    shapes = ([size if isinstance(size, int) else str(size) for size in value.shape] for value in (one, other))
    return next(shapes) == next(shapes)


def stand_for(made: Node, members: Sequence[Node], arguments: Callable[..., tuple[Any, ...]], value: Any) -> None:
    """Describe a node that stands in the place of several as the first of them is described.

    Args:
        made: of a graph as AOTAutograd makes it.
        members: whose place it takes.
        arguments: makes those of ``made`` from those of each member.
        value: what it gives, in fake tensors.
    """
    made.meta |= described_as(members[0]) | {"val": value}
    if all(LAYOUTS in member.meta for member in members):
        made.meta[LAYOUTS] = arguments(*(member.meta[LAYOUTS][0] for member in members)), {}


def described_as(node: Node) -> dict[str, Any]:
    """The description of a node without the layouts of its operands."""
    return {name: said for name, said in node.meta.items() if name != LAYOUTS}


def needs(node: Node, beside: Collection[Node] = ()) -> set[Node]:
    """All that a node is computed from, but for what it reads directly of ``beside``."""
    found: set[Node] = set()
    waiting = [source for source in node.all_input_nodes if source not in beside]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += source.all_input_nodes
    return found


def move_before(node: Node, anchor: Node) -> None:
    """Move a node, and first all that it needs, in front of another that it does not need."""
    if node < anchor:
        return
    for source in node.all_input_nodes:
        move_before(source, anchor)
    anchor.prepend(node)

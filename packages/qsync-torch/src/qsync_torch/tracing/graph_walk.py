"""One pass over the exported graph, from nodes to operators in the making (:class:`~qsync_torch.tracing.graph_values.Draft`).

Precondition: the graph of :func:`~qsync_torch.tracing.export.export_step`.  Postcondition: every linear and convolution call is a
draft; views, integer work and assertions are not; every draft's inputs stand before it.
"""

from __future__ import annotations

import math
import operator as python_operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qsync_core.ir.dag import OpClass
from qsync_torch.tracing import aten_call, classify
from qsync_torch.tracing import classify as adjustable
from qsync_torch.tracing import classify as flops
from qsync_torch.tracing.export import ExportedStep
from qsync_torch.tracing.gradient_order import FakeRun
from qsync_torch.tracing.graph_values import Draft, Read, Storage, Value, float_tensor, static_shape
from qsync_torch.tracing.names import LOSS_SCOPE, Scopes

Entry = Value | list["Entry"] | None
"""What a node stands for: a value, several (chunk, a subgraph's results), or nothing of interest."""

_INLINED = frozenset(
    {
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "tag_activation_checkpoint",
        "wrap_activation_checkpoint",
        "wrap",
        "invoke_subgraph",
        "strict_mode",
    }
)
"""Higher-order operators that run their one subgraph once, where they stand."""

_PASS_THROUGH = frozenset(
    {
        "_add_batch_dim",
        "_remove_batch_dim",
        "lift_fresh_copy",
        "detach",
        "detach_",
        "unsafe_chunk",
        "unsafe_split",
        "broadcast_tensors",
        "alias",
    }
)
"""Operators that hand on their input although their schema does not say so."""


class GraphWalk:
    """Walks a graph and collects drafts.

    Args:
        step: the exported step.
        run: what a fake run showed; storages tell true views from copies, ``needs_grad`` which inputs need a gradient.
        model: the user's model.
    """

    def __init__(self, step: ExportedStep, run: FakeRun, model: torch.nn.Module) -> None:
        self.drafts: list[Draft] = []
        self.loss: int | None = None
        self._step = step
        self._run = run
        self._scopes = Scopes(model)
        self._parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._vmap_depth = 0
        self._nested = ""
        self._outer: torch.fx.Node | None = None

    def walk(self) -> None:
        """Fill ``drafts``, and ``loss`` with the position of the draft that makes the loss."""
        entries: dict[torch.fx.Node, Entry] = {}
        shared: dict[tuple[str, str], Storage] = {}
        for node in self._step.graph_module.graph.find_nodes(op="placeholder"):
            operand = self._step.operands[node.name]
            storage = shared.setdefault(
                (operand.kind, operand.name), Storage(operand.kind, operand.name, weight_only=operand.kind != "input")
            )
            if operand.kind == "input" and float_tensor(node.meta.get("val")) is not None and node.users:
                shape = static_shape(node.meta["val"])
                storage.writer = self._add(
                    Draft("input", "input", OpClass.FIXED, f"$input.{operand.name}", None, output_shape=shape)
                )
            entries[node] = Value(storage)
        (result,) = self._flatten(self._graph(self._step.graph_module, entries))[-1:]
        self.loss = result.storage.writer if isinstance(result, Value) else None

    def _add(self, draft: Draft) -> int:
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def _graph(self, module: torch.fx.GraphModule, entries: dict[torch.fx.Node, Entry]) -> Entry:
        for node in module.graph.nodes:
            if node.op == "call_function":
                entries[node] = self._call(module, node, entries)
            elif node.op == "output":
                return [self._entry(argument, entries) for argument in _leaves(node.args)]
            elif node.op == "get_attr":
                entries[node] = Value(Storage("constant", str(node.target), weight_only=True))
        return None

    def _entry(self, argument: Any, entries: dict[torch.fx.Node, Entry]) -> Entry:
        return entries.get(argument) if isinstance(argument, torch.fx.Node) else None

    def _flatten(self, entry: Entry) -> list[Value | None]:
        return [leaf for item in entry for leaf in self._flatten(item)] if isinstance(entry, list) else [entry]

    def _call(self, module: torch.fx.GraphModule, node: torch.fx.Node, entries: dict[torch.fx.Node, Entry]) -> Entry:
        target = node.target
        if target is python_operator.getitem:
            source = self._entry(node.args[0], entries)
            if isinstance(source, list):
                return source[node.args[1]] if node.args[1] < len(source) else None
            return source
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(module, node, entries)
        name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")
        if name in ("_vmap_increment_nesting", "_vmap_decrement_nesting"):
            self._vmap_depth += 1 if "increment" in name else -1
            return None
        if name in _PASS_THROUGH:
            source = node.args[0]
            if isinstance(source, (list, tuple)):
                return [self._entry(item, entries) for item in source]
            entry = self._entry(source, entries)
            return Value(entry.storage, is_view=True) if isinstance(entry, Value) else entry
        if self._is_view(node):
            entry = self._entry(node.args[0], entries)
            return Value(entry.storage, is_view=True) if isinstance(entry, Value) else entry
        if not isinstance(target, torch._ops.OpOverload):
            return None
        return self._operator(node, entries)

    def _is_view(self, node: torch.fx.Node) -> bool:
        """A result that shares its first argument's memory, by the operator's schema and, where known, by what really happened."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns or not node.args:
            return False
        alias = target._schema.returns[0].alias_info
        if alias is None or alias.is_write or not isinstance(node.args[0], torch.fx.Node):
            return False
        mine, source = self._run.storage.get(node.name), self._run.storage.get(node.args[0].name)
        return mine is None or source is None or mine == source

    def _higher_order(self, module: torch.fx.GraphModule, node: torch.fx.Node, entries: dict[torch.fx.Node, Entry]) -> Entry:
        name = str(node.target)
        subgraphs, operands = [], []
        for leaf in _leaves([*node.args, *node.kwargs.values()]):
            attribute = (
                getattr(module, str(leaf.target), None) if isinstance(leaf, torch.fx.Node) and leaf.op == "get_attr" else None
            )
            if isinstance(attribute, torch.fx.GraphModule):
                subgraphs.append(attribute)
            elif isinstance(leaf, torch.fx.Node):
                operands.append(self._entry(leaf, entries))
        outer, result = (self._nested, self._outer), None
        self._outer = self._outer or node
        if name not in _INLINED:
            self._nested = self._nested or f"it is called inside torch's higher-order operator {name}"
        for subgraph in subgraphs:
            placeholders = list(subgraph.graph.find_nodes(op="placeholder"))
            inner = dict(zip(reversed(placeholders), reversed(operands), strict=False))
            result = self._graph(subgraph, inner)
        self._nested, self._outer = outer
        return result

    def _operator(self, node: torch.fx.Node, entries: dict[torch.fx.Node, Entry]) -> Entry:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        reads = list(self._reads(node, entries))
        written = [self._entry(argument, entries) for argument in _written(node)]
        written_storages = [leaf.storage for entry in written for leaf in self._flatten(entry) if leaf is not None]
        output = float_tensor(node.meta.get("val"))
        if output is None:
            return None
        storage = written_storages[0] if written_storages else Storage("activation")
        draft = self._draft(node, classify.op_name(target._schema.name.split("::")[1]), reads, output)
        storage.weight_only = all(read.value.storage.weight_only for read in reads) and bool(reads)
        position = self._add(draft)
        for touched in (storage, *written_storages):
            touched.writer = position
        return Value(storage)

    def _reads(self, node: torch.fx.Node, entries: dict[torch.fx.Node, Entry]) -> Iterator[Read]:
        schema = node.target._schema
        named = [(schema.arguments[index].name, argument) for index, argument in enumerate(node.args)]
        for name, argument in [*named, *node.kwargs.items()]:
            for leaf in _leaves([argument]):
                entry = self._entry(leaf, entries)
                if isinstance(leaf, torch.fx.Node) and isinstance(entry, Value) and float_tensor(leaf.meta.get("val")) is not None:
                    yield Read(leaf, entry, name)

    def _draft(self, node: torch.fx.Node, name: str, reads: Sequence[Read], output: torch.Tensor) -> Draft:
        scope, module = self._scopes.scope_of(node, self._outer)
        activations = _participating([read for read in reads if read.is_activation])
        draft = Draft(name, name, OpClass.DEPENDENT, scope, module, output_shape=static_shape(output))
        draft.parameters = tuple(dict.fromkeys(read.value.storage.name for read in reads if _is_parameter(read)))
        in_loss = scope == LOSS_SCOPE or name in classify.LOSSES
        draft.in_loss = in_loss or any(self.drafts[read.value.storage.writer or 0].in_loss for read in reads if read.is_activation)
        if name in (classify.LINEAR, classify.CONV2D) and not draft.in_loss:
            self._adjustable(draft, node, reads)
        else:
            self._other(draft, reads, activations, output)
        if name in classify.LOSSES:
            draft.reduction = {0: "none", 1: "mean", 2: "sum"}.get(_arguments(node).get("reduction", 1), "mean")
        draft.inputs = tuple(read.value.storage.writer for read in activations)
        draft.input_shapes = tuple(static_shape(read.tensor) for read in activations)
        draft.no_grad_inputs = tuple(i for i, read in enumerate(activations) if not self._needs_grad(read.node))
        if not draft.flops:
            draft.flops = flops.other_flops(name, draft.input_shapes, draft.output_shape)
        draft.call = _call_text(node, reads, activations, draft.parameters)
        return draft

    def _needs_grad(self, node: torch.fx.Node) -> bool:
        return node.name in self._run.needs_grad or node.name not in self._run.storage

    def _adjustable(self, draft: Draft, node: torch.fx.Node, reads: Sequence[Read]) -> None:
        by_argument = {read.argument: read for read in reads}
        x, weight, bias = by_argument.get("input"), by_argument.get("weight"), by_argument.get("bias")
        draft.reason = adjustable.weight_reason(weight, bias)
        if self._nested or self._vmap_depth:
            draft.reason = draft.reason or self._nested or "it is called under torch.vmap"
        if x is None or not x.is_activation or weight is None:
            draft.op_class, draft.reason = OpClass.FIXED, ""  # a product of parameters alone
            return
        if weight.is_activation and not weight.value.storage.weight_only:
            draft.flops = 2 * math.prod(draft.output_shape) * x.tensor.shape[-1]
            return  # a product of two activations, which stays dependent
        draft.op_class = OpClass.ADJUSTABLE
        draft.weight_shape = static_shape(weight.tensor)
        draft.weight_name = weight.value.storage.name if _is_parameter(weight) and not weight.value.is_view else ""
        draft.is_own_call = adjustable.is_own_call(draft.module, draft.kind, weight, self._parameter_names)
        if draft.kind == classify.CONV2D:
            draft.attributes, reason = adjustable.conv2d_attributes(x, weight, _arguments(node))
            draft.reason = draft.reason or adjustable.module_reason(draft.module) or reason
            draft.flops = flops.conv2d_flops(draft.output_shape, draft.weight_shape)
        else:
            draft.flops = flops.linear_flops(draft.output_shape, draft.weight_shape)

    def _other(self, draft: Draft, reads: Sequence[Read], activations: Sequence[Read], output: torch.Tensor) -> None:
        others = [read for read in reads if not read.is_activation]
        mixes = any(read.tensor.dim() > 0 for read in others) or output.dtype is not torch.float32
        draft.op_class = classify.class_of(draft.name, has_activation=bool(activations), mixes_float32=mixes)
        if draft.in_loss:
            draft.op_class = OpClass.FIXED
        if draft.name in classify.LOSSES:
            draft.kind = "loss"
        elif activations and draft.parameters and not draft.in_loss:
            draft.reason = adjustable.unsupported_reason(draft.name)
            if draft.reason and draft.name not in classify.RECURRENT:
                draft.op_class = OpClass.ADJUSTABLE


def _is_parameter(read: Read) -> bool:
    return read.value.storage.kind == "parameter" and not read.is_activation


def _participating(activations: list[Read]) -> list[Read]:
    """Without zero-dimensional activations beside others: they do not take part in type promotion."""
    dimensioned = [read for read in activations if read.tensor.dim() > 0]
    return dimensioned or activations


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _written(node: torch.fx.Node) -> list[Any]:
    schema = node.target._schema
    given = {schema.arguments[index].name: argument for index, argument in enumerate(node.args)} | dict(node.kwargs)
    return [
        leaf
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in _leaves([given.get(argument.name)])
    ]


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    schema = node.target._schema
    values = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    values |= {schema.arguments[index].name: argument for index, argument in enumerate(node.args)}
    return values | dict(node.kwargs)


def _call_text(node: torch.fx.Node, reads: Sequence[Read], activations: Sequence[Read], parameters: Sequence[str]) -> str:
    positions: dict[torch.fx.Node, int] = {}
    for index, read in enumerate(activations):
        positions.setdefault(read.node, index)
    direct = {read.node: read for read in reads if _is_parameter(read) and not read.value.is_view}
    sizes = [min(read.tensor.shape, default=1) for read in reads if read.tensor.dim()]

    def describe(argument: torch.fx.Node) -> dict[str, Any]:
        tensor = argument.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return {"opaque": "value"}
        shape = list(static_shape(tensor))
        if argument in positions:
            stride = {} if tensor.is_contiguous() else {"stride": [int(step) for step in tensor.stride()]}
            return {"input": positions[argument], **stride}
        if argument in direct:
            return {"parameter": parameters.index(direct[argument].value.storage.name), "shape": shape}
        text = {"tensor": shape, "dtype": str(tensor.dtype).removeprefix("torch.")}
        if tensor.dtype.is_floating_point or tensor.dtype is torch.bool:
            return text
        return {**text, "below": max(1, _index_bound(node, reads, sizes))}

    return aten_call.encode_call(node.target, node.args, node.kwargs, describe)


def _index_bound(node: torch.fx.Node, reads: Sequence[Read], sizes: Sequence[int]) -> int:
    """Integers below it are valid wherever an operator may use them as an index."""
    name = classify.op_name(node.target._schema.name.split("::")[1])
    if name == "embedding" and reads:
        return int(reads[0].tensor.shape[0])
    if name in classify.LOSSES and reads and reads[0].tensor.dim():
        return int(reads[0].tensor.shape[min(1, reads[0].tensor.dim() - 1)])
    return int(min(sizes, default=1))

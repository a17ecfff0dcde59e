"""One pass over the exported graph, from nodes to operators in the making (:class:`~qsync_torch.tracing.graph_values.Draft`).

Precondition: the graph of :func:`~qsync_torch.tracing.export.export_step`.  Postcondition: every call of a kind's function is a
draft; views, integer work and assertions are not; every draft's inputs stand before it.
"""

from __future__ import annotations

import math
import operator as python_operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from qsync_core.errors import TraceError
from qsync_core.geometry import Geometry
from qsync_core.ir.dag import TRANSPOSED, WEIGHT_LAYOUT, OpClass
from qsync_core.ir.functions import function_of
from qsync_core.ir.precision import Precision
from qsync_torch.dtypes import LOW_FLOATS, PRECISION
from qsync_torch.kinds.kind import OperatorKind, TracedCall
from qsync_torch.kinds.table import IN_ATEN
from qsync_torch.operators.addresses import Addresses
from qsync_torch.torch_internals import OpOverload, is_higher_order
from qsync_torch.tracing import classify
from qsync_torch.tracing.aten_call import encode_call
from qsync_torch.tracing.export import ExportedStep, explain_node_failure
from qsync_torch.tracing.flops import other_flops
from qsync_torch.tracing.gradient_order import FakeRun
from qsync_torch.tracing.graph_values import Draft, Read, Storage, Value, float_tensor, static_shape
from qsync_torch.tracing.names import Scopes
from qsync_torch.tracing.running_loss import LOSS_SCOPE, RunLoss

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

_ITSELF_OR_OTHER = frozenset(
    {
        *("to", "type_as", "flatten", "atleast_1d", "atleast_2d", "sum_to_size", "positive", "real", "resolve_conj", "resolve_neg"),
        *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    }
)
"""Operators that return their input itself, and no view of it, where nothing is to be done (``weight.to(x.dtype)``)."""

_FORMAT_READS = ("_assert_tensor_metadata", "format_read")
"""The call that an export records where a format is read (:mod:`qsync_torch.tracing.export`)."""

CASTS = frozenset({"to", "to_copy", "type_as"})
"""Operators that are given a format, which may be one that was read of a tensor (``x.to(h.dtype)``)."""

_EXACT_VIEWS = frozenset(
    {
        *("view", "unsafe_view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"),
        *("t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "numpy_T", "matrix_H", "mT", "mH", "adjoint"),
        *("select", "slice", "narrow", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "chunk", "unbind"),
        *("expand", "expand_as", "broadcast_to", "broadcast_tensors", "diagonal", "detach", "alias", "lift_fresh_copy"),
        *("unsafe_chunk", "unsafe_split", "atleast_1d", "atleast_2d", "atleast_3d", "positive", "contiguous"),
        *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "add_batch_dim", "remove_batch_dim"),
        *("sum_to_size", "resolve_conj", "resolve_neg", "pin_memory"),
    }
)
"""Views whose gradients PyTorch only places, or sums up at once (``expand``); those of others (``as_strided``, ``unfold``) it adds
entry by entry in the format of what was viewed."""


_TURNS = frozenset({"t", "numpy_T", "mT", "transpose", "swapaxes", "permute"})
"""Views that may be transposes, of which a handle makes a handle (:mod:`qsync_torch.apply.handles`)."""


class GraphWalk:
    """Walks a graph and collects drafts.

    Args:
        run: what a fake run showed; storages tell true views from copies, ``requires_grad`` which inputs need a gradient.
        name: of the job, for errors.
    """

    def __init__(self, step: ExportedStep, run: FakeRun, model: torch.nn.Module, name: str) -> None:
        self.drafts: list[Draft] = []
        self.loss: int | None = None
        self._step = step
        self._run = run
        self._name = name
        self._scopes = Scopes(model)
        self._parameter_sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        self._modules = dict(model.named_modules())
        addresses = Addresses(model)
        self._addresses = {name: addresses.of(parameter) for name, parameter in model.named_parameters()}
        self._entries: dict[torch.fx.Node, Entry] = {}
        self._views: dict[int, dict[Value, int]] = {}
        """Tensors of a draft's result that operators have read, in that order, by draft: the result itself, or views of it."""
        self._flops: dict[tuple[object, ...], int] = {}  # counting takes a millisecond; layers repeat their calls
        self._vmap_depth = 0
        self._nested = ""  # why calls inside the current higher-order operator cannot be addressed
        self._outer: torch.fx.Node | None = None  # the outermost higher-order operator around the current graph

    def walk(self) -> None:
        """Fill ``drafts``, and ``loss`` with the position of the draft that makes the loss.

        Raises:
            TraceError: when an operator's shape depends on numbers that the graph reads from tensors.
        """
        shared: dict[tuple[str, str], Storage] = {}
        for node in self._step.graph_module.graph.find_nodes(op="placeholder"):
            stands_for = self._step.placeholders[node.name]
            kind, name = stands_for.kind, stands_for.name
            storage = shared.setdefault((kind, name), Storage(kind, name, weight_only=kind != "input"))
            if kind == "input" and float_tensor(node.meta.get("val")) is not None and node.users:
                shape = static_shape(node.meta["val"])
                storage.writer = self._add(Draft("input", "input", OpClass.FIXED, f"$input.{name}", None, output_shape=shape))
            self._entries[node] = Value(storage)
        results = self._graph(self._step.graph_module)
        if self._step.loss is not None:
            self.loss = self._add(self._run_loss(results, self._step.loss))
            return
        (result,) = _values(results)[-1:]
        self.loss = result.storage.writer if result is not None else None

    def _run_loss(self, outputs: Sequence[Entry], loss: RunLoss) -> Draft:
        """A loss that was run, as one operator: it reads the model's outputs that get a gradient from it."""
        nodes = _leaves(self._step.graph_module.graph.output_node().args)
        values = [(node, _values(entry)[0]) for node, entry in zip(nodes, outputs, strict=True)]
        reads = [Read(node, value, "") for node, value in values if value is not None and value.storage.writer is not None]
        draft = Draft("", "loss", OpClass.FIXED, LOSS_SCOPE, None, in_loss=True, parameters=loss.parameters)
        draft.inputs = tuple(read.producer for read in reads)
        draft.input_shapes = tuple(static_shape(read.tensor) for read in reads)
        draft.no_grad_inputs = tuple(i for i, read in enumerate(reads) if not self._requires_grad(read.node))
        draft.flops = sum(map(math.prod, draft.input_shapes))
        return draft

    def _add(self, draft: Draft) -> int:
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def _graph(self, module: torch.fx.GraphModule) -> list[Entry]:
        """Walks one graph whose placeholders have their entries, and returns the entries of its results."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                try:
                    self._entries[node] = self._call(module, node)
                except GuardOnDataDependentSymNode as error:
                    raise TraceError(explain_node_failure(self._name, node, error)) from error
            elif node.op == "get_attr":
                self._entries[node] = Value(Storage("constant", str(node.target), weight_only=True))
        return [self._entry(argument) for argument in _leaves(module.graph.output_node().args)]

    def _entry(self, argument: Any) -> Entry:
        return self._entries.get(argument) if isinstance(argument, torch.fx.Node) else None

    def _call(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Entry:
        target = node.target
        if target is python_operator.getitem:
            source, index = self._entry(node.args[0]), node.args[1]
            if isinstance(source, Value) and index != 0:
                return attrs.evolve(source)  # another part of it, and so another tensor
            if not isinstance(source, list):
                return source
            return source[index] if isinstance(index, int) and index < len(source) else None
        if is_higher_order(target):
            return self._higher_order(module, node)
        name = _schema_name(target) if isinstance(target, OpOverload) else getattr(target, "__name__", "")
        if name in ("_vmap_increment_nesting", "_vmap_decrement_nesting"):
            self._vmap_depth += 1 if "increment" in name else -1
            return None
        if name in _FORMAT_READS:
            self._note_readers(node.args[0], "dtype")
            return None
        self._note_formats(node, name)
        if name in _PASS_THROUGH and isinstance(node.args[0], (list, tuple)):
            return [self._entry(item) for item in node.args[0]]
        if name in _ITSELF_OR_OTHER and self._is_itself(node):
            return self._entry(node.args[0])
        if name == "contiguous" and isinstance(turned := self._entry(node.args[0]), Value) and turned.is_turned:
            return turned  # of which a handle makes a handle too
        if name in _PASS_THROUGH or self._is_view(node):
            entry = self._entry(node.args[0])
            if name.strip("_") not in _EXACT_VIEWS:
                self._note_readers(node.args[0], name.strip("_"))
            return _viewed(entry, node, name) if isinstance(entry, Value) else entry
        return self._operator(node, target) if isinstance(target, OpOverload) else None

    def _note_readers(self, arguments: Any, name: str) -> None:
        """Note at the operators whose results these are what else reads them."""
        for leaf in _leaves([arguments]):
            for value in _values(self._entry(leaf)):
                if value is not None and value.storage.writer is not None and float_tensor(leaf.meta.get("val")) is not None:
                    self.drafts[value.storage.writer].note_reader(name)

    def _note_formats(self, node: torch.fx.Node, name: str) -> None:
        """Note operators whose results a call casts, or reads with a format that it is given."""
        given = _given(node) if isinstance(node.target, OpOverload) else {}
        if name.strip("_") in CASTS and (given.get("dtype") is not None or "other" in given):
            self._note_readers([given.get("self"), given.get("other")], name.strip("_"))
        elif given.get("dtype") is not None:  # softmax(h, dtype=torch.float32)
            self._note_readers([*given.values()], name.strip("_"))
        if "out" in given:
            self._note_readers([*given.values()], f"{name.strip('_')} with out=")

    def _is_view(self, node: torch.fx.Node) -> bool:
        """A result that shares its first argument's memory, by the operator's schema and, where known, by what really happened."""
        if not isinstance(node.target, OpOverload) or not node.target._schema.returns or not node.args:
            return False
        alias = node.target._schema.returns[0].alias_info
        if alias is None or alias.is_write or not isinstance(node.args[0], torch.fx.Node):
            return False
        mine, source = self._run.storage.get(node.name), self._run.storage.get(node.args[0].name)
        return mine is None or source is None or mine == source

    def _is_itself(self, node: torch.fx.Node) -> bool:
        """A result that is its first argument: in the same memory, with the same shape, strides and format."""
        source = node.args[0]
        if not isinstance(source, torch.fx.Node):
            return False
        mine, its = node.meta["val"], source.meta["val"]
        if (mine.shape, mine.stride(), mine.dtype) != (its.shape, its.stride(), its.dtype):
            return False
        return self._is_view(node) or self._run.storage.get(node.name, -1) == self._run.storage.get(source.name)

    def _higher_order(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Entry:
        subgraphs: list[torch.fx.GraphModule] = []
        operands: list[Entry] = []
        for leaf in _leaves([*node.args, *node.kwargs.values()]):
            if not isinstance(leaf, torch.fx.Node):
                continue
            attribute = getattr(module, str(leaf.target), None) if leaf.op == "get_attr" else None
            if isinstance(attribute, torch.fx.GraphModule):
                subgraphs.append(attribute)
            else:
                operands.append(self._entry(leaf))
        nested, outer = self._nested, self._outer
        self._outer = outer or node
        if str(node.target) not in _INLINED:
            self._nested = nested or f"it is called inside torch's higher-order operator {node.target}"
        result: Entry = None
        for subgraph in subgraphs:
            placeholders = list(subgraph.graph.find_nodes(op="placeholder"))
            # The subgraph's arguments are the operator's last ones.
            self._entries |= dict.fromkeys(placeholders) | dict(zip(reversed(placeholders), reversed(operands), strict=False))
            result = self._graph(subgraph)
        self._nested, self._outer = nested, outer
        return result

    def _operator(self, node: torch.fx.Node, target: Any) -> Entry:
        output = float_tensor(node.meta.get("val"))
        arguments = _given(node)
        if output is None:
            self._note_readers([*arguments.values()], _op_name(node))
            return None
        reads = list(self._reads(arguments))
        written = [
            value.storage
            for argument in target._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in _leaves([arguments.get(argument.name)])
            for value in _values(self._entry(leaf))
            if value is not None
        ]
        storage = written[0] if written else Storage("activation")
        draft = self._draft(node, reads, output)
        draft.in_place = bool(written)
        storage.weight_only = all(read.value.storage.weight_only for read in reads) and bool(reads)
        position = self._add(draft)
        for touched in (storage, *written):
            touched.writer = position
        return Value(storage)

    def _reads(self, arguments: dict[str, Any]) -> Iterator[Read]:
        for name, argument in arguments.items():
            for leaf in _leaves([argument]):
                entry = self._entry(leaf)
                if isinstance(entry, Value) and float_tensor(leaf.meta.get("val")) is not None:
                    yield Read(leaf, entry, name)

    def _draft(self, node: torch.fx.Node, reads: Sequence[Read], output: torch.Tensor) -> Draft:
        name = _op_name(node)
        found = _operands(name, reads)
        reads = reads if found is None else [read for read in found[1] if read is not None]
        scope, module = self._scopes.scope_of(node, self._outer)
        # Zero-dimensional activations beside others take no part in type promotion.
        activations = [read for read in reads if read.is_activation]
        activations = [read for read in activations if read.tensor.dim() > 0] or activations
        draft = Draft(name, name, OpClass.DEPENDENT, scope, module, output_shape=static_shape(output))
        draft.parameters = tuple(dict.fromkeys(read.value.storage.name for read in reads if read.is_parameter))
        is_loss = classify.is_loss(name)
        draft.in_loss = (
            is_loss or scope == LOSS_SCOPE or any(self.drafts[read.producer].in_loss for read in reads if read.is_activation)
        )
        if found is not None and not draft.in_loss:
            draft.kind = found[0].name
            self._adjustable(draft, node, found[0], *found[1])
        else:
            _other(draft, reads, activations, output)
        if is_loss:
            draft.reduction = {0: "none", 1: "mean", 2: "sum"}.get(_arguments(node).get("reduction", 1), "mean")
        draft.inputs = tuple(read.producer for read in activations)
        if draft.in_loss:
            for producer in draft.inputs:
                if not self.drafts[producer].in_loss:
                    self.drafts[producer].note_reader("loss")
        draft.input_shapes = tuple(static_shape(read.tensor) for read in activations)
        views = tuple(self._view(read) for read in activations)
        draft.views = views if any(views) else ()
        draft.no_grad_inputs = tuple(i for i, read in enumerate(activations) if not self._requires_grad(read.node))
        draft.call = _call_text(node, reads, activations, draft.parameters, self._parameter_sizes)
        if not draft.flops:
            key = (draft.call, draft.input_shapes)
            if key not in self._flops:
                self._flops[key] = other_flops(name, node, reads, draft.output_shape)
            draft.flops = self._flops[key]
        return draft

    def _view(self, read: Read) -> int:
        seen = self._views.setdefault(read.producer, {})
        return seen.setdefault(read.value, len(seen))

    def _requires_grad(self, node: torch.fx.Node) -> bool:
        """Whether its value requires a gradient; nodes of subgraphs, which the fake run does not see, count as if."""
        return node.name in self._run.requires_grad or node.name not in self._run.storage

    def _adjustable(
        self, draft: Draft, node: torch.fx.Node, kind: OperatorKind, x: Read | None, weight: Read | None, bias: Read | None
    ) -> None:
        of_matrix = kind.aten[draft.name].transposed
        caller = None if of_matrix else draft.module
        if x is None or not x.is_activation or weight is None:
            draft.op_class = OpClass.FIXED  # a product of parameters and buffers alone
            if not of_matrix:
                draft.address = classify.address_of(caller, draft.scope, kind, weight, self._addresses)
            return
        nested = self._nested or ("it is called under torch.vmap" if self._vmap_depth else "")
        draft.address = classify.address_of(caller, draft.scope, kind, weight, self._addresses)
        is_own_call = bool(draft.address) and draft.address == draft.scope
        draft.not_applicable = classify.weight_reason(weight, bias, is_own_call) or nested or classify.layout_reason(x)
        if weight.is_activation and not weight.value.storage.weight_only:
            draft.flops = 2 * math.prod(draft.output_shape) * x.tensor.shape[-1]
            return  # a product of two activations, which stays dependent
        draft.op_class = OpClass.ADJUSTABLE
        draft.held = PRECISION.get(weight.tensor.dtype, Precision.FLOAT32)
        if weight.is_parameter and not weight.value.is_view:
            draft.frozen = weight.value.storage.name in self._frozen
        module = self._modules.get(draft.address, draft.module)
        call = TracedCall(x.tensor, weight.tensor, None if bias is None else bias.tensor, _arguments(node), module)
        draft.attributes, reason = kind.describe(call)
        draft.not_applicable = draft.not_applicable or reason
        stored = static_shape(weight.tensor)[:: -1 if weight.value.is_turned else 1]
        if of_matrix is not weight.value.is_turned:
            draft.weight_shape, draft.attributes = stored[::-1], {**draft.attributes, WEIGHT_LAYOUT: TRANSPOSED}
        else:
            draft.weight_shape = kind.row.parameter_shape(stored, Geometry.of(draft.attributes).groups)
        draft.flops = kind.row.flops(static_shape(x.tensor), draft.weight_shape, draft.output_shape)


def _operands(name: str, reads: Sequence[Read]) -> tuple[OperatorKind, tuple[Read | None, Read | None, Read | None]] | None:
    """The kind of a call, and its activation, weight and bias; None for what is of no kind."""
    if name not in IN_ATEN:
        return None
    kind, names = IN_ATEN[name]
    by_argument = {read.argument: read for read in reads}
    x, weight, bias = map(by_argument.get, (names.x, names.weight, names.bias))
    return (kind, (x, weight, bias)) if not names.transposed or classify.is_whole_matrix(x, weight) else None


def _viewed(entry: Value, node: torch.fx.Node, name: str) -> Value:
    """A view of a value; the transpose of a whole matrix where ``apply_`` follows it."""
    source = node.args[0]
    if name in _TURNS and not entry.is_view and isinstance(source, torch.fx.Node):
        mine, its = node.meta["val"], source.meta["val"]
        if its.dim() == 2 and (mine.shape, mine.stride()) == (its.shape[::-1], its.stride()[::-1]):
            return Value(entry.storage, is_turned=not entry.is_turned)
    return Value(entry.storage, is_view=True)


def _other(draft: Draft, reads: Sequence[Read], activations: Sequence[Read], output: torch.Tensor) -> None:
    mixes = any(read.tensor.dim() > 0 for read in reads if not read.is_activation) or output.dtype is not torch.float32
    mixes = mixes or any(read.tensor.is_complex() for read in reads)
    draft.op_class = classify.class_of(draft.name, has_activation=bool(activations), mixes_float32=mixes)
    draft.held = PRECISION.get(output.dtype, Precision.FLOAT32)
    if draft.in_loss:
        draft.op_class = OpClass.FIXED
    if classify.is_loss(draft.name):
        draft.kind = "loss"
    elif activations and draft.parameters and not draft.in_loss:
        function = function_of(draft.name)
        draft.not_applicable = function.refused
        if draft.not_applicable and not function.is_recurrent:
            draft.op_class = OpClass.ADJUSTABLE


def _call_text(
    node: torch.fx.Node,
    reads: Sequence[Read],
    activations: Sequence[Read],
    parameters: Sequence[str],
    sizes: Mapping[str, int],
) -> str:
    positions: dict[torch.fx.Node, int] = {}
    for index, read in enumerate(activations):
        positions.setdefault(read.node, index)
    shapes: dict[str, tuple[int, ...]] = {}
    # A transposed or reshaped parameter is one of another shape; a part of one gets no gradient here.
    direct = {
        read.node: read.value.storage.name
        for read in reads
        if read.is_parameter
        and math.prod(read.tensor.shape) == sizes[read.value.storage.name]
        and shapes.setdefault(read.value.storage.name, static_shape(read.tensor)) == static_shape(read.tensor)
    }
    argument_names = {argument: name for name, argument in _given(node).items() if isinstance(argument, torch.fx.Node)}

    def held(tensor: torch.Tensor) -> dict[str, str]:
        """Say its format, where a model that holds 16 bits has others than float32."""
        return {"held": str(tensor.dtype).removeprefix("torch.")} if tensor.dtype in LOW_FLOATS else {}

    def describe(argument: torch.fx.Node) -> dict[str, Any]:
        tensor = argument.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return {"opaque": "value"}
        shape = list(static_shape(tensor))
        if argument in positions:
            if tensor.is_complex():
                return {"input": positions[argument], "complex": True}
            stride = {} if tensor.is_contiguous() else {"stride": [int(step) for step in tensor.stride()]}
            return {"input": positions[argument], **stride, **held(tensor)}
        if argument in direct:
            pairs = {"complex": True} if tensor.is_complex() else {}
            return {"parameter": parameters.index(direct[argument]), "shape": shape, **pairs, **held(tensor)}
        text = {"tensor": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
            return {**text, "expanded": True} if tensor.dim() and tensor.shape[-1] > 1 and not tensor.stride(-1) else text
        if argument_names.get(argument) in _OFFSETS:
            first, counted = _OFFSETS[argument_names[argument]]
            return {**text, "offsets": int(_leaves(node.args)[counted].meta["val"].shape[0]), "first": first}
        return {**text, "below": max(1, _index_bound(_op_name(node), reads))}

    return encode_call(node.target, node.args, node.kwargs, describe)


_OFFSETS = {"offsets": (0, 1), "offs": (1, 0)}
"""Arguments that cut another one, at that position, into parts: 0 where they say at which row a part begins, 1 where it ends."""


def _index_bound(name: str, reads: Sequence[Read]) -> int:
    """Integers below it are valid wherever an operator may use them as an index."""
    if name in ("embedding", "embedding_bag") and reads:
        return int(reads[0].tensor.shape[0])
    if classify.is_loss(name) and reads and reads[0].tensor.dim():
        return int(reads[0].tensor.shape[min(1, reads[0].tensor.dim() - 1)])
    return min((int(min(read.tensor.shape)) for read in reads if read.tensor.dim()), default=1)


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _values(entry: Entry) -> list[Value | None]:
    return [value for item in entry for value in _values(item)] if isinstance(entry, list) else [entry]


def _schema_name(target: Any) -> str:
    return str(target._schema.name.split("::")[1])


def _op_name(node: torch.fx.Node) -> str:
    return classify.op_name(_schema_name(_overload(node)))


def _overload(node: torch.fx.Node) -> Any:
    assert isinstance(node.target, OpOverload)
    return node.target


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, as far as it gives them."""
    names = (argument.name for argument in _overload(node)._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    arguments = _overload(node)._schema.arguments
    return {argument.name: argument.default_value for argument in arguments if argument.has_default_value()} | _given(node)

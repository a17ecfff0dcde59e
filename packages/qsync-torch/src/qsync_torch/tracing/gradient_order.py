"""The order in which gradients become ready, and the buckets that DistributedDataParallel makes of them.

Autograd decides the order, so :func:`run_fake` lets it: the exported graph is run under ``FakeTensorMode`` (shapes only, no memory,
no arithmetic) and differentiated, with a hook at every parameter: the hooks at which DistributedDataParallel counts gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

from qsync_core.errors import TraceError
from qsync_core.ir.dag import Bucket
from qsync_torch.failures import first_line
from qsync_torch.torch_internals import OpOverload, pytree
from qsync_torch.tracing.export import ExportedStep, explain_node_failure


@attrs.frozen(eq=False)
class FakeRun:
    """What running the graph on fake tensors shows.

    Attributes:
        gradient_order: FQNs of the parameters that get a gradient, in the order in which they get it.
        storage: the storage of each node's tensor: nodes with equal numbers share memory.
        requires_grad: names of the nodes whose value requires a gradient.
    """

    gradient_order: tuple[str, ...]
    storage: dict[str, int]
    requires_grad: frozenset[str]


_VALUE_READERS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
_VALUE_CHECKS = frozenset({"aten._assert_scalar.default", "aten._assert_async.msg", "aten._assert_async.default"})


class _Recorder(torch.fx.Interpreter):
    """Runs the graph node by node and notes storage and ``requires_grad`` of each value."""

    def __init__(self, module: torch.fx.GraphModule, model: str) -> None:
        super().__init__(module)
        self.extra_traceback = False  # it would add the graph's own text to messages
        self._model = model
        self.storage: dict[str, int] = {}
        self.requires_grad: set[str] = set()
        self._alive: list[Any] = []  # freed storages would have their numbers used again

    def run_node(self, n: torch.fx.Node) -> Any:
        if str(n.target) in _VALUE_READERS:
            # Fake tensors have no values; the exported graph no longer depends on one read by .item().
            return getattr(getattr(n.meta.get("val"), "node", None), "pytype", int)(1)
        if str(n.target) in _VALUE_CHECKS:
            return None
        try:
            if n.target in _WRITES and _by_mask(n):
                result = self._write_by_mask(n)
            else:
                result = self._run_operator(n) if _is_foreign(n) else super().run_node(n)
        except Exception as error:
            raise TraceError(explain_node_failure(self._model, n, error)) from error
        if (storage := _storage_of(result)) is not None:
            self._alive.append(storage)
            self.storage[n.name] = id(storage)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
            self.requires_grad.add(n.name)
        return result

    def _run_operator(self, n: torch.fx.Node) -> Any:
        """Another library's operator: its own backward may read values, of which fake tensors have none."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return _ShapesOnly.apply(n.target, spec, *leaves)  # type: ignore[no-untyped-call]  # a class of ours, a method of torch's

    def _write_by_mask(self, n: torch.fx.Node) -> Any:
        """``x[mask] = values``: the gradient of the values would have as many rows as the mask has, which no fake tensor knows."""
        (x, _, values, *_), _ = self.fetch_args_kwargs_from_env(n)
        return x.add_(values.sum()) if n.target is torch.ops.aten.index_put_.default else x.add(values.sum())


def _storage_of(value: Any) -> torch.UntypedStorage | None:
    """The memory of a tensor; None where it has none of its own, as inside ``torch.func``."""
    try:
        return value.untyped_storage() if isinstance(value, torch.Tensor) else None
    except NotImplementedError:
        return None


_WRITES = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


def _by_mask(n: torch.fx.Node) -> bool:
    indices = [index.meta.get("val") for index in n.all_input_nodes[1:]]
    return any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in indices)


class _ShapesOnly(torch.autograd.Function):
    """Calls an operator; the gradients have the operands' shapes."""

    @staticmethod
    def forward(ctx: Any, target: Any, spec: pytree.TreeSpec, *leaves: Any) -> Any:
        ctx.leaves = leaves
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return target(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *(torch.empty_like(x) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in ctx.leaves)


def _is_foreign(n: torch.fx.Node) -> bool:
    """Whether a node calls an operator that another library registered, which returns new tensors."""
    if not isinstance(n.target, OpOverload) or n.target.namespace in ("aten", "prims", "prim"):
        return False
    schema = n.target._schema
    return bool(schema.returns) and not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def run_fake(step: ExportedStep, trainable: frozenset[str], model: str) -> FakeRun:
    """Forward and backward of the exported step on fake tensors.

    Args:
        trainable: FQNs of the parameters that require a gradient.

    Raises:
        TraceError: when a shape depends on tensor values; the message names the line.  When an input has no strides.  When the
            model changes in place what its backward pass needs.
    """
    order: list[str] = []
    parameters: dict[str, torch.Tensor] = {}
    placeholders = step.graph_module.graph.find_nodes(op="placeholder")
    with _like_that_of(placeholders), torch.enable_grad():
        values = []
        for node in placeholders:
            stands_for = step.placeholders[node.name]
            example = node.meta.get("val")
            if not isinstance(example, torch.Tensor):
                values.append(example)
                continue
            if example.layout not in (torch.strided, torch.sparse_coo):
                layout = str(example.layout).removeprefix("torch.")
                raise TraceError(f"{model} cannot be traced with {stands_for.name} in {layout}: give it dense, or as to_sparse()")
            value = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
            if stands_for.kind == "parameter":
                value = parameters.setdefault(stands_for.name, value)
                value.requires_grad_(stands_for.name in trainable)
            values.append(value)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        recorder = _Recorder(step.graph_module, model)
        ends = recorder.run(*values, enable_io_processing=False)
        if step.loss is None:
            ends = [loss for loss in ends[-1:] if isinstance(loss, torch.Tensor) and loss.numel() == 1]
        ends = [end for end in ends if end.requires_grad]
        try:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        except Exception as error:
            if "modified by an inplace operation" in str(error):
                raise TraceError(
                    f"{model} cannot be traced: PyTorch's backward pass fails, under a plan or not ({first_line(error)}); "
                    "write that operation without the underscore at its end, or `x = x + y` for `x += y`"
                ) from error
            raise TraceError(
                f"{model} cannot be traced: a formula of its backward pass has shapes that depend on tensor values "
                f"({first_line(error)}); choose between values with torch.where instead of by an index"
            ) from error
        if step.loss is not None:
            order[:0] = [name for name in step.loss.parameters if name not in order]
    return FakeRun(tuple(order), recorder.storage, frozenset(recorder.requires_grad))


def _like_that_of(placeholders: Sequence[torch.fx.Node]) -> AbstractContextManager[Any]:
    """A mode of fake tensors like that in which an export has made its own, without what it knows of sizes."""
    examples = (node.meta.get("val") for node in placeholders)
    mode = next(example.fake_mode for example in examples if isinstance(example, torch.Tensor))
    return type(mode)(allow_non_fake_inputs=True)  # type: ignore[no-any-return]


_MEBIBYTE = 1024 * 1024
_DEFAULT_BUCKET_CAP_MB = 25
"""DistributedDataParallel's own default; with it the first bucket is smaller (1 MiB), so that communication starts early."""


def form_buckets(
    parameters: Sequence[tuple[str, torch.Tensor]],
    gradient_order: Sequence[str],
    bucket_cap_mb: float | None = None,
) -> tuple[Bucket, ...]:
    """The buckets as DistributedDataParallel forms them after its first iteration, first ready first.

    After the first backward pass the reducer packs parameters again in the order in which their gradients became ready
    (``Reducer::rebuild_buckets``).  It does not when some parameter got no gradient (``find_unused_parameters=True``): then the
    first buckets stay, which are packed in the order of definition and reduced last to first.

    Args:
        parameters: ``named_parameters`` that require a gradient, tied ones once; only sizes and dtypes are used.
        gradient_order: names in the order in which gradients become ready.
        bucket_cap_mb: DistributedDataParallel's argument of that name, in MiB; None for its default.
    """
    tensors = dict(parameters)
    cap = int((_DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * _MEBIBYTE)
    limits = [_MEBIBYTE, cap] if bucket_cap_mb is None else [cap]  # the first is small, so that its all-reduce begins early
    if set(gradient_order) == set(tensors):
        names = list(gradient_order)
        assigned = _assigned([tensors[name] for name in names], limits)
    else:
        names = list(tensors)
        assigned = sorted(_assigned(list(tensors.values()), limits), reverse=True)
    return tuple(
        Bucket(
            parameters=tuple(names[index] for index in indices),
            nbytes=sum(tensors[names[index]].numel() * tensors[names[index]].element_size() for index in indices),
        )
        for indices in assigned
    )


def _assigned(tensors: Sequence[torch.Tensor], limits: Sequence[int]) -> list[list[int]]:
    """The tensors of each bucket by their numbers, as DistributedDataParallel fills them: one after the other, by format and
    device, each until it holds its limit; the last limit is that of all further ones."""
    filled: list[list[int]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    turns: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        open_.setdefault(kind, []).append(index)
        sizes[kind] += tensor.numel() * tensor.element_size()
        if sizes[kind] >= limits[min(turns[kind], len(limits) - 1)]:
            filled.append(open_.pop(kind))
            sizes[kind] = 0
            turns[kind] += 1
    return [*filled, *open_.values()]

"""The order in which gradients become ready, found by a backward pass over fake tensors.

Autograd decides the order; so autograd is asked.  The exported graph is run under ``FakeTensorMode`` (shapes only, no
memory, no arithmetic) and differentiated, with a hook at every parameter: the same hooks at which
DistributedDataParallel counts gradients.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from qsync_core.errors import TraceError
from qsync_torch.export_failure import explain_node_failure
from qsync_torch.exported_step import ExportedStep


@attrs.frozen(eq=False)
class FakeRun:
    """What running the graph on fake tensors shows.

    Attributes:
        gradient_order: FQNs of the parameters that get a gradient, in the order in which they get it.
        storage: the storage of each node's tensor: nodes with equal numbers share memory.
        needs_grad: names of the nodes whose value requires a gradient.
    """

    gradient_order: tuple[str, ...]
    storage: dict[str, int]
    needs_grad: frozenset[str]


_VALUE_READERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_VALUE_CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default)


class _Recorder(torch.fx.Interpreter):
    """Runs the graph node by node and notes storage and ``requires_grad`` of each value."""

    def __init__(self, module: torch.fx.GraphModule, model: str) -> None:
        super().__init__(module)
        self.extra_traceback = False  # it would add the graph's own text to messages
        self._model = model
        self.storage: dict[str, int] = {}
        self.needs_grad: set[str] = set()
        self._alive: list[Any] = []  # freed storages would have their numbers used again

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target in _VALUE_READERS:
            # Fake tensors have no values; what a model does with one read by .item() does not change its graph any more.
            return getattr(getattr(n.meta.get("val"), "node", None), "pytype", int)(1)
        if n.target in _VALUE_CHECKS:
            return None
        try:
            result = super().run_node(n)
        except Exception as error:
            raise TraceError(explain_node_failure(self._model, n, error)) from error
        if isinstance(result, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(result):
            storage = result.untyped_storage()
            self._alive.append(storage)
            self.storage[n.name] = storage._cdata
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
            self.needs_grad.add(n.name)
        return result


def run_fake(step: ExportedStep, trainable: frozenset[str], model: str) -> FakeRun:
    """Forward and backward of the exported step on fake tensors.

    Args:
        step: the exported step.
        trainable: FQNs of the parameters that require a gradient.
        model: the model's name, for messages.

    Raises:
        TraceError: when a shape depends on tensor values; the message names the line.
    """
    order: list[str] = []
    parameters: dict[str, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        values = []
        for node in step.graph_module.graph.find_nodes(op="placeholder"):
            operand = step.operands[node.name]
            example = node.meta.get("val")
            if not isinstance(example, torch.Tensor):
                values.append(example)
                continue
            value = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
            if operand.kind == "parameter":
                value = parameters.setdefault(operand.name, value)
                value.requires_grad_(operand.name in trainable)
            values.append(value)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        recorder = _Recorder(step.graph_module, model)
        (loss,) = recorder.run(*values, enable_io_processing=False)[-1:]
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
            loss.backward()
    return FakeRun(tuple(order), recorder.storage, frozenset(recorder.needs_grad))

"""A loss that cannot be exported, run as it is: which of the model's outputs get a gradient from it, and what kind it is.

It runs on outputs of its own, those of one forward pass without autograd; of what it does inside the graph knows nothing but its
cost, which ``profile`` measures (docs/decisions/losses-that-run.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from qsync_core.errors import QSyncError, TraceError
from qsync_core.ir.dag import Operator
from qsync_torch.distributed.alone import Alone
from qsync_torch.failures import first_line, place_of
from qsync_torch.job import Batch, Job, autocast
from qsync_torch.torch_internals import pytree
from qsync_torch.tracing.held_state import held_state

LOSS_SCOPE = "$loss"
"""Scope of what runs outside the model; of a loss that was run, the whole of it has that name."""

_KIND_OF_NODE = {
    "NllLossBackward": "nll",
    "NllLoss2DBackward": "nll",
    "MseLossBackward": "mse",
    "SmoothL1LossBackward": "smooth_l1",
    "HuberLossBackward": "huber",
    "BinaryCrossEntropyBackward": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward": "binary_cross_entropy",
    "CtcLossBackward": "ctc",
    "SoftMarginLossBackward": "soft_margin",
    "MultiMarginLossBackward": "multi_margin",
    "MultilabelMarginLossBackward": "multilabel_margin",
}
"""Autograd's name of a loss function that is one operator, and the kind that a PrecisionDag stores."""
_DIFFERENTIATES = ("appears to not have been used in the graph", "does not require grad and does not have a grad_fn")
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
"""ATen's numbers of the reductions."""


@attrs.frozen
class RunLoss:
    """What running a loss shows.

    Attributes:
        outputs: positions, among the model's floating-point outputs, of those that get a gradient.
        parameters: FQNs of the parameters that it reads besides, in the order in which they get their gradients.
        kind, reduction: as a :class:`~qsync_core.ir.dag.PrecisionDag` has them.
    """

    outputs: tuple[int, ...]
    parameters: tuple[str, ...]
    kind: str
    reduction: str


def is_run_loss(operator: Operator) -> bool:
    """Whether an operator of a graph is a whole loss, which no recorded call can run again."""
    return operator.op_id.fqn == LOSS_SCOPE


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of what a model returns, with ``function`` of every floating-point tensor in its place, in a fixed order.

    Tensors are looked for in whatever PyTorch takes apart, in mappings, and in the attributes of other objects (a distribution).
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf) if leaf.is_floating_point() or leaf.is_complex() else leaf
        if isinstance(leaf, Mapping) and not callable(leaf):
            return type(leaf)({key: map_tensors(part, function) for key, part in leaf.items()})  # type: ignore[call-arg]
        if not hasattr(leaf, "__dict__") or callable(leaf):
            return leaf
        made = copy.copy(leaf)
        vars(made).update({name: map_tensors(part, function) for name, part in vars(leaf).items()})
        return made

    return pytree.tree_map(of_leaf, value)


def outputs_of(job: Job, model: torch.nn.Module, batch: Batch) -> Any:
    """What a model returns for a batch, without autograd and other ranks; what it holds and the random state are as before."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    with held_state(model), torch.no_grad(), _same_random_state(device), autocast(job.autocast_base, device), Alone():
        return model(*batch.args, **batch.kwargs)


def run_loss(job: Job, batch: Batch) -> RunLoss:
    """Run the job's loss on the outputs of one forward pass and differentiate it by them.

    Raises:
        JobError: when a script's loss fails, naming its line.
        TraceError: when another loss or the forward pass fails, naming the line; when the loss differentiates the model's outputs;
            when it returns something else than one scalar tensor.
    """
    given: list[torch.Tensor] = []

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor.detach().requires_grad_())
        return given[-1].clone()  # a loss may write into it, which no leaf permits

    try:
        output = map_tensors(outputs_of(job, job.model, batch), detached)
    except Exception as error:
        raise TraceError(
            f"the loss of {job.name} reads values, so that it is run on outputs of a forward pass without autograd, which fails"
            f"{place_of(error)} ({first_line(error)}); see that the model runs under torch.no_grad()"
        ) from error
    parameters = {parameter: name for name, parameter in job.model.named_parameters() if parameter.requires_grad}
    alone = Alone()
    device = batch.tensors[0].device if batch.tensors else torch.device("cpu")
    with held_state(job.loss), _same_random_state(device), torch.enable_grad():
        try:
            loss = alone.run(job.loss, output, batch)
        except Exception as error:
            if any(sign in str(error) for sign in _DIFFERENTIATES):
                raise TraceError(
                    f"the loss of {job.name} differentiates the model's outputs{place_of(error)}, and a plan's graph has no "
                    "derivatives inside a step: train such a model without a plan, or without that term of its loss"
                ) from error
            if isinstance(error, QSyncError):
                raise
            raise TraceError(
                f"the loss of {job.name} fails{place_of(error)} ({first_line(error)}); see that it runs on what the model returns"
            ) from error
    check_scalar(job.name, [loss])
    if not loss.requires_grad:
        return RunLoss((), (), "custom", "mean")
    reached = _leaves_behind(loss)
    order: list[str] = []
    handles = [
        parameter.register_hook(lambda gradient, name=name: order.append(name))
        for parameter, name in parameters.items()
        if parameter in reached
    ]
    try:
        wanted = [*given, *(parameter for parameter in parameters if parameter in reached)]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    outputs = tuple(index for index, _ in enumerate(given) if gradients[index] is not None)
    return RunLoss(outputs, tuple(dict.fromkeys(order)), *_kind_of(loss))


def check_scalar(name: str, values: list[Any]) -> None:
    """Refuse what a loss function returns unless it is one scalar tensor.

    Raises:
        TraceError: saying what it is.
    """
    if len(values) == 1 and isinstance(values[0], torch.Tensor) and values[0].dim() == 0:
        return
    found = ", ".join(map(_what, values)) or "nothing"
    is_one = len(values) == 1 and not isinstance(values[0], (dict, list, tuple))
    advice = "reduce it with .mean() or .sum()" if is_one else "return the one that backward() is called on"
    raise TraceError(f"the loss of {name} must be one scalar tensor, got {found}; {advice}")


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return "None" if value is None else "a Python number"
    return f"a {type(value).__name__}"


@contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """Random numbers that are the same every time, and the generators as they were afterwards."""
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _behind(loss: torch.Tensor, ends: Callable[[Any], object] = lambda node: False) -> Iterator[Any]:
    """The nodes of autograd's graph from a loss backwards, each once, nearer ones first; none behind one at which it ``ends``."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    for node in waiting:
        yield node
        if not ends(node):
            fresh = [source for source in dict.fromkeys(_sources(node)) if source not in seen]
            seen.update(fresh)
            waiting += fresh


def _sources(node: Any) -> list[Any]:
    return [source for source, _ in node.next_functions if source is not None]


def _leaves_behind(loss: torch.Tensor) -> set[torch.Tensor]:
    return {node.variable for node in _behind(loss) if hasattr(node, "variable")}


def _kind_of_node(node: Any) -> str:
    return _KIND_OF_NODE.get(node.name().rstrip("0123456789"), "")


def _kind_of(loss: torch.Tensor) -> tuple[str, str]:
    """Kind and reduction of a loss, as :func:`~qsync_torch.tracing.classify.loss_kind` finds them in an exported one."""
    kinds: set[str] = set()
    reductions: list[str] = []
    for node in _behind(loss, _kind_of_node):
        if kind := _kind_of_node(node):
            is_log_softmax = any(source.name().startswith("LogSoftmaxBackward") for source in _sources(node))
            kinds.add("cross_entropy" if kind == "nll" and is_log_softmax else kind)
            reductions.append(_REDUCTIONS.get(getattr(node, "_saved_reduction", 0), "none"))
        elif hasattr(node, "variable"):
            kinds.add("custom")
        elif (how := node.name().partition("Backward")[0].lower()) in ("mean", "sum"):
            reductions.append(how)
    known = [reduction for reduction in reductions if reduction != "none"]
    return (kinds.pop() if len(kinds) == 1 else "custom"), (known[0] if known else "none")

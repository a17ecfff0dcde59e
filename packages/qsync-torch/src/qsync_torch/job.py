"""A job: what is trained (a model, its batches, its loss and its optimizer), and whether a graph belongs to it."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from qsync_core.errors import JobError, QSyncError
from qsync_core.ir.checks import MOST_MICRO_BATCHES
from qsync_core.ir.dag import INPUT_STRIDE, Operator, PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled
from qsync_torch.dtypes import PRECISION, TORCH_DTYPE
from qsync_torch.failures import first_line
from qsync_torch.torch_internals import pytree

DEFAULT_BATCH_SIZE = 8
"""Batch size of a job whose author gave none."""


@attrs.frozen(eq=False)
class Batch:
    """One batch: what the model is called with, and what the loss compares with.

    Attributes:
        args, kwargs: the model's positional and keyword arguments; dimension 0 of their tensors is the batch.
        target: anything the loss needs besides the model's output (labels, a tuple of labels); None where the model itself
            is given the labels.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = attrs.field(factory=dict)
    target: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch once, in the order args, kwargs, target."""
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.target))
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Samples in it: dimension 0 of its first tensor that has dimensions, 1 where there is none."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.dim()), 1)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on ``device`` (memory formats are kept)."""

        moved = {id(tensor): tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors}

        def move(leaf: Any) -> Any:
            return moved.get(id(leaf), leaf)

        args, kwargs, target = pytree.tree_map(move, (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target)


def autocast(base: Precision, device: torch.device | str) -> AbstractContextManager[Any]:
    """PyTorch's autocast in a 16-bit base; for float32 nothing: what is active stays."""
    if base is Precision.FLOAT32:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(torch.device(device).type, TORCH_DTYPE[base])
    return context


_SIXTEEN_BITS = (Precision.BFLOAT16, Precision.FLOAT16)


def held_format(model: torch.nn.Module) -> Precision:
    """The float format in which a model holds most elements of its weights; float32 where it has none."""
    held: Counter[Precision] = Counter()
    for parameter in model.parameters():
        if parameter.dim() > 1 and (precision := PRECISION.get(parameter.dtype)) in (Precision.FLOAT32, *_SIXTEEN_BITS):
            held[precision] += parameter.numel()
    return max(held, key=lambda precision: (held[precision], precision is Precision.FLOAT32), default=Precision.FLOAT32)


def _check_amp(job: Job, attribute: attrs.Attribute[str | None], amp: str | None) -> None:
    if amp == "float16":
        raise JobError(
            f"{job.name} cannot be planned under autocast in float16: its steps depend on the scale of the script's GradScaler, "
            "which no trace or measurement has; train under autocast in bfloat16, or without autocast and with float16 as a rung"
        )
    if amp not in (None, "bfloat16"):
        raise JobError(
            f"the amp of {job.name} is the format of its autocast, 'bfloat16', or None for training without, got {amp!r}"
        )


def check_accumulate(name: str, accumulate: object) -> None:
    """Refuse what is no number of micro-batches.

    Raises:
        JobError: naming the value.
    """
    if type(accumulate) is not int or not 1 <= accumulate <= MOST_MICRO_BATCHES:
        raise JobError(
            f"accumulate of {name} is how many micro-batches the loop runs for each optimizer step, an integer from 1 to "
            f"{MOST_MICRO_BATCHES}, got {accumulate!r}"
        )


def without_shape(model: torch.nn.Module) -> str:
    """The first parameter or buffer of a lazy module that has seen no batch; empty where all have shapes."""
    stored = itertools.chain(model.named_parameters(), model.named_buffers())
    return next((name for name, tensor in stored if is_lazy(tensor)), "")


def check_shapes(name: str, model: torch.nn.Module) -> None:
    """Refuse a model whose lazy modules have seen no batch: neither it nor its optimizer can be copied or measured.

    Raises:
        JobError: naming a parameter or buffer.
    """
    if missing := without_shape(model):
        raise JobError(
            f"{missing} of {name} has no shape yet, which its lazy module takes from a batch: run the model on one first"
        )


def _compiled(how: Compiled | bool | None) -> Compiled | None:
    return how if isinstance(how, Compiled) else Compiled() if how else None


@attrs.frozen(eq=False)
class Job:
    """A training job: the model with its data, loss and optimizer.

    Attributes:
        name: the model's name in artifacts and messages.
        model: the module; parameters may be on any device and are not copied.  Lazy modules must have seen a batch.
        batch: makes the batch of a step on the CPU: ``batch(step, batch_size)``; the same arguments give the same batch.  What it
            raises becomes a JobError, as do a signature with other arguments (at once) and a result that is not a :class:`Batch`.
        loss: ``loss(model_output, batch)``, a scalar tensor.
        optimizer: makes the optimizer from the parameters.
        batch_size: samples a rank gets per step; where gradients are accumulated, per micro-batch.
        amp: ``"bfloat16"`` where the script trains under ``torch.autocast`` in that format (model and loss inside, backward
            outside); None where it does not (docs/design/precision-semantics.md#jobs-under-amp).
        accumulate: micro-batches whose gradients the script adds up before its optimizer steps.  Measured steps have one.
        compiles: how the script compiles its model before it trains it, True for ``torch.compile(model)``; None where it does not.
            Whole steps are measured so.
        reads_loss: whether the loop reads a number of every step behind its backward pass (``loss.item()``, a filter of losses that
            are not finite), for which the CPU waits.  Measured steps do the same.
        communication: attributes of :class:`~qsync_core.ir.communication.CommunicationSettings` that the script decides by itself,
            because its DistributedDataParallel takes nothing of the plan's; plans are for these.
    """

    name: str
    model: torch.nn.Module
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    batch_size: int = attrs.field(default=DEFAULT_BATCH_SIZE, validator=attrs.validators.ge(1))
    amp: str | None = attrs.field(default=None, validator=_check_amp)
    accumulate: int = 1
    compiles: Compiled | None = attrs.field(default=None, converter=_compiled)
    reads_loss: bool = False
    communication: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        check_accumulate(self.name, self.accumulate)
        check_shapes(self.name, self.model)
        object.__setattr__(self, "batch", _checked_batch(self.batch, self.name))

    @property
    def base(self) -> Precision:
        """Format that operators run in where nothing is lowered: the autocast's, else the one in which most weights are held."""
        return held_format(self.model) if self.amp is None else Precision(self.amp)

    @property
    def autocast_base(self) -> Precision:
        """The format of its autocast; float32 where there is none."""
        return Precision.FLOAT32 if self.amp is None else Precision(self.amp)

    def compute_loss(self, batch: Batch, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Forward pass and loss of one batch, under the job's autocast; ``model`` stands in for the job's own (a DDP wrapper, a
        copy)."""
        model = self.model if model is None else model
        parameter = next(model.parameters(), None)
        with autocast(self.autocast_base, "cpu" if parameter is None else parameter.device):
            return self.loss(model(*batch.args, **batch.kwargs), batch)

    def copy_model(self) -> torch.nn.Module:
        """A copy of the model, which training does not change the model by.

        Raises:
            JobError: when it cannot be copied.
        """
        # Tensors that a forward computes and leaves in its module (the old ``torch.nn.utils.weight_norm``) refuse a deep copy.
        left = (value for module in self.model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
        memo = {id(value): value.detach().clone() for value in left if not value.is_leaf}
        try:
            return with_own_forwards(copy.deepcopy(self.model, memo), memo)
        except Exception as error:
            raise JobError(
                f"the model of {self.name} cannot be copied ({first_line(error)}); measurements "
                "train a copy, so see that copy.deepcopy(model) works"
            ) from error

    def batches(self, steps: int, *, start: int = 0, batch_size: int | None = None) -> Iterator[Batch]:
        """The batches of ``steps`` steps, from step ``start`` on."""
        for step in range(start, start + steps):
            yield self.batch(step, batch_size or self.batch_size)


def with_own_forwards(copied: torch.nn.Module, memo: Mapping[int, Any]) -> torch.nn.Module:
    """Have forwards that a library put in the place of a module's (TRL's, in a closure) run the modules of a copy.

    Args:
        copied: the copy; memo: what ``copy.deepcopy`` made, by the identity of what it was made of.
    """

    def rebound(value: Any, depth: int = 3) -> Any:
        if isinstance(value, torch.nn.Module):
            return memo.get(id(value), value)
        if isinstance(value, types.MethodType):
            function, owner = rebound(value.__func__, depth), memo.get(id(value.__self__), value.__self__)
            return value if function is value.__func__ and owner is value.__self__ else types.MethodType(function, owner)
        if not isinstance(value, types.FunctionType) or not value.__closure__ or not depth:
            return value
        try:
            held = [cell.cell_contents for cell in value.__closure__]
        except ValueError:  # a name that has no value yet
            return value
        found = [rebound(one, depth - 1) for one in held]
        if all(one is was for one, was in zip(found, held, strict=True)):
            return value
        cells = tuple(types.CellType(one) for one in found)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        return made

    for module in copied.modules():
        if "forward" in vars(module):
            module.__dict__["forward"] = rebound(vars(module)["forward"])
    return copied


def _checked_batch(make: Callable[[int, int], Batch], name: str) -> Callable[[int, int], Batch]:
    """The batch function, whose failures become JobErrors."""
    if hasattr(make, "checked_by_qsync"):
        return make
    _check_batch_arguments(make, name)

    @functools.wraps(make)
    def batch(step: int, batch_size: int) -> Batch:
        try:
            made = make(step, batch_size)
        except QSyncError:
            raise
        except Exception as error:
            raise JobError(
                f"the batch function of {name} failed at step {step} with batch size {batch_size}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Batch):
            raise JobError(f"the batch function of {name} must return a qsync_torch.job.Batch, got {type(made).__name__}")
        return made

    batch.checked_by_qsync = True  # type: ignore[attr-defined]
    return batch


def _check_batch_arguments(make: Callable[[int, int], Batch], name: str) -> None:
    """Refuse a batch function that cannot be called as it will be, before anything is traced or measured.

    Raises:
        JobError: with the arguments that it has, and those that it is called with.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # nothing is known of some callables that are written in C
        return
    try:
        signature.bind(0, DEFAULT_BATCH_SIZE)
    except TypeError:
        raise JobError(
            f"the batch function of {name} has the arguments {signature}; it is called as batch(step, batch_size) "
            "and must return a qsync_torch.job.Batch"
        ) from None


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers that a loop steps one after the other, as one; each keeps its own parameters and state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # The base's constructor would make groups and state of its own.
        self.optimizers = tuple(optimizers)
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """The state of every parameter, as its optimizer has it now."""
        return {parameter: entry for one in self.optimizers for parameter, entry in one.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step of each, in their order."""
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the parameters of every optimizer."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)


def waits_of_loop(job: Job, device: torch.device) -> dict[str, str]:
    """What makes a job's steps take longer on a device, for telling measurements apart: its loop waits for each of them."""
    return {"loop": "reads the loss of every step"} if job.reads_loss and device.type != "cpu" else {}


def describe_optimizer(job: Job) -> str:
    """The class, parameter groups and hyper-parameters of a job's optimizer, for telling one from another.

    It is made from the job's own parameters, and leaves them as they are.
    """
    optimizer = job.optimizer([parameter for parameter in job.model.parameters() if parameter.requires_grad])
    return " and ".join(map(_described, optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]))


def _described(optimizer: torch.optim.Optimizer) -> str:
    groups = [
        f"{sum(parameter.numel() for parameter in group['params'])} parameters: "
        + ", ".join(f"{name}={_plain(value)}" for name, value in sorted(group.items()) if name != "params")
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}({'; '.join(groups)})"


def _plain(value: Any) -> str:
    """A hyper-parameter; of what is neither a number nor a text only the type, because its text may be another in each process."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    known = value is None or isinstance(value, (bool, int, float, str, torch.Tensor))
    return repr(value) if known else type(value).__qualname__


TRACE_IT = "run 'qsync trace' for this job"
"""What to do about a graph that a person names."""


def check_same_model(job: Job, dag: PrecisionDag, advice: str = TRACE_IT) -> None:
    """Compare parameters (names and shapes), accumulation and batch size of a graph with a job's, before the wrong one is measured.

    Raises:
        QSyncError: naming the first difference.
    """
    ours = {name: tuple(parameter.shape) for name, parameter in job.model.named_parameters()}
    theirs = {parameter.fqn: parameter.shape for parameter in dag.parameters}
    for name in [*theirs, *ours]:
        mine, other = ours.get(name), theirs.get(name)
        if mine == other:
            continue
        if mine is None or other is None:
            difference = f"only {'the graph' if mine is None else 'the job'} has {name}"
        else:
            difference = f"parameter {name} has shape {list(mine)} in the job and {list(other)} in the graph"
        raise QSyncError(f"the graph ({dag.model}) is of another model than the job ({job.name}): {difference}; {advice}")
    if (job.base, job.autocast_base) != (dag.base, dag.autocast_base):
        raise QSyncError(
            f"the graph was traced of a job that trains {_under(dag)}, and {job.name} trains {_under(job)} (its amp is "
            f"{job.amp!r}); {advice}"
        )
    if job.accumulate != dag.accumulate:
        raise QSyncError(
            f"the graph was traced of a job that accumulates {dag.accumulate} micro-batches in an optimizer step, and {job.name} "
            f"accumulates {job.accumulate}; {advice}"
        )
    if job.batch_size != dag.batch_size:
        raise QSyncError(
            f"the graph was traced with batch size {dag.batch_size} and the job has {job.batch_size}; "
            f"give --batch-size {dag.batch_size}, or {advice}"
        )


def _under(one: Job | PrecisionDag) -> str:
    if one.autocast_base is not Precision.FLOAT32:
        return f"under autocast in {one.autocast_base}"
    return "without autocast" if one.base is Precision.FLOAT32 else f"without autocast, with weights in {one.base}"


def check_same_job(dag: PrecisionDag, traced: PrecisionDag, advice: str = TRACE_IT) -> None:
    """Compare a stored graph with what the job's model and loss give now, before one is measured under the name of the other.

    Buckets may differ: they are as the graph's ``--bucket-cap-mb`` made them.

    Raises:
        QSyncError: naming what differs.
    """
    if (dag.loss, dag.loss_reduction) != (traced.loss, traced.loss_reduction):
        difference = f"its loss is {dag.loss} ({dag.loss_reduction}), and the job's {traced.loss} ({traced.loss_reduction})"
    elif dag.operators != traced.operators and dag.batch_size == traced.batch_size:
        ours, theirs = {o.op_id: o for o in traced.operators}, {o.op_id: o for o in dag.operators}
        first = next(op_id for op_id in (*theirs, *ours) if ours.get(op_id) != theirs.get(op_id))
        difference = f"operator {first} is not the same in both"
    else:
        return
    raise _not_the_same(dag, difference, advice)


def _not_the_same(dag: PrecisionDag, difference: str, advice: str) -> QSyncError:
    return QSyncError(f"the graph ({dag.model}) is not of this job as it is now: {difference}; {advice}")


def compare_as_rank(dag: PrecisionDag, traced: PrecisionDag, advice: str) -> str:
    """Compare the graph of a job with what another rank of it traces, whose batches may have other sizes.

    Ranks synchronise gradients, so they must have the same loss and the same operators with parameters.  The sizes of activations
    may differ (each rank pads to its own longest sample), and so may operators without parameters (what one rank alone gathers).

    Returns:
        What differs though it may, in words; empty where nothing does.

    Raises:
        QSyncError: naming what must not differ.
    """
    theirs, ours = ({o.op_id: o for o in graph.operators} for graph in (dag, traced))
    for op_id in dict.fromkeys((*theirs, *ours)):
        if _trained(theirs.get(op_id)) != _trained(ours.get(op_id)):
            raise _not_the_same(dag, f"operator {op_id} is not the same in both", advice)
    check_same_job(dag, attrs.evolve(traced, operators=dag.operators), advice)
    for op_id in dict.fromkeys((*theirs, *ours)):
        if op_id not in ours or op_id not in theirs:
            return f"only {'the graph' if op_id in theirs else 'this rank'} has {op_id}"
    for op_id, was in theirs.items():
        now = ours[op_id]
        for its, own in zip((*was.input_shapes, was.output_shape), (*now.input_shapes, now.output_shape), strict=False):
            if its != own:
                return f"{op_id} has activations of {list(own)}, and of {list(its)} in the graph"
    return next((f"{op_id} is not the same in both" for op_id, was in theirs.items() if was != ours[op_id]), "")


def _trained(operator: Operator | None) -> Operator | None:
    """What all ranks must share of an operator; None of one without parameters."""
    if operator is None or not (operator.parameters or operator.is_adjustable):
        return None
    attributes = {name: value for name, value in operator.attributes.items() if name not in (INPUT_STRIDE, "call")}  # have sizes
    return attrs.evolve(
        operator, inputs=(), input_shapes=(), output_shape=(), no_grad_inputs=(), views=(), attributes=attributes, flops=0, depth=0
    )

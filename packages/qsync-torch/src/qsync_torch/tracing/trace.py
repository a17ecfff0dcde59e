"""``trace``: from a job to its PrecisionDag (docs/artifacts.md#names-of-operators)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from qsync_core.errors import JobError, TraceError
from qsync_core.ir.dag import WEIGHT_LAYOUT, OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS
from qsync_torch.batch_axes import batch_axes
from qsync_torch.dtypes import LOW_FLOATS
from qsync_torch.job import Batch, Job
from qsync_torch.kinds.table import FUNCTIONAL, OF_ROWS, is_own_forward, reads_own_weight
from qsync_torch.tracing.aten_call import CALL_ATTRIBUTE
from qsync_torch.tracing.classify import loss_kind
from qsync_torch.tracing.export import ExportedStep, export_model, export_step, quiet_torch, training, with_run_loss
from qsync_torch.tracing.gradient_order import FakeRun, form_buckets, run_fake
from qsync_torch.tracing.graph_values import Draft
from qsync_torch.tracing.graph_walk import CASTS, GraphWalk
from qsync_torch.tracing.held_state import held_state
from qsync_torch.tracing.names import name_operators
from qsync_torch.tracing.running_loss import run_loss

FLOAT32 = Variant.plain(Precision.FLOAT32)


def trace(job: Job, *, bucket_cap_mb: float | None = None) -> PrecisionDag:
    """Trace one training step of a job, without running it and without copying its parameters.

    Only where its loss cannot be exported (it reads values, leaves PyTorch, or has shapes that depend on values) does one forward
    pass run, without autograd, for outputs that the loss can be run on; the loss is then one operator of the graph.

    A job under AMP is traced without its autocast: the operators are the same ones, and what autocast casts follows from the base
    that the graph records.

    Args:
        bucket_cap_mb: as given to DistributedDataParallel; None for its default.

    Returns:
        The graph.  Every linear and convolution call is an operator, functional, tied and repeated calls included; those that
        ``apply_`` cannot address say why in ``not_applicable``.

    Raises:
        TraceError: when the model cannot be exported (with the line and what to do), a parameter is neither float32 nor a 16-bit
            float, or the loss is not a scalar that depends on the parameters.
        JobError: when the job's batch function fails or returns something else than a Batch.
    """
    if bucket_cap_mb is not None and not (math.isfinite(bucket_cap_mb) and bucket_cap_mb > 0):
        raise TraceError(f"the bucket size is a number of MiB above 0, got {bucket_cap_mb}")
    _check_parameters(job)
    device = next((parameter.device for parameter in job.model.parameters()), torch.device("cpu"))
    batch = job.batch(0, job.batch_size).to(device)
    trainable = [(name, parameter) for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    # Constants of an exported graph are the loss's own tensors, which what runs the graph's operators writes into.
    with held_state(job.model, job.loss, fakes=job.model.buffers()):
        step, run = _step_of(job, batch, frozenset(name for name, _ in trainable))
        if not run.gradient_order:
            raise TraceError(
                f"no parameter of {job.name} gets a gradient; compute the loss from the model's output, and give "
                "torch.utils.checkpoint.checkpoint use_reentrant=False where its arguments need no gradient"
            )
        walk = GraphWalk(step, run, job.model, job.name)
        walk.walk()
    _note_held(walk.drafts, job)
    loss, loss_reduction = loss_kind(walk.drafts, walk.loss) if step.loss is None else (step.loss.kind, step.loss.reduction)
    return PrecisionDag(
        model=job.name,
        operators=_operators(walk.drafts, job),
        parameters=tuple(
            Parameter(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
            for name, parameter in job.model.named_parameters()
        ),
        buckets=form_buckets(trainable, run.gradient_order, bucket_cap_mb),
        loss=loss,
        loss_reduction=loss_reduction,
        batch_size=job.batch_size,
        base=job.base,
        batch_axes=batch_axes(job.model, batch.args, batch.kwargs, job.batch_size),
        accumulate=job.accumulate,
        autocast=job.amp is not None or job.base is Precision.FLOAT32,
    )


def _step_of(job: Job, batch: Batch, trainable: frozenset[str]) -> tuple[ExportedStep, FakeRun]:
    """The whole step, exported; where it cannot be, the model alone, and the loss as running it shows it.

    Raises:
        TraceError, JobError: when the model cannot be exported either, or its loss fails when it is run.
    """
    try:
        step = export_step(job, batch)
        return step, _run(job, step, trainable)
    except (TraceError, JobError):  # of the model or of the loss: what follows tells
        model = export_model(job, batch)
        _run(job, model, trainable)
        with training(job.model):
            step = with_run_loss(model, run_loss(job, batch))
        return step, _run(job, step, trainable)


def _run(job: Job, step: ExportedStep, trainable: frozenset[str]) -> FakeRun:
    with quiet_torch():
        return run_fake(step, trainable, job.name)


def _check_parameters(job: Job) -> None:
    for name, parameter in job.model.named_parameters():
        kind = type(parameter)
        around_others = hasattr(kind, "__tensor_flatten__") and kind.__name__ != "DTensor"  # as torchao's NF4Tensor
        is_number = parameter.dtype.is_floating_point or parameter.dtype.is_complex
        if around_others or (kind is not torch.nn.Parameter and not is_number):  # as bitsandbytes' Params4bit and Int8Params
            raise TraceError(
                f"parameter {name} of {job.name} is a {kind.__name__}, whose numbers another library has in a format of its own: "
                "give QSync the model with float weights, of which a plan stores those that are frozen in NF4 or int8 by itself"
            )
        if parameter.dtype.is_floating_point and parameter.dtype not in (torch.float32, *LOW_FLOATS):
            raise TraceError(
                f"parameter {name} of {job.name} is {str(parameter.dtype).removeprefix('torch.')}; QSync plans for parameters in "
                "float32, bfloat16 and float16: convert the model with .float()"
            )


def _note_held(drafts: Sequence[Draft], job: Job) -> None:
    """Say which operators a script that holds 16 bits runs in another format than most, without autocast, and which frozen weights
    cannot be stored in another one."""
    modules = dict(job.model.named_modules())
    holders = Counter(id(parameter) for module in job.model.modules() for parameter in module._parameters.values())
    # As attention reads the weight of its out_proj.
    functional = {draft.address for draft in drafts if draft.address and draft.address != draft.scope}
    otherwise = {
        draft.address for draft in drafts if draft.address and (draft.kind != OF_ROWS.name or WEIGHT_LAYOUT in draft.attributes)
    }
    otherwise |= {name for draft in drafts if draft.name == "embedding" for name in draft.parameters}
    holds_16_bits = any(parameter.dtype in LOW_FLOATS for parameter in job.model.parameters())
    for draft in drafts:
        if holds_16_bits and draft.op_class is OpClass.DEPENDENT and draft.name in CASTS:
            draft.op_class = OpClass.FIXED
        if draft.op_class is not OpClass.ADJUSTABLE or not draft.weight_shape:
            continue
        if job.amp is None and draft.held is not job.base and not draft.not_applicable:
            draft.not_applicable = (
                f"its weight is {draft.held} in a model whose weights are {job.base}, and the script runs without autocast: it "
                "stays as it is"
            )
        if draft.frozen:
            module = modules.get(draft.address)
            owner, _, leaf = draft.address.rpartition(".")
            is_own = module is not None and is_own_forward(module) and draft.address not in functional
            if not is_own and (draft.address in otherwise or owner not in modules or not reads_own_weight(modules[owner], leaf)):
                draft.not_storable = FUNCTIONAL
            elif holders[id(job.model.get_parameter(draft.parameters[0]))] > 1:
                draft.not_storable = "another module has it too (tied weights)"
            elif KINDS[draft.kind].transposed:
                draft.not_storable = "the weight of a transposed convolution has its input channels first"


def _operators(drafts: list[Draft], job: Job) -> tuple[Operator, ...]:
    op_ids = name_operators(drafts)
    _share_reasons(drafts, op_ids)
    depths: list[int] = []
    for draft in drafts:
        depths.append(max((depths[source] + 1 for source in draft.inputs), default=0))
    return tuple(
        Operator(
            op_id=op_id,
            kind=draft.kind,
            op_class=draft.op_class,
            inputs=tuple(op_ids[source] for source in draft.inputs),
            input_shapes=draft.input_shapes,
            output_shape=draft.output_shape,
            parameters=draft.parameters,
            weight_shape=draft.weight_shape,
            attributes=_attributes(draft),
            flops=draft.flops,
            variant_group=op_id.fqn,
            depth=depth,
            not_applicable=draft.not_applicable,
            variant=_own_variant(draft, job),
            no_grad_inputs=draft.no_grad_inputs,
            views=draft.views,
            in_place=draft.in_place,
            also_read_by=draft.also_read_by,
            weight_format=draft.held if draft.op_class is OpClass.ADJUSTABLE else Precision.FLOAT32,
            frozen=draft.frozen,
            result_format=draft.held if draft.op_class is OpClass.FIXED else Precision.FLOAT32,
            not_storable=draft.not_storable,
        )
        for draft, op_id, depth in zip(drafts, op_ids, depths, strict=True)
    )


def _own_variant(draft: Draft, job: Job) -> Variant:
    """How it runs without a plan."""
    if draft.op_class is not OpClass.ADJUSTABLE:
        return FLOAT32
    return Variant.plain(job.base if job.amp is not None or draft.held is job.base else draft.held)


def _attributes(draft: Draft) -> dict[str, str]:
    """What a plan can lower is described by its geometry; everything else by the call to run again."""
    if not draft.call or (draft.op_class is OpClass.ADJUSTABLE and not draft.not_applicable):
        return draft.attributes
    return {**draft.attributes, CALL_ATTRIBUTE: draft.call}


def _share_reasons(drafts: list[Draft], op_ids: list[OpId]) -> None:
    """All calls with one weight are replaced alike: where one of them cannot be addressed, none can."""
    refused: dict[str, tuple[OpId, str]] = {}
    for draft, op_id in zip(drafts, op_ids, strict=True):
        if draft.address and draft.not_applicable:
            refused.setdefault(op_id.fqn, (op_id, draft.not_applicable))
    for draft, op_id in zip(drafts, op_ids, strict=True):
        if draft.address and not draft.not_applicable and op_id.fqn in refused:
            other, reason = refused[op_id.fqn]
            draft.not_applicable = f"the same weight is used by {other}, of which: {reason}"

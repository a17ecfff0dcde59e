"""``trace``: from a job to its PrecisionDag (DESIGN section 2)."""

from __future__ import annotations

import warnings

import torch

from qsync_core.dag import Operator, Parameter, PrecisionDag
from qsync_core.errors import TraceError
from qsync_core.op_id import OpId
from qsync_torch.buckets import form_buckets
from qsync_torch.exported_step import export_step
from qsync_torch.gradient_order import run_fake
from qsync_torch.graph_values import Draft
from qsync_torch.graph_walk import GraphWalk
from qsync_torch.job import Job
from qsync_torch.loss_kind import loss_kind
from qsync_torch.operator_names import Names, functional_fqn, is_module_work


def trace(job: Job, *, bucket_cap_mb: float | None = None) -> PrecisionDag:
    """Trace one training step of a job, without running it and without copying its parameters.

    Args:
        job: what is trained.
        bucket_cap_mb: as given to DistributedDataParallel; None for its default.

    Returns:
        The graph.  Every linear and convolution call is an operator, functional, tied and repeated calls included; those that
        ``apply_`` can not address say why in ``not_applicable``.

    Raises:
        TraceError: when the model can not be exported (with the line and what to do), a parameter is not float32, or the
            loss is not a scalar.
    """
    _check_parameters(job)
    device = next((parameter.device for parameter in job.model.parameters()), torch.device("cpu"))
    batch = job.batch(0, job.batch_size).to(device)
    step = export_step(job, batch)
    trainable = [(name, parameter) for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = run_fake(step, frozenset(name for name, _ in trainable))
    walk = GraphWalk(step, run, job.model)
    walk.walk()
    kind, reduction = loss_kind(walk.drafts, walk.loss)
    shape = None if walk.loss is None else walk.drafts[walk.loss].output_shape
    if shape != ():
        got = "one that is not computed from it" if shape is None else f"a tensor of shape {shape}"
        raise TraceError(
            f"the loss of {job.name} must be a scalar computed from the model's output, got {got}; use mean() or sum()"
        )
    return PrecisionDag(
        model=job.name,
        operators=_operators(walk.drafts),
        parameters=tuple(
            Parameter(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
            for name, parameter in job.model.named_parameters()
        ),
        buckets=form_buckets(trainable, run.gradient_order, bucket_cap_mb),
        loss=kind,
        loss_reduction=reduction,
        batch_size=job.batch_size,
    )


def _check_parameters(job: Job) -> None:
    for name, parameter in job.model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise TraceError(f"parameter {name} of {job.name} has no shape yet; run the model once before tracing it")
        if parameter.dtype.is_floating_point and parameter.dtype is not torch.float32:
            raise TraceError(
                f"parameter {name} of {job.name} is {str(parameter.dtype).removeprefix('torch.')}; QSync keeps parameters in "
                "float32 and lowers single operators: convert the model with .float()"
            )


def _operators(drafts: list[Draft]) -> tuple[Operator, ...]:
    names, ids, depths, operators = Names(), [], [], []
    for fqn, draft in zip(_fqns(drafts), drafts, strict=True):
        op_id = names.claim(fqn)
        depth = max((depths[source] + 1 for source in draft.inputs), default=0)
        ids.append(op_id)
        depths.append(depth)
        operators.append(_operator(draft, op_id, tuple(ids[source] for source in draft.inputs), depth))
    return tuple(operators)


def _operator(draft: Draft, op_id: OpId, inputs: tuple[OpId, ...], depth: int) -> Operator:
    return Operator(
        op_id=op_id,
        kind=draft.kind,
        op_class=draft.op_class,
        inputs=inputs,
        input_shapes=draft.input_shapes,
        output_shape=draft.output_shape,
        parameters=draft.parameters,
        weight_shape=draft.weight_shape,
        attributes=draft.attributes,
        flops=draft.flops,
        variant_group=_variant_group(draft, op_id),
        depth=depth,
        not_applicable=draft.reason,
    )


def _variant_group(draft: Draft, op_id: OpId) -> str:
    """Calls of one module share a variant; functional calls of one module do when they share the weight."""
    if draft.is_own_call or not draft.weight_shape:
        return op_id.fqn
    return f"{op_id.fqn}({','.join(draft.parameters[:1])})"


def _fqns(drafts: list[Draft]) -> list[str]:
    operators_of: dict[str, set[str]] = {}
    for draft in drafts:
        operators_of.setdefault(draft.scope, set()).add(draft.name)
    fqns = []
    for draft in drafts:
        single = is_module_work(draft.module) and len(operators_of[draft.scope]) == 1
        if draft.kind == "input" or (draft.scope and (draft.is_own_call or (single and not draft.weight_shape))):
            fqns.append(draft.scope)
        else:
            fqns.append(functional_fqn(draft.scope, draft.name))
    return fqns

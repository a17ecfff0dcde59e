"""Who would run every kernel of a graph's operators: the data behind ``qsync backends``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsync_core.dag import Operator, PrecisionDag
from qsync_core.errors import BackendError
from qsync_core.kernel_choice import FLOAT_BACKEND
from qsync_core.operator_requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.registry import Answer, Registry
from qsync_core.tuning import TuningStore
from qsync_core.variant import Variant

Entry = dict[str, Any]
_NOT_ASKED = "it is not asked for operators in float formats, which run PyTorch's own kernels"


def coverage(
    graph: PrecisionDag,
    variants: Sequence[Variant],
    registry: Registry,
    device_kind: str,
    compute_capability: str,
    store: TuningStore | None,
) -> list[Entry]:
    """One entry for every kernel, forward and backward, of each distinct operator in each variant.

    Args:
        graph: whose adjustable operators.
        variants: in which they could run.
        registry: the installed backends.
        device_kind, compute_capability: where.
        store: tuning records, if there are any for that device.
    """
    return [
        _entry(operator, variant, asked, registry, store)
        for operator in _distinct(graph)
        for variant in variants
        for asked in operator_requests(CallShapes.of(operator), variant, device_kind, compute_capability)
    ]


def _distinct(graph: PrecisionDag) -> list[Operator]:
    """One adjustable operator per distinct kind, shapes and need of gradients: the first in the order of execution."""
    found: dict[tuple[object, ...], Operator] = {}
    for operator in graph.adjustable:
        found.setdefault((operator.cost_key, operator.no_grad_inputs), operator)
    return list(found.values())


def _entry(operator: Operator, variant: Variant, asked: OperatorRequest, registry: Registry, store: TuningStore | None) -> Entry:
    answers = registry.answers(asked.request, store=store)
    if not variant.compute.needs_scale:
        answers = [answer if answer.backend == FLOAT_BACKEND else Answer(answer.backend, (_NOT_ASKED,)) for answer in answers]
    try:
        chosen: Answer | None = registry.choose(asked.request, answers)
    except BackendError:
        chosen = None
    able = [answer for answer in answers if not answer.reasons]
    return {
        "operator": str(operator.op_id),
        "precision": variant.label,
        "kernel": asked.role,
        "shapes": [list(shape) for shape in asked.request.shapes],
        "backends": [answer.backend for answer in able],
        "chosen": None if chosen is None else _result(chosen),
        "others": [_result(answer) for answer in able if answer is not chosen],
        "reasons": {answer.backend: list(answer.reasons) for answer in answers if answer.reasons},
    }


def _result(answer: Answer) -> Entry:
    """Backend, configuration and what was measured; ``exact`` is false where the latency is scaled from other shapes."""
    return {
        "backend": answer.backend,
        "config": answer.config,
        "latency_ns": answer.latency_ns,
        "exact": answer.exact,
    }

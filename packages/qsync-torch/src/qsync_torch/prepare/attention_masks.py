"""What attention with a mask in memory costs, beside what it would take without one.

Libraries of transformers build a mask of (batch, 1, queries, keys) whenever they are traced, so under ``torch.compile`` too; flash
kernels take none, and those that do compute the half of the products that a causal mask hides.  The mask of an encoder that was
given none is expanded from a value of each query: the stride of its keys is 0, where kernels that take masks ask for 1, so that
PyTorch computes attention by its formula.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.units import format_ns
from qsync_torch.profiling.operator_cost import measure_operator
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.aten_call import CALL_ATTRIBUTE

_EFFORT = Effort(min_repeats=5, max_repeats=20, budget_s=0.1)
_MASK, _DROPOUT = 3, 4
"""Places among the arguments of ``scaled_dot_product_attention``."""
_WORTH_SAYING = 0.02
"""The share of a step from which on it is said."""


def masks_told(dag: PrecisionDag, device: torch.device, step_ns: int) -> str:
    """Say what masks of attention cost in a step on a device, as a sentence; empty where that is less than 2% of it.

    Args:
        dag: of the job.
        device: where it is measured.
        step_ns: what the whole step takes there.
    """
    masked: dict[bool, dict[object, Operator]] = {True: {}, False: {}}
    count_of = Counter[object]()
    for operator in dag.operators:
        if mask := _mask_of(operator):
            masked["expanded" in mask][operator.cost_key] = operator
            count_of[operator.cost_key] += 1

    def takes(operators: Mapping[object, Operator], **replaced: bool) -> int:
        return sum(count_of[key] * _takes(operator, replaced, dag.autocast_base, device) for key, operator in operators.items())

    told = []
    for is_expanded, operators in masked.items():
        with_masks, without = takes(operators), takes(operators, is_causal=False)
        causal = without if is_expanded else takes(operators, is_causal=True)  # what is expanded along the keys hides none
        if not operators or with_masks - causal < _WORTH_SAYING * step_ns:
            continue
        shapes = {key: " × ".join(map(str, _mask_of(operator)["tensor"])) for key, operator in operators.items()}
        which = ", ".join(f"{count_of[key]} of {shape}" for key, shape in shapes.items())
        took = (
            f"{format_ns(with_masks)} of a step of {format_ns(step_ns)}, where attention without a mask takes {format_ns(without)}"
        )
        if is_expanded:
            by = ", which no fused kernel takes, so that PyTorch computes attention by its formula in float32"
            told.append(
                f"under torch.compile attention gets masks that are expanded from one value a query ({which})"
                f"{by if device.type == 'cuda' else ''}: {took}; train with attention that makes no mask, or give the model an "
                "attention_mask of the samples "
            )
        else:
            told.append(
                f"attention reads masks from memory ({which}), which transformers makes whenever it is traced: {took}, and causal "
                f"attention {format_ns(causal)}; if no batch is padded, train with attention that makes no mask "
            )
    return "; ".join(f"{one}(docs/compiling.md#attention-without-a-mask)" for one in told)


def _mask_of(operator: Operator) -> dict[str, Any]:
    """What the call says of the mask that attention reads, with a row for each of several queries; empty where there is none."""
    if operator.kind != "scaled_dot_product_attention" or CALL_ATTRIBUTE not in operator.attributes:
        return {}
    match json.loads(operator.attributes[CALL_ATTRIBUTE])["args"][_MASK : _MASK + 1]:
        case [{"tensor": [*shape]} as mask] if len(shape) > 1 and shape[-2] > 1:
            return dict(mask)
    return {}


def _takes(operator: Operator, replaced: Mapping[str, bool], base: Precision, device: torch.device) -> int:
    """Nanoseconds forward and backward; without its mask where that is replaced by other arguments."""
    call = json.loads(operator.attributes[CALL_ATTRIBUTE])
    dropout, mask = call["args"][_DROPOUT : _DROPOUT + 1], None if replaced else {**_mask_of(operator), "dense": False}
    call["args"], call["kwargs"] = [*call["args"][:_MASK], mask, *dropout], {**call["kwargs"], **replaced}
    operator = attrs.evolve(operator, attributes={**operator.attributes, CALL_ATTRIBUTE: json.dumps(call)})
    cost = measure_operator(operator, Variant.plain(base), {}, KernelChoice(), make_stopwatch(device), _EFFORT, base)
    return cost.forward_compute_ns + cost.backward_compute_ns

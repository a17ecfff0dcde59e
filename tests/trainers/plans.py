"""Plans by hand, for the models of these tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qsync_core.ir.communication import CommunicationSettings, PlannedCommunication
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant

COMMUNICATION = CommunicationSettings(bucket_cap_mb=0.01, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=False)
"""Nothing of it is PyTorch's default but ``static_graph``."""


def plan_of(
    model: nn.Module,
    lowered: Mapping[str, Precision],
    *,
    communication: CommunicationSettings | None = COMMUNICATION,
    scaling: bool = False,
    base: Precision = Precision.FLOAT32,
    **changes: Any,
) -> PrecisionPlan:
    """Group ``train`` runs every linear and convolution of a model in the base, group ``infer`` some of them lower."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert set(lowered) <= set(names)

    def delivered(variant: Variant) -> Variant:
        return variant if base is not Precision.FLOAT32 else variant.in_float32

    def group(name: str, role: Role, precisions: Mapping[str, Precision]) -> GroupPlan:
        entries = {OpId(fqn): Assignment(delivered(Variant.of(precisions.get(fqn, base))), "aten", "", "by hand") for fqn in names}
        needs = scaling and role is Role.INFER
        return GroupPlan(name, role, 1, DeviceType("cpu", DeviceKind.CPU), base, entries, needs_loss_scaling=needs)

    known: dict[str, Any] = {
        "model": type(model).__name__,
        "dag_digest": "",
        "operator_ids": tuple(map(OpId, names)),
        "input_digests": {},
        "solver": "by hand",
        "indicator": "",
        "time_limit_ns": 2_000_000,
        "predicted_iteration_ns": 1_500_000,
        "objective": 0.0,
        "bound": None,
        "groups": (group("train", Role.TRAIN, {}), group("infer", Role.INFER, lowered)),
        "rank0_group": "train",
        "base": base,
        "output_formats": OutputFormats(decides=base is Precision.FLOAT32),
        "communication": None if communication is None else PlannedCommunication(communication, "by hand"),
    }
    return PrecisionPlan(**known | changes)

"""A small model with buffers, and plans for it that say how the job is to communicate."""

from __future__ import annotations

import torch

from qsync_core.ir.communication import CommunicationSettings, PlannedCommunication
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant

PLANNED = CommunicationSettings(bucket_cap_mb=0.002, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True)

LOWERED = {"0": Precision.INT8, "3": Precision.BFLOAT16, "6": Precision.INT8}


def plan_with(settings: CommunicationSettings | None) -> PrecisionPlan:
    """A plan for :func:`small_model`: a group that trains, and one in int8 and bfloat16."""

    def group(name: str, role: Role, variants: dict[str, Precision]) -> GroupPlan:
        entries = {
            OpId(fqn): Assignment(Variant.of(variants.get(fqn, Precision.FLOAT32)), "aten", "", "by hand") for fqn in LOWERED
        }
        return GroupPlan(name, role, 1, DeviceType("cpu", DeviceKind.CPU), Precision.FLOAT32, entries)

    planned = None if settings is None else PlannedCommunication(settings, "by hand")
    groups = (group("train", Role.TRAIN, {}), group("infer", Role.INFER, LOWERED))
    ids = tuple(map(OpId, LOWERED))
    return PrecisionPlan(
        "m",
        "",
        ids,
        {},
        "by hand",
        "",
        1,
        1,
        0.0,
        None,
        groups,
        "train",
        communication=planned,
        output_formats=OutputFormats(decides=False),
    )


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 16, 3),
    )

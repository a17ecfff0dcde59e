"""Frozen bfloat16 weights with adapters, behind checkpoints, and a plan of two groups that store them differently."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceType
from qsync_core.ir.variant import Variant

WIDTH = 256
NAMES = ("0._checkpoint_wrapped_module.weight", "1", "2._checkpoint_wrapped_module.weight")


class LoRALinear(nn.Module):
    """As torchtune's: the weight is the layer's own parameter, beside its adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + 2 * self.lora_b(self.lora_a(x))


def adapted() -> nn.Module:
    """Two such layers around a linear of PyTorch's own that is not trained."""
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return nn.Sequential(checkpoint_wrapper(LoRALinear()), frozen, checkpoint_wrapper(LoRALinear())).bfloat16()


def plan_of_adapted(card: DeviceType) -> PrecisionPlan:
    """The group ``infer`` stores all weights, each in another format; ``train`` stores none, and runs one layer in int8."""

    def of(name: str, role: Role, *variants: str) -> GroupPlan:
        chosen = {OpId(op): Assignment(Variant.parse(one), "aten", "", "") for op, one in zip(NAMES, variants, strict=True)}
        return GroupPlan(name, role, 1, card, Precision.BFLOAT16, chosen)

    groups = (
        of("train", Role.TRAIN, "bfloat16", "bfloat16", "int8"),
        of("infer", Role.INFER, "bfloat16@nf4", "bfloat16@int8-row", "bfloat16@int8-block"),
    )
    others = tuple(OpId(name) for name, _ in adapted().named_modules() if name.endswith(("lora_a", "lora_b")))
    return PrecisionPlan(
        "adapted", "", tuple(map(OpId, NAMES)), {}, "by hand", "", 1, 1, 0.0, None, groups, "train",
        unaddressed_ids=others, base=Precision.BFLOAT16, output_formats=OutputFormats(decides=False),
    )  # fmt: skip

"""What is compared: settings (how a low operator runs) and methods (which operators are low)."""

from __future__ import annotations

import attrs

from indicator.measuring import BFLOAT16, FLOAT32, INT8
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant

MODELS = ("relu-cnn", "transformer")
FLOOR = Variant.of(Precision.INT8, output=Precision.FLOAT32, rounding=Rounding.FLOOR)
NEAREST = Variant.of(Precision.INT8, output=Precision.FLOAT32, rounding=Rounding.NEAREST)
PER_TENSOR = attrs.evolve(NEAREST, w_granularity=Granularity.PER_TENSOR)
LEAN = Variant.of(Precision.INT8)
"""int8 that saves memory even where the next operator keeps its own input: it hands on 16 bits."""
OBSERVED = (LEAN, INT8, FLOOR, PER_TENSOR, BFLOAT16, FLOAT32)
"""What indicators are asked about."""

FULL, HALF, UNIFORM = "float32", "bfloat16", "uniform"
QSYNC, RANDOM = "qsync", "random"
INDICATORS = {QSYNC: "hutchinson", "paper": "paper", "hessian": "hessian", RANDOM: "random"}
"""The indicator behind every method that plans."""
PLANNED = tuple(INDICATORS)


@attrs.frozen
class Setting:
    """How a low operator runs.

    Attributes:
        name: short, for ids.
        what: in words.
        low: the variant that plans lower to, and whose Ω decides.
        bits: below 8 the forward operands are fake-quantized to so many bits instead, which no product of ours does.
        rounding: of fake quantization.
        methods: which methods are trained under it.
        memory: plans keep a memory budget instead of a time limit, and may use bfloat16 too.
    """

    name: str
    what: str
    low: Variant
    methods: tuple[str, ...]
    bits: int = 8
    rounding: Rounding = Rounding.STOCHASTIC
    memory: bool = False

    @property
    def ladder(self) -> tuple[Variant, ...]:
        """What plans may choose from, lowest first."""
        return (LEAN, self.low, BFLOAT16, FLOAT32) if self.memory else (self.low, FLOAT32)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("int8", "int8, stochastic, weights per channel (the default)", INT8, (FULL, UNIFORM, HALF, *PLANNED)),
        Setting("int4", "stress: forward operands fake-quantized to 4 bits, stochastic", INT8, (UNIFORM, *PLANNED), bits=4),
        Setting("floor", "int8, floor", FLOOR, (UNIFORM, *PLANNED)),
        Setting("nearest", "int8, nearest", NEAREST, (UNIFORM,)),
        Setting("per-tensor", "int8, nearest, weights per tensor", PER_TENSOR, (UNIFORM, *PLANNED)),
        Setting("memory60", "int8 and bfloat16, at 60% of the largest possible saving of memory", INT8, PLANNED, memory=True),
        Setting("int5", "stress: forward operands fake-quantized to 5 bits, stochastic", INT8, (UNIFORM,), bits=5),
        Setting("int4-nearest", "stress: 4 bits, nearest", INT8, (UNIFORM,), bits=4, rounding=Rounding.NEAREST),
        Setting("int4-floor", "stress: 4 bits, floor", INT8, (UNIFORM,), bits=4, rounding=Rounding.FLOOR),
    )
}
"""In the order in which they are trained, so that an interrupted run has the most telling ones."""


@attrs.frozen
class Task:
    """One training run."""

    model: str
    setting: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.model} {self.setting} {self.method} seed {self.seed}"


def tasks(models: list[str], settings: list[str], seeds: range) -> list[Task]:
    """Every run, all of a seed before the next seed, so that pairs are whole whenever it is interrupted."""
    return [
        Task(model, name, method, seed)
        for seed in seeds
        for name in settings
        for method in SETTINGS[name].methods
        for model in models
    ]

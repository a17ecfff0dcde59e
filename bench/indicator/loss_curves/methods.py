"""What is compared: which operators of a model are low."""

from __future__ import annotations

import attrs

from indicator.accuracy.methods import FULL, HALF, QSYNC, RANDOM, UNIFORM, Task

METHODS = {
    FULL: ("int8", FULL, "float32"),
    QSYNC: ("int8", QSYNC, "plan by hutchinson (QSync)"),
    UNIFORM: ("int8", UNIFORM, "all operators int8, stochastic"),
    "uniform-floor": ("floor", UNIFORM, "all operators int8, floor"),
    RANDOM: ("int8", RANDOM, "random plan"),
    "paper": ("int8", "paper", "plan by the paper's indicator"),
    HALF: ("int8", HALF, "all operators bfloat16"),
}
"""By name: setting and method of the paired runs (:mod:`indicator.accuracy.methods`), and what it is in words."""
DEFAULT = tuple(name for name in METHODS if name != HALF)


@attrs.frozen
class Which:
    """One training run."""

    model: str
    method: str
    seed: int

    @property
    def task(self) -> Task:
        """As planners and stores of the paired runs know it."""
        setting, method, _ = METHODS[self.method]
        return Task(self.model, setting, method, self.seed)

    def __str__(self) -> str:
        return f"{self.model} {self.method} seed {self.seed}"


def all_runs(models: list[str], methods: list[str], seeds: range) -> list[Which]:
    """All of a seed before the next seed, so that pairs are whole whenever it is interrupted; what takes longest first."""
    return [Which(model, method, seed) for seed in seeds for model in reversed(models) for method in methods]

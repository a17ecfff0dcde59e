"""What the rows of ``docs/results/kernels.json`` are measured with: one device, its timer, the installed backends, rows."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qsync_core.kernels.choice import KernelChoice, OpChoice
from qsync_torch.benchmarking.contenders import Backends, Contender, compile_ahead
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.race import Measured, Timer, race

from . import baselines

Row = dict[str, Any]


class Bench:
    """One device and what is installed.

    Attributes:
        out: folder for what is not a row (profiles), None to write none.
        quick: few samples and small shapes, to try the script on a CPU.
        backends: with as many candidates as ``libraries`` and ``just_in_time`` allow.
    """

    def __init__(
        self, device: torch.device, out: Path | None = None, *, quick: bool = False, libraries: int = 2, just_in_time: int = 3
    ) -> None:
        self.device, self.out, self.quick = device, out, quick
        self.backends = Backends(libraries, just_in_time)
        self.timer = Timer(device)
        self._start = time.monotonic()
        self._chosen: dict[Problem, OpChoice] = {}
        torch.backends.cudnn.benchmark = True
        os.environ.setdefault("QSYNC_WAIT_FOR_KERNELS", "1")  # what is measured is what is named
        for name, reason in self.backends.disabled.items():
            print(f"plugin {name} is disabled: {reason}", file=sys.stderr)

    @property
    def device_name(self) -> str:
        """For the rows."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def say(self, text: str) -> None:
        """A line of progress with the seconds since the start."""
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)

    def row(self, id_: str, what: str, value: float, unit: str, target: str = "reported", spread: str = "") -> Row:
        """A row, printed as it is made."""
        self.say(f"{id_}: {value:.4g} {unit} (target {target}) {what}; {spread}")
        row = {"id": id_, "what": what, "value": round(float(value), 4), "unit": unit, "target": target, "device": self.device_name}
        return row | ({"spread": spread} if spread else {})

    def race_problem(
        self, problem: Problem, names: Iterable[str] = (), *, rounds: int = 15
    ) -> tuple[dict[str, Measured], dict[str, str]]:
        """Every accepting backend (its best candidate) and the named baselines on one problem, in turns.

        Returns:
            What was measured by name, and the configuration of each backend.

        Raises:
            RuntimeError: when no backend could run it, with every reason.
        """
        operands = problem.operands(self.device)
        contenders = {runner.name: runner for runner in self.accepting(problem, operands)}
        thunks = {name: runner.thunks for name, runner in contenders.items()}
        for name in names:
            if baselines.why_not(name, problem, self.device) is None:
                thunks[name] = baselines.contender(name, problem, operands, self.device).thunks
        measured, failures = race(thunks, self.device, rounds=5 if self.quick else rounds, timer=self.timer)
        for name, why in failures.items():
            print(f"{problem.label}: {name}: {why}", file=sys.stderr)
        return measured, {name: runner.config for name, runner in contenders.items() if name in measured}

    def accepting(self, problem: Problem, operands: Sequence[Any]) -> list[Contender]:
        """Contenders of every backend that runs a problem.

        Raises:
            RuntimeError: when there is none, with every reason.
        """
        found, left_out = self.backends.accepting(problem, operands, self.device)
        for name, why in left_out.items():
            print(f"{problem.label}: {name}: {why}", file=sys.stderr)
        if not found:
            reasons = " | ".join(f"{name}: {why}" for name, why in left_out.items())
            raise RuntimeError(f"no backend runs {problem.label}: {reasons}")
        return found

    def choose(self, roles: Mapping[str, Problem]) -> KernelChoice:
        """The fastest backend and configuration for every role of an operator's call (see :mod:`qsync_core.kernels.choice`)."""
        compile_ahead(self.backends, [problem.request(self.device) for problem in roles.values()])
        return KernelChoice(pins=tuple((role, self._fastest(problem)) for role, problem in roles.items()))

    def _fastest(self, problem: Problem) -> OpChoice:
        if problem not in self._chosen:
            measured, used = self.race_problem(problem, rounds=7)
            best = best_of(measured, used)
            self._chosen[problem] = OpChoice(best, used[best])
        return self._chosen[problem]


def best_of(measured: Mapping[str, Measured], names: Iterable[str]) -> str:
    """The fastest among the names.

    Raises:
        RuntimeError: when none of them was measured.
    """
    names = list(names)
    usable = [name for name in names if name in measured]
    if not usable:
        raise RuntimeError(f"none of {', '.join(names) or 'no contenders'} could be measured; stderr says why")
    return min(usable, key=lambda name: measured[name].median_ns)


def ratio(over: Measured, under: Measured) -> float:
    """Median of the ratios of samples taken side by side."""
    return statistics.median(a / b for a, b in zip(over.samples_ns, under.samples_ns, strict=False))


def ratio_spread(over: Measured, under: Measured) -> str:
    """Quartiles of the same ratios."""
    found = [a / b for a, b in zip(over.samples_ns, under.samples_ns, strict=False)]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return f"quartiles {low:.3f} to {high:.3f} of {len(found)} pairs"


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values."""
    return statistics.geometric_mean(list(values))

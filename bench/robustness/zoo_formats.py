"""Every job of the zoo, from its trace alone, under plans that deliver 16 bits wherever the graph allows it (the row S13).

No mode promotes operands at run time: functions between the operators of a plan run as PyTorch has them.  Outputs, loss, gradients
and buffers must be those of :mod:`reference`, which promotes by rules of its own, as in :mod:`zoo_runs`; and no
``TorchFunctionMode`` may have promoted anything.  Jobs that add in place what would not fit are among them.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attrs
import torch
from torch import nn

from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace
from robustness import zoo_runs
from robustness.zoo import ZOO

LOW = (zoo_runs.BFLOAT16, zoo_runs.INT8)
LEAST = 2.0**-9
"""Relative differences below this are a rounding to bfloat16, which falls the other way where sums differ in their last bits."""


class AddsInPlace(nn.Module):
    """A buffer of large numbers is added in place to what an operator delivers, and taken off again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("offset", torch.full((8,), 1000.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h += self.offset
        g = self.b(h - self.offset)
        g += torch.relu(g)
        return self.c(g)


class ReadsFormats(nn.Module):
    """Positions in the format of an activation, and rows gathered many times, whose gradients a CPU adds in their format."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        positions = torch.arange(1000, 1000 + h.shape[0], dtype=h.dtype)
        h = h + torch.sin(positions)[:, None]
        g = self.b(h)
        return self.c(g[torch.zeros(2048, dtype=torch.int64)])


def _made(model: type[nn.Module]) -> Any:
    def job() -> Job:
        torch.manual_seed(0)

        def batch(step: int, size: int) -> Batch:
            generator = torch.Generator().manual_seed(step)
            return Batch((torch.randn(size, 8, generator=generator),), {}, None)

        return Job(model.__name__, model(), batch, lambda out, batch: out.square().mean(), lambda p: torch.optim.SGD(p, 0.1), 4)

    return job


JOBS = {**ZOO, "adds in place": _made(AddsInPlace), "reads formats": _made(ReadsFormats)}


def assigned(dag: PrecisionDag, variants: Mapping[str, Variant]) -> dict[OpId, Assignment]:
    """A whole plan's assignments, by FQN of the variants."""
    return {operator.op_id: Assignment(variants[operator.op_id.fqn], "", "", "") for operator in dag.adjustable}


def run(name: str) -> dict[str, Any]:
    """One job; ``status`` is ``right``, ``silent`` (other numbers without a word), ``failed`` or ``none`` (nothing to lower)."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"name": name, "status": "right", "narrow": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dag = trace(JOBS[name]())
        except QSyncError as error:
            return row | {"status": "none", "detail": str(error)[:100]}
        names = list(dict.fromkeys(operator.op_id.fqn for operator in dag.adjustable))
        if not names:
            return row | {"status": "none"}
        formats = OutputFormats.of(dag)
        here = {
            "ZOO": JOBS,
            "LEAST": LEAST,
            "with_variants": lambda plan, variants: assigned(dag, variants),
            "apply_": lambda model, entries, group: apply_(model, entries),
        }
        wishes = {
            "bfloat16": dict.fromkeys(names, zoo_runs.BFLOAT16),
            "alternating": {fqn: LOW[i % 2] for i, fqn in enumerate(names)},
            "beside float32": {fqn: (*LOW, zoo_runs.FLOAT32)[i % 3] for i, fqn in enumerate(names)},
        }
        for label, wanted in wishes.items():
            outputs = {fqn: variant.output for fqn, variant in wanted.items()}
            variants = {fqn: attrs.evolve(v, output=formats.delivered(fqn, outputs)) for fqn, v in wanted.items()}
            row["narrow"].append(sum(v.output is not Precision.FLOAT32 for v in variants.values()))
            try:
                with patch.multiple(zoo_runs, **here):
                    row["worst"] = max(row.get("worst", 0.0), zoo_runs.tried(name, label, variants, None, 0)[0])
            except zoo_runs.Wrong as error:
                return row | {"status": "silent", "detail": str(error)}
            except Exception:
                return row | {"status": "failed", "detail": traceback.format_exc()[-1200:]}
    return row | {"operators": len(names)}


def main() -> None:
    """Print a line for each job, and how many are not right."""
    found = []
    for name in sys.argv[1:] or JOBS:
        found.append(run(name))
        print(json.dumps(found[-1]), flush=True)
    counts = {status: sum(row["status"] == status for row in found) for status in ("right", "none", "silent", "failed")}
    print(json.dumps(counts))
    if counts["silent"] or counts["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

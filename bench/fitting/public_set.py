"""Times of one transformer layer on six kinds of GPU, as published by eth-easl/sailor (MIT), read from a copy on this machine.

Its files are ``CHIP__PRECISION__MODEL_mbsB_tp1_algo0.csv``: microseconds by operator, forward and backward, of 2048 tokens.
What it calls RTX-2080 multiplies float16 at 56 TFLOP/s and copies 490 GB/s, which a RTX 2080 cannot and a RTX 2080 Ti can, so it is
taken for one.  Nothing of the set is kept here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import DATASHEETS, Datasheet
from qsync_planner.estimating.work import Work

_NAME = re.compile(r"(?P<chip>[^_]+)__fp(?P<bits>16|32)__(?P<model>.+)_mbs(?P<batch>\d+)_tp1_algo0\.csv")
_NOT_MEASURED = 9e6
"""Microseconds; the set has 10 seconds where memory did not suffice."""
TOKENS = 2048
SIZES = {"OPT-350": (1024, 16), "GPT-Neo-2.7": (2560, 32)}
"""Hidden size and heads."""
BATCHES = (1, 2, 4, 8)


def _sheet(name: str, **chip: int) -> Datasheet:
    """A chip of the table with another size of memory."""
    return attrs.evolve(DATASHEETS[name], chip=attrs.evolve(DATASHEETS[name].chip, **chip))


CHIPS = {
    "V100-16": _sheet("V100", memory_gb=16),
    "RTX-2080": _sheet("RTX 2080 Ti"),
    "Titan-RTX": _sheet("TITAN RTX"),
    "RTX-3090": _sheet("RTX 3090"),
    "A100-40": _sheet("A100", memory_gb=40, bandwidth_gb_s=1555),
    "GH-96": _sheet("GH200", memory_gb=96, bandwidth_gb_s=4000),
}

BLOCK = (
    "enc-1st-layernorm", "enc-attention-qkv", "enc-attention-score", "enc-attention-softmax", "enc-attention-dropout",
    "enc-attention-context", "enc-attention-dense", "enc-post-attention-dropout", "enc-2nd-layernorm", "enc-MLP-GEMM-1",
    "enc-MLP-gelu", "enc-MLP-GEMM-2", "enc-post-MLP-dropout",
)  # fmt: skip
LARGEST = ("enc-MLP-GEMM-1", "enc-MLP-GEMM-2")


@attrs.frozen
class Case:
    """One operator of one job."""

    model: str
    precision: Precision
    batch: int
    operator: str

    def at(self, batch: int) -> Case:
        """The same operator of a job with another batch."""
        return attrs.evolve(self, batch=batch)


Times = dict[str, dict[Case, float]]
"""Nanoseconds of the forward, by chip."""


def read(folder: Path) -> Times:
    """The set's forward times.

    Raises:
        SystemExit: where the folder has none of its files.
    """
    times: Times = {name: {} for name in CHIPS}
    for path in sorted(folder.glob("*.csv")):
        if not (found := _NAME.fullmatch(path.name)) or found["chip"] not in times:
            continue
        precision = Precision.FLOAT16 if found["bits"] == "16" else Precision.FLOAT32
        with path.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                microseconds = float(row["forward-compute"])
                if row["op_name"] in BLOCK and microseconds < _NOT_MEASURED:
                    case = Case(found["model"], precision, int(found["batch"]), row["op_name"])
                    times[found["chip"]][case] = microseconds * 1e3
    if not all(times.values()):
        missing = [name for name, of in times.items() if not of]
        raise SystemExit(f"{folder} holds no times of {', '.join(missing)}: --public is a copy of eth-easl/sailor's profiles (*.csv)")
    return times


def work(case: Case) -> Work:
    """What an operator has to do: operands in the job's format once, and what is known of its kernel.

    The projection of queries, keys and values is taken to copy them once more, which its time beside the other linears' says on
    every chip; a softmax in float32 scales and masks in kernels of its own.
    """
    hidden, heads = SIZES[case.model]
    size, rows = case.precision.nbytes, case.batch * TOKENS
    scores, tensor = case.batch * heads * TOKENS**2, case.batch * TOKENS * hidden

    def linear(columns: int, inner: int, further: int = 0) -> Work:
        moved = size * (rows * (columns + inner) + columns * inner + further)
        return Work(moved, 1, ((case.precision, 2 * rows * columns * inner),), tiles=rows / 64 * columns / 64)

    attention = Work(size * (scores + 2 * tensor), 1, ((case.precision, 2 * scores * hidden // heads),))
    dropped = 4 * size + 1
    return {
        "enc-1st-layernorm": Work(2 * tensor * size),
        "enc-2nd-layernorm": Work(2 * tensor * size),
        "enc-attention-qkv": linear(3 * hidden, hidden, 6 * tensor),
        "enc-attention-score": attention,
        "enc-attention-context": attention,
        "enc-attention-softmax": Work(2 * scores * size * (1 if case.precision is Precision.FLOAT16 else 3)),
        "enc-attention-dropout": Work(scores * (2 * size + 1)),
        "enc-attention-dense": linear(hidden, hidden),
        "enc-post-attention-dropout": Work(tensor * dropped),
        "enc-post-MLP-dropout": Work(tensor * dropped),
        "enc-MLP-GEMM-1": linear(4 * hidden, hidden),
        "enc-MLP-gelu": Work(8 * tensor * size),
        "enc-MLP-GEMM-2": linear(hidden, 4 * hidden),
    }[case.operator]


def block(model: str, precision: Precision, batch: int) -> Iterator[Case]:
    """The operators of a block."""
    return (Case(model, precision, batch, operator) for operator in BLOCK)

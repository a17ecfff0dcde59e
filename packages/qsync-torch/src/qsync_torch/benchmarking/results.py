"""What was measured: one row per problem and contender.  No torch here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import attrs

NOT_FINITE = sys.float_info.max
"""The error of a result with NaN or infinities, also where nothing was written: a number, for JSON has no infinity."""


@attrs.frozen
class Row:
    """One contender on one problem.

    Attributes:
        set_name, op, formats, shape: the problem; ``count`` is how often the model has it.
        contender, config: who ran it, with what configuration.
        median_ns, spread, samples: time of one call, its interquartile range over the median, and the number of samples.
        tflops: 10¹² operations per second of a product, 10⁹ bytes per second (of the floor) where there are none.
        unit: of ``tflops``: ``TFLOP/s`` or ``GB/s``.
        share, bound: share of what the measured peak (``compute``) or copy rate (``bandwidth``) allows; above 1 see
            :attr:`share_note`.
        error, allowed: relative error against float64, and its bound; None where it was not looked at.
    """

    set_name: str
    op: str
    formats: str
    shape: str
    count: int
    contender: str
    config: str
    median_ns: float
    spread: float
    samples: int
    tflops: float
    unit: str
    share: float
    bound: str
    error: float | None = None
    allowed: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What names the measurement."""
        return (*self.problem, self.contender)

    @property
    def problem(self) -> tuple[str, ...]:
        """What names the problem."""
        return self.set_name, self.op, self.formats, self.shape

    @property
    def is_wrong(self) -> bool:
        """Whether its error is more than its formats explain."""
        return self.error is not None and self.allowed is not None and not self.error <= self.allowed

    @property
    def share_note(self) -> str:
        """Why its share is above 1, to a percent; empty where it is not.

        Bytes that come faster than a large copy moves them come from a cache; a product that is faster than the large one raises
        that limit, unless its error is not known.
        """
        if self.share < 1.005 or self.is_wrong:
            return ""
        return "from cache" if self.bound == "bandwidth" else "beyond every product that was checked"

    @property
    def is_right(self) -> bool:
        """Whether its error is known, and within what its formats explain."""
        return self.error is not None and self.allowed is not None and self.error <= self.allowed


@attrs.frozen
class Suite:
    """What was measured in one run.

    Attributes:
        device: the name of what the kernels ran on.
        provenance: machine, versions and the like.
        peaks: measured limits: ``copy`` in bytes/s, formats in operations/s.
        rows: measurements.
        left_out: contenders that did not run, with the reason, by ``problem: contender``.
    """

    device: str
    provenance: Mapping[str, Any]
    peaks: Mapping[str, float]
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]

    @property
    def wrong(self) -> list[Row]:
        """Rows of contenders that are not right."""
        return [row for row in self.rows if row.is_wrong]


def by_problem(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows grouped by their problem, in their order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.problem, []).append(row)
    return found


BASELINES = ("bfloat16", "float16")
"""Names of PyTorch's own products in 16 bit."""


def baseline_of(rows: Sequence[Row]) -> Row | None:
    """PyTorch's own 16-bit product among the rows of a problem, the faster where there are two, unless it is wrong."""
    of_pytorch = (row for row in rows if row.contender in BASELINES and not row.is_wrong)
    return min(of_pytorch, key=lambda row: row.median_ns, default=None)


def fastest_of(rows: Sequence[Row]) -> Row | None:
    """The fastest that is right, as far as was looked: whose error is not known is not among them."""
    return min((row for row in rows if row.is_right), key=lambda row: row.median_ns, default=None)


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times faster it is than PyTorch's own 16-bit product of the problem; None where there is none, or it is wrong."""
    baseline = baseline_of(rows)
    return None if baseline is None or row.is_wrong else baseline.median_ns / row.median_ns


@attrs.frozen
class Standing:
    """How a contender does over all problems of a run.

    Attributes:
        ran, fastest, wrong: how many problems it ran, was the fastest right one of, and was not right on.
        speedup: geometric mean over PyTorch's own 16-bit product, of the problems that have one and that it is not wrong on; None
            where there are none.
        largest_error: relative, against float64; None where none was looked at.
    """

    contender: str
    ran: int
    fastest: int
    wrong: int
    speedup: float | None
    largest_error: float | None


def standings(suite: Suite) -> list[Standing]:
    """All contenders', in the order of their first row."""
    groups = list(by_problem(suite.rows).values())
    found = []
    for name in dict.fromkeys(row.contender for row in suite.rows):
        own = [(row, rows) for rows in groups for row in rows if row.contender == name]
        ratios = [ratio for row, rows in own if (ratio := speedup(row, rows)) is not None]
        found.append(
            Standing(
                contender=name,
                ran=len(own),
                fastest=sum(fastest_of(rows) is row for row, rows in own),
                wrong=sum(row.is_wrong for row, _ in own),
                speedup=geometric_mean(ratios) if ratios else None,
                largest_error=max((row.error for row, _ in own if row.error is not None), default=None),
            )
        )
    return found


def as_data(suite: Suite) -> dict[str, Any]:
    """All of it for programs; of each row also whether it is ``wrong`` or the ``fastest``, its ``speedup`` and ``share_note``."""
    found = attrs.asdict(suite)
    groups = by_problem(suite.rows)
    for row, data in zip(suite.rows, found["rows"], strict=True):
        rows = groups[row.problem]
        data |= {"wrong": row.is_wrong, "fastest": fastest_of(rows) is row, "speedup": speedup(row, rows)}
        data["share_note"] = row.share_note
    return found


def reasons(suite: Suite) -> dict[str, list[str]]:
    """Problems and contenders that did not run, by the reason."""
    found: dict[str, list[str]] = {}
    for what, why in suite.left_out.items():
        found.setdefault(why, []).append(what)
    return found

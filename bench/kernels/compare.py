"""A stored result beside a new one: what became faster or slower by more than the measurements scatter.  No torch here.

python bench/kernels/compare.py stored.json new.json
"""

from __future__ import annotations

import attrs

from qsync_torch.benchmarking.results import Row, Suite

LEAST_CHANGE = 0.05
"""Smaller changes are not told apart from what two runs of one version differ by."""


@attrs.frozen
class Change:
    """One measurement in both results; ``ratio`` is the new time over the stored one."""

    row: Row
    ratio: float
    noise: float

    @property
    def verdict(self) -> str:
        """``faster``, ``slower`` or ``same``."""
        if abs(self.ratio - 1) <= max(LEAST_CHANGE, self.noise):
            return "same"
        return "slower" if self.ratio > 1 else "faster"


def changes(stored: Suite, new: Suite) -> list[Change]:
    """What both hold, the largest slow-down first."""
    earlier = {row.key: row for row in stored.rows}
    found = [
        Change(row, row.median_ns / earlier[row.key].median_ns, row.spread + earlier[row.key].spread)
        for row in new.rows
        if row.key in earlier and earlier[row.key].median_ns > 0
    ]
    return sorted(found, key=lambda change: -change.ratio)


def comparison_text(stored: Suite, new: Suite) -> str:
    """A table of what changed, for a terminal."""
    found = changes(stored, new)
    lines = []
    if stored.device != new.device:
        lines.append(f"stored on {stored.device}, measured now on {new.device}: times of two devices do not compare")
    counts = {verdict: sum(change.verdict == verdict for change in found) for verdict in ("slower", "faster", "same")}
    only_stored = {row.key for row in stored.rows} - {row.key for row in new.rows}
    only_new = len(new.rows) - len(found)
    lines.append(f"{len(found)} measurements in both: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
                 + f"; {only_new} new, {len(only_stored)} not measured now")  # fmt: skip
    for change in found:
        if change.verdict != "same":
            row = change.row
            lines.append(f"{change.verdict:>6} {change.ratio:6.2f}×  {row.median_ns / 1e3:10.1f} µs  {row.contender:14} "
                         f"{row.op} {row.formats} {row.shape} ({row.set_name})")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels import compare, suite_file

    if len(sys.argv) != 3:
        raise SystemExit("give two results of the suite: the stored one, then the new one")
    try:
        suites = [suite_file.read_suite(Path(name)) for name in sys.argv[1:]]
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(compare.comparison_text(*suites))

"""How well indicators agree with the measured truth: rows I1 to I5 of ``docs/results/indicator.json``."""

import sys
from pathlib import Path

_BENCH = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_BENCH), str(_BENCH.parent / "examples" / "qsync-indicators-example" / "src")]

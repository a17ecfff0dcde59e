"""Seeded planning instances and what is measured on them: rows A1 to A7 of ``docs/results/allocator.json``."""

import sys
from pathlib import Path

# `synthetic` and `brute_force` stand beside the planner's tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages" / "qsync-planner" / "tests"))

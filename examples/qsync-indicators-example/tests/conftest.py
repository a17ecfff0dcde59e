"""Lets the tests import the models of qsync-planner's tests, and the plugin where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3] / "packages" / "qsync-planner" / "tests"), str(HERE.parents[1] / "src")]

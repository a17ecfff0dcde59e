"""Lets tests import the builders in this folder and each other's cases, and pins hypothesis to what CI runs."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

_HERE = Path(__file__).parent
sys.path[:0] = map(str, (_HERE, *(_HERE / room for room in ("allocator", "cli", "indicators", "replayer", "reporting"))))

settings.register_profile("qsync-planner", deadline=None, derandomize=True)
settings.load_profile("qsync-planner")

"""Lets the tests import the builders that stand beside them, and pins hypothesis to what CI runs."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("qsync-planner", deadline=None, derandomize=True)
settings.load_profile("qsync-planner")

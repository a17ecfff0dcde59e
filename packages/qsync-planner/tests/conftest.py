"""Lets tests import the builders in this folder and each other's cases, and loads hypothesis's profile."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis_profiles  # noqa: F401 - loads the profile

_HERE = Path(__file__).parent
sys.path[:0] = map(str, (_HERE, *(_HERE / room for room in ("allocator", "cli", "indicators", "replayer", "reporting"))))

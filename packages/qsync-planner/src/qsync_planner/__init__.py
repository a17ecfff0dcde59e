"""Indicators, replayer and allocator of QSync: plan hybrid mixed-precision training on a laptop; no torch, no GPU."""

from importlib.metadata import version as _version

__version__ = _version("qsync-planner")

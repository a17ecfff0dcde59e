"""Indicators, replayer and allocator of QSync: plan hybrid mixed-precision training on a laptop; no torch, no GPU."""

from importlib.metadata import version as _version

from qsync_core.plugins.compat import check_installed as _check_installed

__version__ = _version("qsync-planner")
_check_installed("qsync-planner")

"""Trace, profile, observe and run QSync precision plans in PyTorch."""

from importlib.metadata import version as _version

from qsync_core.compat import check_installed as _check_installed

__version__ = _version("qsync-torch")
_check_installed("qsync-torch")

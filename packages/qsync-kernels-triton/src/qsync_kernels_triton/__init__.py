"""Triton kernel backend for QSync."""

from importlib.metadata import version as _version

from qsync_core.plugins.compat import check_installed as _check_installed

__version__ = _version("qsync-kernels-triton")
_check_installed("qsync-kernels-triton")

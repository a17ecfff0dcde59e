"""Triton kernel backend for QSync."""

from importlib.metadata import version as _version

__version__ = _version("qsync-kernels-triton")

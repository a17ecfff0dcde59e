"""Trace, profile, observe and run QSync precision plans in PyTorch."""

from importlib.metadata import version as _version

__version__ = _version("qsync-torch")

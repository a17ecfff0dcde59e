"""The QSync precision IR, artifacts, plugin registry and command line; no torch."""

from importlib.metadata import version as _version

__version__ = _version("qsync-core")

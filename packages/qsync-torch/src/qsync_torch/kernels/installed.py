"""The plugins that are installed here, loaded once."""

from __future__ import annotations

import functools

from qsync_core.plugins.registry import Registry


@functools.cache
def installed() -> Registry:
    """The installed plugins, loaded at the first request for a backend other than ``aten``."""
    return Registry.load()

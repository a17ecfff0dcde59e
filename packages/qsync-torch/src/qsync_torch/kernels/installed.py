"""The plugins that are installed here, loaded once."""

from __future__ import annotations

import functools

from qsync_core.plugins.registry import Registry


@functools.cache
def installed() -> Registry:
    """The installed plugins, loaded when somebody first asks for a backend other than ``aten``."""
    return Registry.load()

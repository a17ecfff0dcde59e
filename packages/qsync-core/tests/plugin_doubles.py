"""Plugins made of functions, and registries of them, for tests of the registry."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.registry import Registry


def plugin(**hooks: Callable[..., Any]) -> types.ModuleType:
    module = types.ModuleType("plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def offering(*backends: Any) -> types.ModuleType:
    return plugin(qsync_register_backends=lambda: list(backends))


def registry(**plugins: Any) -> Registry:
    found = Registry.load([])
    for name, module in plugins.items():
        found.register(module, name)
    return found

"""What a script's text gives its DistributedDataParallel, so that a plan is for the way in which its ranks communicate."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsync_core.ir.communication import PYTORCH_DEFAULTS, CommunicationSettings

_WRAPPER = "DistributedDataParallel"
_ARGUMENTS = {
    "bucket_cap_mb": "bucket_cap_mb",
    "broadcast_buffers": "broadcast_buffers",
    "forward_sync_buffers": "broadcast_buffers",  # PyTorch 2.13's name for it
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
}
"""Arguments of DistributedDataParallel that a plan chooses, and the settings that they are."""


def said_of_wrapper(path: str | Path) -> Mapping[str, Any]:
    """The settings that a script's own text decides, where it takes nothing of the plan's.

    Returns:
        Attributes of :class:`~qsync_core.ir.communication.CommunicationSettings`.  None of them where the text has no call of
        DistributedDataParallel, or has one with arguments that only a run knows (``**applied.ddp_options()``, further arguments by
        their places), or calls that differ.  An argument that is no literal is left out, for the plan to choose.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    names = {_WRAPPER, "DDP"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == _WRAPPER and alias.asname
    }
    calls = [_settings(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in names]
    first = calls[0] if calls else None
    return first if first and all(call == first for call in calls) else {}


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _settings(call: ast.Call) -> dict[str, Any] | None:
    """What one call decides; None where only a run knows."""
    if len(call.args) > 1 or any(isinstance(one, ast.Starred) for one in call.args) or any(not one.arg for one in call.keywords):
        return None
    found: dict[str, Any] = {setting: getattr(PYTORCH_DEFAULTS, setting) for setting in _ARGUMENTS.values()}
    for keyword in call.keywords:
        setting = _ARGUMENTS.get(keyword.arg or "")
        if setting is None:
            continue
        value: Any = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        try:
            CommunicationSettings(**{setting: value})
        except (TypeError, ValueError):
            return None  # DistributedDataParallel says what is wrong with it
        if value is None:
            del found[setting]
        else:
            found[setting] = value
    return found

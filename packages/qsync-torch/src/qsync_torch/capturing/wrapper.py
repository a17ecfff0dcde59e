"""What a script's text gives its DistributedDataParallel, so that a plan is for the way in which its ranks communicate."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsync_core.ir.communication import PYTORCH_DEFAULTS, CommunicationSettings

_WRAPPER = "DistributedDataParallel"
_SETTINGS = ("bucket_cap_mb", "broadcast_buffers", "gradient_as_bucket_view", "static_graph")
"""Arguments of DistributedDataParallel that a plan chooses, named as in the settings."""


def said_of_wrapper(path: str | Path) -> Mapping[str, Any]:
    """The settings that a script's own text decides, where it takes nothing of the plan's.

    Returns:
        Attributes of :class:`~qsync_core.ir.communication.CommunicationSettings`.  None of them where the text has no call of
        DistributedDataParallel, or has one with arguments that only a run knows (``**applied.ddp_options()``, further arguments by
        their places, caps of single buckets), with a literal that is none for its argument, or calls that differ.  An argument that
        is no literal is left out, for the plan to choose; None is PyTorch's default.
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
    given = {keyword.arg: keyword.value for keyword in call.keywords if not _is_none(keyword.value)}
    if "bucket_cap_mb_list" in given:  # PyTorch 2.13's, of buckets that no plan has
        return None
    if "forward_sync_buffers" in given:  # PyTorch 2.13's name, which wins where both are given
        given["broadcast_buffers"] = given["forward_sync_buffers"]
    found: dict[str, Any] = {}
    for setting in _SETTINGS:
        default = getattr(PYTORCH_DEFAULTS, setting)
        if setting not in given:
            found[setting] = default
            continue
        try:
            value = ast.literal_eval(given[setting])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if type(value) not in ((bool,) if isinstance(default, bool) else (int, float)):
            return None
        try:
            found[setting] = getattr(CommunicationSettings(**{setting: value}), setting)
        except (ValueError, OverflowError):
            return None  # DistributedDataParallel says what is wrong with it
    return found


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None

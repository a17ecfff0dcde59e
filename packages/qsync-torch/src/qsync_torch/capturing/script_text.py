"""What the text of a script says of its training, where neither its line nor its run does (docs/your-script.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qsync_core.ir.communication import PYTORCH_DEFAULTS, CommunicationSettings
from qsync_core.ir.profile import Compiled, Compiler

_WRAPPER = "DistributedDataParallel"
_SETTINGS = ("bucket_cap_mb", "broadcast_buffers", "gradient_as_bucket_view", "static_graph")
"""Arguments of DistributedDataParallel that a plan chooses, named as in the settings."""
_OURS = ("qsync", "qsync_torch")
_PATTERNS = ("re", "regex")
"""Modules whose ``compile`` is of something else."""
_Pass = ast.For | ast.While | ast.FunctionDef


class ScriptText:
    """The syntax tree of a script that has run; of a file that is no text, which Python runs too, an empty one."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._nodes = [*ast.walk(ast.parse(Path(path).read_bytes()))]
        except (SyntaxError, ValueError, RecursionError):
            self._nodes = []

    @property
    def calls_autocast(self) -> bool:
        """Whether it calls autocast, PyTorch's or a library's, anywhere."""
        return any(isinstance(node, ast.Call) and _name(node.func) == "autocast" for node in self._nodes)

    @property
    def compiles(self) -> Compiled | None:
        """How it compiles its model, by PyTorch's ways or QSync's; of a trainer that does, its adapter knows.

        What ends first in the text is inside the other, the compiled model or DistributedDataParallel.
        """
        calls = {node.func: node for node in self._nodes if isinstance(node, ast.Call)}
        found = [node for node in self._nodes if isinstance(node, ast.Attribute) and node.attr == "compile"]
        by_place = sorted((_begin(node), by, _end(calls.get(node, node))) for node in found if (by := _name(node.value)))
        ways = [(by, end) for _, by, end in by_place if by not in _PATTERNS]
        if not ways:
            return None
        by, end = next((way for way in ways if way[0] in _OURS), ways[0])
        wrap = min(self._wraps, key=_begin, default=None)
        return Compiled(Compiler.QSYNC if by in _OURS else Compiler.TORCH, around_ddp=wrap is not None and _end(wrap) < end)

    @property
    def reads_loss(self) -> bool:
        """Whether the loop or function that calls ``backward`` reads a number each time (``loss.item()``), not behind an ``if``."""
        return any({"backward", "item"} <= set(_methods_of(node)) for node in self._nodes if isinstance(node, _Pass))

    @property
    def communication(self) -> Mapping[str, Any]:
        """The settings of DistributedDataParallel that it decides itself, where it takes nothing of the plan's.

        Returns:
            Attributes of :class:`~qsync_core.ir.communication.CommunicationSettings`.  None of them where the text has no call of
            DistributedDataParallel, or has one with arguments that only a run knows (``**applied.ddp_options()``, further
            arguments by their places, caps of single buckets), with a literal that is none for its argument, or calls that differ.
            An argument that is no literal is left out, for the plan to choose; None is PyTorch's default.
        """
        calls = [_settings(call) for call in self._wraps]
        first = calls[0] if calls else None
        return first if first and all(call == first for call in calls) else {}

    @property
    def _wraps(self) -> list[ast.Call]:
        """The calls of DistributedDataParallel, by any name that it is imported as."""
        aliases = [alias for node in self._nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        names = {_WRAPPER, "DDP"} | {alias.asname for alias in aliases if alias.name == _WRAPPER and alias.asname}
        return [node for node in self._nodes if isinstance(node, ast.Call) and _name(node.func) in names]


def _name(value: ast.expr) -> str:
    """The last name of what is called or asked for an attribute; empty where it has none."""
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


def _begin(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _methods_of(place: _Pass) -> Iterator[str]:
    """The methods that a pass through a loop or a function calls in any case, but in loops and functions inside."""
    left: list[ast.AST] = list(place.body)
    while left:
        node = left.pop()
        if isinstance(node, _Pass | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr
        left += [node.test] if isinstance(node, (ast.If, ast.IfExp)) else ast.iter_child_nodes(node)


def _settings(call: ast.Call) -> dict[str, Any] | None:
    """What one call decides; None where only a run knows."""
    if len(call.args) > 1 or any(isinstance(one, ast.Starred) for one in call.args) or any(not one.arg for one in call.keywords):
        return None
    given = {one.arg: one.value for one in call.keywords if not (isinstance(one.value, ast.Constant) and one.value.value is None)}
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

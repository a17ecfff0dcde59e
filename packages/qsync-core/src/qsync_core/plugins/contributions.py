"""What plugins contribute by name (indicators, collectors), checked; and what ``qsync doctor`` says of those that are unusable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from qsync_core.errors import PluginError
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.registry import Registry


def ignore(text: str) -> None:
    """For callers who tell nobody."""


def contributed(
    registry: Registry,
    hook: str,
    kind: str,
    lacks: Callable[[Any], str],
    *,
    taken: Iterable[str] = (),
    announce: Callable[[str], None] = ignore,
) -> dict[str, Any]:
    """The objects with a ``name`` that plugins offer through a hook, by that name.

    Args:
        registry: whose plugins are asked.
        hook: which.
        kind: what is offered, for messages: ``indicator``.
        lacks: which part of the interface an object lacks, empty for none; such an object is left out, as is one that is a class,
            or whose name is not one word.
        taken: names that are given already.
        announce: told of every plugin that is disabled in this call, or of which something is left out, and why.

    Raises:
        PluginError: for two of one name.
    """

    def problem(offered: Any) -> str:
        if isinstance(offered, type):
            reason = "it is a class, where an instance of it is asked for"
        elif lacking := lacks(offered):
            reason = lacking
        elif not isinstance(offered.name, str) or not re.fullmatch(r"[^\s,]+", offered.name):
            reason = f"its name is {offered.name!r}, and must be text without blanks and commas"
        else:
            return ""
        return f"{reason}; mend that plugin, or uninstall it"

    known, names = set(registry.disabled), set(taken)
    found: dict[str, Any] = {}
    for offered in registry.collect(hook, problem):
        if offered.name in names:
            raise PluginError(f"two {kind}s are called {offered.name!r}; uninstall the plugin with the second, or rename it")
        names.add(offered.name)
        found[offered.name] = offered
    for plugin, reason in registry.disabled.items():
        if plugin not in known:
            announce(f"plugin {plugin} is disabled: {reason}")
    return found


def problem_lines(topic: str, find: Callable[[Callable[[str], None]], object]) -> list[DoctorLine]:
    """A warning for each thing that ``find`` announces, or refuses with a PluginError."""
    problems: list[str] = []
    try:
        find(problems.append)
    except PluginError as error:
        problems.append(str(error))
    return [DoctorLine(topic, problem, Status.WARNING) for problem in problems]

"""Lines by which workers tell the parent how far they are; everything else that they print goes to the log."""

from __future__ import annotations

import json
from typing import Any

_MARK = "@qsync-demo "


def report(done: int, total: int, what: str) -> None:
    """Tell the parent."""
    print(_MARK + json.dumps([done, total, what]), flush=True)


def report_error(sentence: str) -> None:
    """Tell the parent why this worker gives up."""
    print(_MARK + json.dumps({"error": sentence}), flush=True)


def parse(line: str) -> Any:
    """What a line says, or None for an ordinary one: ``[done, total, what]`` or ``{"error": sentence}``."""
    at = line.find(_MARK)
    if at < 0:
        return None
    try:
        # Libraries print to the same stream from other threads, without a line of their own.
        return json.JSONDecoder().raw_decode(line[at + len(_MARK) :])[0]
    except ValueError:
        return None

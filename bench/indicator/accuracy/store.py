"""Finished runs, one JSON line each, so that an interrupted script goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indicator.accuracy.methods import SETTINGS, Task
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant

Run = dict[str, Any]
"""What :func:`~indicator.accuracy.training.train` returned."""


def plan_digest(plan: Mapping[OpId, Variant]) -> str:
    """Short, of what every operator runs as: runs of another plan are not taken for this one's."""
    text = "\n".join(sorted(f"{op_id} {variant}" for op_id, variant in plan.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Store:
    """A folder; every ``*.jsonl`` in it is read, and ``runs.jsonl`` written.

    Args:
        folder: made when the first run is added.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, Run] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # cut off by an interruption
                    continue
                self._runs[entry.pop("key")] = entry

    @staticmethod
    def key(task: Task, updates: int, digest: str) -> str:
        """Everything that decides a run, except the code that runs it; methods whose plans are the same share one."""
        setting = SETTINGS[task.setting]
        stress = f"{setting.bits} bits {setting.rounding}" if setting.bits < 8 else ""
        return json.dumps({"model": task.model, "seed": task.seed, "updates": updates, "plan": digest, "stress": stress})

    def get(self, key: str) -> Run | None:
        """The run, if it is there."""
        return self._runs.get(key)

    def add(self, key: str, run: Run) -> None:
        """Write a run at once."""
        self._runs[key] = run
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **run}) + "\n")

"""``qsync doctor`` with and without torch."""

from __future__ import annotations

import json
import subprocess
import sys


def topics(*command: str) -> set[str]:
    done = subprocess.run([*command, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line["topic"] for line in json.loads(done.stdout)["lines"]}


def test_with_torch_it_says_what_torch_can_do():
    assert {"python", "qsync-core", "qsync-torch", "torch"} <= topics(sys.executable, "-m", "qsync_core.cli")


def test_without_torch_it_says_what_there_is(planner_executable):
    found = topics(*planner_executable)
    assert {"python", "qsync-core", "qsync-planner"} <= found
    assert "torch" not in found

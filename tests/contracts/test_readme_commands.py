"""The README's commands are the ones that CI runs, and each is a single line."""

from __future__ import annotations

import os
import re

from contracts.environment import ROOT


def commands() -> list[str]:
    """The commands of the README's section "Two commands"."""
    section = (ROOT / "README.md").read_text().split("## Two commands", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, flags=re.S)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_the_readme_shows_two_commands_the_main_job_and_the_tests():
    main_job, tests = commands()
    assert "tox run -e quickstart" in main_job
    assert "tox run" in tests


def test_ci_runs_the_test_command_and_nothing_else():
    script = (ROOT / ".ci" / "run").read_text()
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines[:3] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "export CI=true"]
    assert lines[3:] == [commands()[1]]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)

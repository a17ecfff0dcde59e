"""The README's commands are the ones that CI runs, and each is a single line; CI installs a browser first, where it can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
import yaml

import shared_metadata
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


def test_ci_runs_the_test_command_and_before_it_only_installs_a_browser():
    script = (ROOT / ".ci" / "run").read_text()
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines[:3] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "export CI=true"]
    browser, *rest = lines[3:]
    assert rest == [commands()[1]]
    assert browser.startswith("command -v chromium || ")
    assert browser.endswith("'apt-get -qq update && apt-get -qqy install chromium' >/dev/null || true")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("program", ["apt-get", "chromium"])
def test_ci_goes_on_without_a_browser_and_with_one(program, tmp_path):
    """``apt-get`` fails, as where there is no network; or chromium is there already, and nothing is installed."""
    (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / program).chmod(0o755)
    (browser,) = (line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("command -v"))
    for name in ("sh", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    script = f"set -euo pipefail; {browser}; echo went on"
    done = subprocess.run(["/bin/bash", "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "went on", done.stderr


def workflow_jobs() -> dict[str, dict]:
    """The hosted workflow's jobs by name."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def test_the_hosted_workflow_runs_the_two_commands_and_nothing_else():
    run = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow_jobs().items()}
    main_job, tests = commands()
    assert run == {"tests": [tests], "quickstart": [main_job]}


def test_the_hosted_workflow_has_every_python_of_the_classifiers_and_caches_pip():
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(shared_metadata.shared(ROOT)["classifiers"]))
    for name, job in workflow_jobs().items():
        assert job["strategy"]["matrix"]["python"] == pythons, name
        (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
        assert (python["python-version"], python["cache"]) == ("${{ matrix.python }}", "pip")
        assert all(list(ROOT.glob(path)) for path in python["cache-dependency-path"].split())

"""The README's commands are the ones that CI runs, and each is a single line; what it leaves out runs nightly."""

from __future__ import annotations

import configparser
import os
import re

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


def test_ci_runs_the_test_command_and_nothing_else():
    script = (ROOT / ".ci" / "run").read_text()
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines[:3] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "export CI=true"]
    assert lines[3:] == [commands()[1]]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def tox_section(name: str) -> configparser.SectionProxy:
    """A section of ``tox.ini`` as it stands there."""
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "tox.ini")
    return parser[name]


def test_what_the_test_command_leaves_out_runs_nightly():
    """Every pytest command of CI that selects tests has the same folders in the nightly environment, with the other selection."""
    quick, nightly = "{[tests]quick}", "{[tests]nightly}"
    environments = [name.strip() for name in tox_section("tox")["env_list"].split(",")]
    assert "nightly" not in environments
    commands = [line for name in environments for line in tox_section(f"testenv:{name}")["commands"].splitlines()]
    selecting = {command.partition(quick)[2] for command in commands if quick in command}
    nightly_commands = tox_section("testenv:nightly")["commands"].splitlines()
    of_nightly = {command.partition(nightly)[2] for command in nightly_commands if nightly in command}
    without = {" tests/gpu {posargs}"}  # whose tests run on a GPU machine, all of them
    assert selecting - without == of_nightly
    assert tox_section("tests")["quick"] == '-m "not nightly"'
    assert tox_section("tests")["nightly"] == '-m "nightly or hypothesis"'


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

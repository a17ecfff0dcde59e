"""Packages of another release series refuse each other with one sentence: the command, and the import."""

from __future__ import annotations

import json

import pytest

from contracts.environment import MODULES, run_python
from nightly import nightly_but

WITHOUT_TORCH = [name for name in MODULES if name not in ("qsync-core", "qsync-torch")]


def claim_version(venv, distribution, version):
    """Make an installed package say that it is of another version, as a half-done upgrade leaves it."""
    (metadata,) = venv.folder.glob(f"lib/python*/site-packages/{MODULES[distribution]}-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    changed = [f"Version: {version}" if line.startswith("Version: ") else line for line in lines]
    assert changed != lines
    metadata.write_text("\n".join(changed) + "\n")


@pytest.fixture
def venv(make_venv):
    venv = make_venv("mixed")
    venv.install(*WITHOUT_TORCH)
    return venv


@pytest.mark.slow
def test_an_older_core_is_refused_by_the_command(venv):
    claim_version(venv, "qsync-core", "0.9.3")
    done = venv.qsync("--help")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "does not work with qsync-core 0.9.3" in line
    assert "pip install 'qsync-core==0.9.*'" in line


@pytest.mark.parametrize("distribution", nightly_but({"qsync-planner"}, WITHOUT_TORCH))
def test_a_package_of_another_series_is_refused_by_the_command_and_when_imported(venv, distribution):
    claim_version(venv, distribution, "0.2.0")
    done = venv.qsync("doctor")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {distribution} 0.2.0 does not work with qsync-core 0.1.")

    imported = run_python(f"import {MODULES[distribution]}", python=venv.python)
    assert imported.returncode == 1
    last = imported.stderr.splitlines()[-1]
    assert f"CompatibilityError: {distribution} 0.2.0 does not work with qsync-core 0.1." in last


@pytest.mark.nightly
def test_another_patch_release_works(venv):
    claim_version(venv, "qsync-planner", "0.1.9")
    done = venv.qsync("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert {"topic": "qsync-planner", "finding": "0.1.9", "status": "ok", "advice": ""} in json.loads(done.stdout)["lines"]

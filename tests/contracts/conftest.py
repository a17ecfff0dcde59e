"""Fixtures of the contract tests: the repository's wheels, built once, and clean virtual environments for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.environment import MODULES, ROOT, Venv, run


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory) -> Path:
    """A folder with a freshly built wheel of every package."""
    folder = tmp_path_factory.mktemp("wheels")
    packages = [ROOT / "packages" / name for name in MODULES]
    done = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, *packages)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*.whl"))) == len(MODULES)
    return folder


@pytest.fixture
def make_venv(tmp_path, wheelhouse) -> Callable[[str], Venv]:
    """Call it with a name for a new, empty virtual environment."""
    return lambda name: Venv(tmp_path / name, wheelhouse)

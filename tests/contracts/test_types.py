"""Types of all packages, checked by mypy; a test, so that others run beside it."""

from __future__ import annotations

import sys

import pytest

from contracts.environment import MODULES, ROOT, run


@pytest.mark.slow
def test_every_package_passes_mypy_strictly():
    packages = [option for module in ("qsync", *MODULES.values()) for option in ("-p", module)]
    done = run(sys.executable, "-m", "mypy", "--strict", *packages, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr

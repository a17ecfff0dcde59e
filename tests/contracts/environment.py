"""The repository's packages, commands run without this environment's settings, and clean virtual environments."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {path.parent.name: "_".join(path.parent.name.split("-")) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
"""Distribution name to module name, for every package of the repository."""


def pyproject(distribution: str) -> dict:
    return tomllib.loads((ROOT / "packages" / distribution / "pyproject.toml").read_text())


def run(*command: object, **options) -> subprocess.CompletedProcess:
    """Run a command without letting this environment's packages or settings leak into it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QSYNC_", "VIRTUAL_ENV"))}
    env |= {"PYTHONNOUSERSITE": "1", "COLUMNS": "200", "NO_COLOR": "1"} | options.pop("env", {})
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, env=env, **options)


def run_python(code: str, *arguments: object, python: object = sys.executable) -> subprocess.CompletedProcess:
    """Run a piece of Python outside the repository, so that nothing is imported from the working folder by accident."""
    return run(python, "-I", "-c", code, *arguments, cwd=ROOT.anchor)


class Venv:
    """A virtual environment with nothing in it but what a test installs."""

    def __init__(self, folder: Path, wheelhouse: Path) -> None:
        self.folder, self.wheelhouse = folder, wheelhouse
        done = run(sys.executable, "-m", "venv", "--without-pip", folder)
        assert done.returncode == 0, done.stderr
        self.python = folder / "bin" / "python"

    def install(self, *requirements: object) -> None:
        done = run(
            sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-compile",
            "--find-links", self.wheelhouse, "-c", ROOT / "constraints.txt", *requirements,
        )  # fmt: skip
        assert done.returncode == 0, f"pip install {' '.join(map(str, requirements))}\n{done.stdout}\n{done.stderr}"

    def qsync(self, *arguments: object, **options) -> subprocess.CompletedProcess:
        return run(self.folder / "bin" / "qsync", *arguments, cwd=self.folder, **options)

    def installed(self) -> set[str]:
        """Names of the installed distributions, normalised."""
        done = run(sys.executable, "-m", "pip", "--python", self.python, "list", "--format", "freeze")
        assert done.returncode == 0, done.stderr
        return {line.split("==")[0].lower().replace("_", "-") for line in done.stdout.splitlines() if "==" in line}

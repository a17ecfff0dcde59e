"""Tests import their own modules by name, and compile into a cache of their own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import hypothesis_profiles  # noqa: F401 - loads the profile

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty kernel cache that the environment points to."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("QSYNC_KERNEL_CACHE", str(folder))
    return folder


@pytest.fixture
def stand_in_nvcc(tmp_path, monkeypatch):
    """A function that installs a shell script in place of nvcc; ``$out`` and ``$source`` are the compiler's arguments.

    The script runs for compilations only; the questions about release and architectures have fixed answers.
    """
    from qsync_kernels_cutlass.compiling import ahead, toolchain

    headers = tmp_path / "cutlass"
    (headers / "include" / "cutlass").mkdir(parents=True)
    (headers / "include" / "cutlass" / "cutlass.h").write_text("")
    (headers / "include" / "cutlass" / "version.h").write_text(
        "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    )
    monkeypatch.setenv("CUTLASS_PATH", str(headers))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    def forget() -> None:
        for cached in (toolchain.supported_archs, toolchain.nvcc_build):
            cached.cache_clear()
        ahead.forget()

    def install(script: str, archs: str = "sm_75 sm_80 sm_90") -> None:
        path = tmp_path / "cuda" / "bin" / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"""#!{shutil.which("sh")}
case "$1" in
--version) echo 'release 13.0'; echo 'Build cuda_13.0.test'; exit 0;;
--list-gpu-code) echo {archs} | tr ' ' '\\n'; exit 0;;
esac
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
source=$1
echo "$source" >> '{tmp_path}/compilations'
{script}
"""
        )
        path.chmod(0o755)
        forget()

    yield install
    forget()

"""Finding the compiler and the headers, with stand-ins for both; no CUDA is needed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from qsync_core.errors import BackendError
from qsync_core.plugins.doctor import Status
from qsync_kernels_cutlass import plugin
from qsync_kernels_cutlass.compiling import toolchain

VERSION_H = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"

VERSION_AND_ARCHS = """\
case $1 in
--version) echo 'Cuda compilation tools, release 13.0, V13.0.88';;
--list-gpu-code) echo sm_75; echo sm_80; echo sm_90; echo sm_100;;
esac"""


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch, tmp_path):
    """A machine with neither compiler nor headers, whatever this one has."""
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(toolchain, "USUAL_PLACES", ())
    monkeypatch.setenv("QSYNC_KERNEL_CACHE", str(tmp_path / "kernels"))
    toolchain.supported_archs.cache_clear()


def install_nvcc(tmp_path, script):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc


def install_headers(folder, version=VERSION_H):
    (folder / "include" / "cutlass").mkdir(parents=True)
    (folder / "include" / "cutlass" / "cutlass.h").write_text("")
    if version is not None:
        (folder / "include" / "cutlass" / "version.h").write_text(version)


def lines():
    return {line.topic: line for line in plugin.qsync_doctor()}


def test_a_machine_without_either_learns_what_to_install():
    assert lines()["nvcc"].finding == "not found"
    assert "CUDA_HOME" in lines()["nvcc"].advice
    assert lines()["cutlass headers"].finding == "not found"
    assert "pip install --no-deps 'nvidia-cutlass>=4.2'" in lines()["cutlass headers"].advice
    with pytest.raises(BackendError, match="needs nvcc"):
        toolchain.required()


def test_doctor_the_error_and_the_readme_give_one_advice_on_the_headers(tmp_path):
    install_nvcc(tmp_path, VERSION_AND_ARCHS)
    with pytest.raises(BackendError) as caught:
        toolchain.required()
    assert lines()["cutlass headers"].advice in str(caught.value)
    readme = Path(__file__).parents[2] / "README.md"
    assert "pip install --no-deps 'nvidia-cutlass>=4.2'" in readme.read_text()


def test_the_release_of_the_compiler_is_reported(tmp_path):
    nvcc = install_nvcc(tmp_path, VERSION_AND_ARCHS)
    line = lines()["nvcc"]
    assert line.finding == f"release 13.0 at {nvcc}, compiles for sm_75, sm_80, sm_90a"
    assert line.status is Status.OK
    assert line.advice == "kernels for sm_70, sm_86, sm_89 need another release of the CUDA toolkit"


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "echo 'release 13.0'; exit 3"])
def test_a_compiler_that_does_not_answer_is_a_warning(tmp_path, script):
    install_nvcc(tmp_path, script)
    line = lines()["nvcc"]
    assert line.status is Status.WARNING
    assert "does not report a version" in line.finding


def test_headers_are_found_where_the_variable_points(tmp_path, monkeypatch):
    install_headers(tmp_path / "checkout")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "checkout"))
    assert lines()["cutlass headers"].finding == f"version 4.2.1 at {tmp_path / 'checkout' / 'include'}"


def test_headers_are_found_inside_the_installed_package(tmp_path, monkeypatch):
    class Spec:
        submodule_search_locations = (str(tmp_path / "cutlass_library"),)

    install_headers(tmp_path / "cutlass_library" / "source", version=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec if name == "cutlass_library" else None)
    assert lines()["cutlass headers"].finding.startswith("version unknown at ")


def test_a_variable_that_points_elsewhere_finds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    assert lines()["cutlass headers"].finding == "not found"


def test_a_compiler_for_other_chips_is_a_warning(tmp_path):
    install_nvcc(tmp_path, "echo release 13.0; echo sm_100")
    line = lines()["nvcc"]
    assert line.status is Status.WARNING
    assert line.finding.endswith("compiles for no chip that there are kernels for")


def test_the_kernel_cache_is_reported(tmp_path):
    folder = tmp_path / "kernels"
    assert lines()["kernel cache"].finding == f"{folder}, empty"
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    assert lines()["kernel cache"].finding == f"{folder}, compiled kernels: none"
    for name in ("sm_75-1", "sm_90a-1", "sm_90a-2", ".making-1"):
        (folder / name).mkdir()
    assert lines()["kernel cache"].finding == f"{folder}, compiled kernels: 1 for sm_75, 2 for sm_90a"


def test_a_kernel_cache_that_others_can_write_is_a_warning(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    line = lines()["kernel cache"]
    assert line.status is Status.WARNING
    assert "can be written by others (mode 0777)" in line.finding

"""Compiling beside a training: it waits for nothing, says how it ended, and leaves neither compilers nor files behind."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_requests import INT8_THROUGHOUT, conv2d, linear

from qsync_core.kernels.backend import BackgroundCompilingBackend, KernelConfig, Op
from qsync_kernels_cutlass import architectures, backend
from qsync_kernels_cutlass.backend import CutlassBackend
from qsync_kernels_cutlass.compiling import compile as compiling
from qsync_kernels_cutlass.compiling.background import Background
from qsync_kernels_cutlass.compiling.cache import KernelCache
from qsync_kernels_cutlass.compiling.compile import source_key
from qsync_kernels_cutlass.sources import needed_sources

COPY = 'cat "$source" > "$out"'
BACKEND = CutlassBackend()
ASKED = linear(Op.LINEAR_GRAD_INPUT, variant=INT8_THROUGHOUT, capability="7.5")
SOURCES = 3
"""Products in bfloat16 and in float32, and a transpose."""
START = """
import sys
from kernel_requests import INT8_THROUGHOUT, linear
from qsync_core.kernels.backend import Op
from qsync_kernels_cutlass.backend import CutlassBackend
from qsync_kernels_cutlass.compiling.background import BACKGROUND

backend, asked = CutlassBackend(), linear(Op.LINEAR_GRAD_INPUT, variant=INT8_THROUGHOUT, capability="7.5")
(config, *_) = backend.candidate_configs(asked)
print(backend.is_compiled(asked, config), flush=True)
backend.compile_later(asked, config)
for line in sys.stdin:  # it trains
    if line == "wait\\n":
        BACKGROUND.wait()
        print(backend.is_compiled(asked, config), flush=True)
"""


@pytest.fixture
def background(monkeypatch):
    """A background of the test's own, which ends with it."""
    own = Background()
    monkeypatch.setattr(backend, "BACKGROUND", own)
    yield own
    own._end()


@pytest.fixture
def slow(tmp_path):
    """The script of a compiler that does not end before ``go`` is there."""
    return f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.02; done; {COPY}"


def first(request_):
    return BACKEND.candidate_configs(request_)[0]


def compilations(tmp_path):
    log = tmp_path / "compilations"
    return len(log.read_text().splitlines()) if log.exists() else 0


def start():
    """A process that trains: it has a kernel compiled, and goes on until its input ends."""
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", START], text=True, env=environment, **pipes)


def test_it_is_a_backend_that_compiles_in_the_background():
    assert isinstance(BACKEND, BackgroundCompilingBackend)


def test_a_run_goes_on_beside_the_compiler_and_keeps_its_kernels(stand_in_nvcc, own_cache, background, slow, tmp_path, capsys):
    stand_in_nvcc(slow)
    assert not BACKEND.is_compiled(ASKED, first(ASKED))
    BACKEND.compile_later(ASKED, first(ASKED))
    BACKEND.compile_later(ASKED, first(ASKED))
    assert not BACKEND.is_compiled(ASKED, first(ASKED))
    (tmp_path / "go").write_text("")
    background.wait()
    assert compilations(tmp_path) == SOURCES
    assert capsys.readouterr().err == (
        f"qsync: {SOURCES} CUTLASS kernels are compiled and kept in {own_cache}: the next start runs with what is there\n"
    )
    assert not BACKEND.is_compiled(ASKED, first(ASKED))  # another backend's kernels stay


def test_the_next_start_finds_them(stand_in_nvcc, own_cache, slow, tmp_path):
    stand_in_nvcc(slow)
    one = start()
    assert one.stdout.readline() == "False\n"
    (tmp_path / "go").write_text("")
    assert one.communicate("wait\n", timeout=60)[0] == "False\n"
    two = start()
    out, err = two.communicate("", timeout=60)
    assert (out, err) == ("True\n", "")
    assert compilations(tmp_path) == SOURCES


def test_two_processes_of_a_machine_compile_each_kernel_once(stand_in_nvcc, own_cache, slow, tmp_path):
    stand_in_nvcc(slow)
    processes = [start() for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["False\n"] * 2
    (tmp_path / "go").write_text("")
    said = [process.communicate("wait\n", timeout=60)[1] for process in processes]
    assert compilations(tmp_path) == SOURCES
    assert sum(text.count("kept in") for text in said) in (1, 2)  # as many as have made some


def test_the_end_of_a_run_ends_its_compilers_and_leaves_nothing(stand_in_nvcc, own_cache, tmp_path):
    stand_in_nvcc(f"sleep 100 & echo $$ $! >> '{tmp_path}/pid'; wait")
    process = start()
    assert process.stdout.readline() == "False\n"
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
    assert process.communicate("", timeout=60)[1] == ""
    assert process.returncode == 0
    for pid in map(int, (tmp_path / "pid").read_text().split()):
        state = Path(f"/proc/{pid}/stat")
        deadline = time.monotonic() + 30
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < deadline
    assert [name for name in os.listdir(own_cache) if not name.endswith(".lock")] == []


def test_a_compiler_that_fails_is_told_in_one_sentence_and_the_others_are_kept(
    stand_in_nvcc, own_cache, background, tmp_path, capsys
):
    stand_in_nvcc(f'case "$source" in *f32*) printf "x.cu(3): error: no tile\\nmore\\n" >&2; exit 2;; esac; {COPY}')
    BACKEND.compile_later(ASKED, first(ASKED))
    background.wait()
    failed, kept = sorted(capsys.readouterr().err.splitlines(), key=lambda line: "kept" in line)
    assert failed.startswith("qsync: nvcc could not compile the kernel gemm_mma_s8_s8_f32_")
    assert failed.endswith("for sm_75 (exit status 2): x.cu(3): error: no tile; the kernels that run in its place stay")
    assert kept.startswith(f"qsync: {SOURCES - 1} CUTLASS kernels are compiled and kept in ")
    assert KernelCache().counts() == {"sm_75": SOURCES - 1}


def test_other_compilers_headers_chips_and_hosts_compile_anew(stand_in_nvcc, own_cache, background, tmp_path, monkeypatch):
    stand_in_nvcc(COPY)
    config = first(ASKED)
    compiling.compile_files(needed_sources(ASKED, backend.parse_config(ASKED, config.text), architectures.SM_75))
    assert BACKEND.is_compiled(ASKED, config)
    later = linear(Op.LINEAR_GRAD_INPUT, variant=INT8_THROUGHOUT, capability="8.0")
    assert not BACKEND.is_compiled(later, first(later))
    version = tmp_path / "cutlass" / "include" / "cutlass" / "version.h"
    before = version.read_text()
    version.write_text(before.replace("PATCH 0", "PATCH 1"))
    assert not BACKEND.is_compiled(ASKED, config)
    version.write_text(before)
    assert BACKEND.is_compiled(ASKED, config)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("cuda_13.0.test", "cuda_13.1.test"))
    compiling.toolchain.nvcc_build.cache_clear()
    assert not BACKEND.is_compiled(ASKED, config)
    stand_in_nvcc(COPY)
    assert BACKEND.is_compiled(ASKED, config)
    source = needed_sources(ASKED, backend.parse_config(ASKED, config.text), architectures.SM_75)[0]
    here = source_key(source)
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert source_key(source) != here
    assert not BACKEND.is_compiled(ASKED, config)


@pytest.mark.parametrize(
    ("request_", "text"),
    [(ASKED, "path=tma"), (ASKED, "no configuration"), (conv2d(capability="7.5"), "tile=1x1x1")],
)
def test_what_is_refused_has_nothing_to_compile(stand_in_nvcc, own_cache, background, request_, text):
    stand_in_nvcc("exit 1")
    assert BACKEND.is_compiled(request_, KernelConfig(text))


def test_where_nothing_can_be_compiled_nothing_is_begun(stand_in_nvcc, own_cache, background, monkeypatch):
    """A kernel that was not compiled ahead is refused, and no other takes its place."""
    stand_in_nvcc(COPY, archs="sm_90")
    assert BACKEND.is_compiled(ASKED, KernelConfig("path=mma;tile=128x128x64;warp=64x64x64;instruction=8x8x16;stages=2"))

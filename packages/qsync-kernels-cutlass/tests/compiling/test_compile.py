"""Compiling, with a shell script in place of nvcc: what reaches the cache, what runs at once, and how failures are reported."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qsync_core.errors import BackendError
from qsync_core.progress import silent
from qsync_kernels_cutlass.compiling import compile as compiling
from qsync_kernels_cutlass.compiling.cache import KernelCache
from qsync_kernels_cutlass.compiling.compile import cache_key, compile_files, compiled, interrupt, print_progress, source_key
from qsync_kernels_cutlass.sources import KernelSource

COPY = 'cat "$source" > "$out"'
SOURCE = KernelSource("gemm", '#include "abi.h"\nint x;\n', "sm_80")


def compilations(tmp_path):
    log = tmp_path / "compilations"
    return log.read_text().splitlines() if log.exists() else []


def test_a_kernel_is_compiled_once(stand_in_nvcc, own_cache, tmp_path):
    stand_in_nvcc(COPY)
    (first,) = compile_files([SOURCE], progress=silent)
    (second,) = compile_files([SOURCE], progress=silent)
    assert first == second == own_cache / cache_key(SOURCE) / "kernel.so"
    assert first.read_text() == SOURCE.text
    assert len(compilations(tmp_path)) == 1


def test_sources_named_twice_are_compiled_once_and_come_in_order(stand_in_nvcc, own_cache, tmp_path):
    stand_in_nvcc(COPY)
    other = KernelSource("conv", "int y;", "sm_80")
    paths = compile_files([SOURCE, other, SOURCE], 2, progress=silent)
    assert [path.read_text() for path in paths] == [SOURCE.text, other.text, SOURCE.text]
    assert len(compilations(tmp_path)) == 2


@pytest.mark.parametrize(
    "other",
    [
        KernelSource("gemm", '#include "abi.h"\nint y;\n', "sm_80"),
        KernelSource("gemm2", '#include "abi.h"\nint x;\n', "sm_80"),
        KernelSource("gemm", '#include "abi.h"\nint x;\n', "sm_75"),
    ],
)
def test_whatever_the_code_depends_on_is_in_the_key(stand_in_nvcc, other):
    stand_in_nvcc(COPY)
    assert cache_key(other) != cache_key(SOURCE)
    assert cache_key(KernelSource("gemm", '#include "abi.h"\nint x;\n', "sm_80")) == cache_key(SOURCE)


def test_versions_flags_and_templates_are_in_the_key(stand_in_nvcc, tmp_path, monkeypatch):
    stand_in_nvcc(COPY)
    before = cache_key(SOURCE)
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O0"))
    assert cache_key(SOURCE) != before
    monkeypatch.undo()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert cache_key(SOURCE) == before
    version = tmp_path / "cutlass" / "include" / "cutlass" / "version.h"
    version.write_text(version.read_text().replace("PATCH 0", "PATCH 1"))
    assert cache_key(SOURCE) != before
    assert cache_key(SOURCE).startswith(source_key(SOURCE))
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "abi.h").write_text('#include "inner.h"\n')
    (tmp_path / "templates" / "inner.h").write_text("1")
    (tmp_path / "templates" / "other.h").write_text("1")
    monkeypatch.setattr(compiling, "TEMPLATES", tmp_path / "templates")
    before = source_key(SOURCE)
    (tmp_path / "templates" / "other.h").write_text("2")
    assert source_key(SOURCE) == before
    (tmp_path / "templates" / "inner.h").write_text("2")
    assert source_key(SOURCE) != before


def kept(cache):
    """What is in a cache folder, but for the files that locks are held by, which stay."""
    return [name for name in os.listdir(cache) if not name.endswith(".lock")]


def test_a_compiler_that_fails_is_quoted_from_its_first_error(stand_in_nvcc, own_cache):
    stand_in_nvcc("echo a warning; echo 'gemm.cu(3): error: no tile' >&2; exit 2")
    with pytest.raises(BackendError) as raised:
        compile_files([SOURCE], progress=silent)
    assert str(raised.value) == "nvcc could not compile the kernel gemm for sm_80 (exit status 2): gemm.cu(3): error: no tile"
    assert kept(own_cache) == []


@pytest.mark.parametrize("script", ["kill -9 $$", "echo nvcc error: cicc died due to signal 9; exit 9", "exit 137"])
def test_a_compiler_that_was_killed_is_a_matter_of_memory(stand_in_nvcc, own_cache, script):
    stand_in_nvcc(f'echo half > "$out"; {script}')
    with pytest.raises(BackendError, match=r"kernel gemm for sm_80: .* killed.*want of memory; set QSYNC_COMPILE_JOBS"):
        compile_files([SOURCE], progress=silent)
    assert KernelCache().find(cache_key(SOURCE)) is None
    stand_in_nvcc(COPY)
    assert compile_files([SOURCE], progress=silent)[0].read_text() == SOURCE.text


def test_a_compiler_that_succeeds_without_output_has_failed(stand_in_nvcc, own_cache):
    stand_in_nvcc("exit 0")
    with pytest.raises(BackendError, match=r"exit status 0\): it said nothing"):
        compile_files([SOURCE], progress=silent)


def test_the_others_are_kept_when_one_fails(stand_in_nvcc, own_cache):
    stand_in_nvcc(f'grep -q bad "$source" && exit 3; {COPY}')
    bad = KernelSource("bad", "bad", "sm_80")
    with pytest.raises(BackendError, match="kernel bad for sm_80"):
        compile_files([bad, SOURCE], 1, progress=silent)
    assert KernelCache().find(cache_key(SOURCE)).read_text() == SOURCE.text


def test_an_architecture_that_the_compiler_lacks_is_refused_with_those_it_has(stand_in_nvcc, own_cache, tmp_path):
    stand_in_nvcc(COPY)
    with pytest.raises(BackendError, match=r"nvcc 13.0 does not compile for sm_70, only for sm_75, sm_80, sm_90, sm_90a"):
        compile_files([KernelSource("gemm", "int x;", "sm_70")], progress=silent)
    assert compilations(tmp_path) == []


def test_a_library_that_is_not_one_is_a_backend_error(stand_in_nvcc, own_cache):
    stand_in_nvcc(COPY)
    with pytest.raises(BackendError, match=r"kernel\.so cannot be loaded"):
        compiled(SOURCE)


def test_two_processes_compile_a_kernel_once(stand_in_nvcc, own_cache, tmp_path):
    # The second process starts when the first one compiles, which then ends after the second one was seen to wait.
    stand_in_nvcc(f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.02; done; {COPY}")
    program = (
        "import sys; from qsync_kernels_cutlass.compiling.compile import compile_files; from qsync_core.progress import silent;"
        "from qsync_kernels_cutlass.sources import KernelSource;"
        "print(compile_files([KernelSource('gemm', sys.argv[1], 'sm_80')], progress=silent)[0].read_text() == sys.argv[1])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, SOURCE.text], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    while not compilations(tmp_path):
        assert all(process.poll() is None for process in processes)
    (tmp_path / "go").write_text("")
    assert [process.communicate(timeout=60)[0] for process in processes] == ["True\n", "True\n"]
    assert len(compilations(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_ends_its_compilers_and_leaves_nothing(stand_in_nvcc, own_cache, tmp_path, number):
    # nvcc's steps are processes of its own.
    stand_in_nvcc(f"sleep 100 & echo $$ $! > '{tmp_path}/pid'; wait")
    program = (
        # A shell that starts its commands in the background has them ignore interrupts.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from qsync_kernels_cutlass.compiling.compile import compile_files; from qsync_kernels_cutlass.sources import KernelSource;"
        "compile_files([KernelSource(n, 'int x;', 'sm_80') for n in ('one', 'two')], 1)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
    assert process.returncode == -number
    assert len(compilations(tmp_path)) == 1  # the second one never started
    deadline = time.monotonic() + 30
    for pid in (tmp_path / "pid").read_text().split():
        while runs(int(pid)):  # it was killed, and is not our child to wait for
            assert time.monotonic() < deadline
    assert kept(own_cache) == []


def test_compilers_are_ended_for_the_others_of_a_process(stand_in_nvcc, own_cache, tmp_path):
    stand_in_nvcc(f"[ -e '{tmp_path}/quick' ] || {{ touch '{tmp_path}/runs'; sleep 100; }}; {COPY}")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compile_files, [SOURCE], progress=silent)
        while not (tmp_path / "runs").exists():
            assert not waiting.done()
        interrupt()
        with pytest.raises(BackendError, match="interrupted"):
            waiting.result(timeout=60)
    assert kept(own_cache) == []
    (tmp_path / "quick").write_text("")
    interrupt()  # which ends nothing
    (path,) = compile_files([SOURCE], progress=silent)
    assert path.read_text() == SOURCE.text


def test_compilers_do_not_outlive_a_process_that_is_killed(stand_in_nvcc, own_cache, tmp_path):
    """Not even one that compiles in another thread than the main one, which gets the signals."""
    stand_in_nvcc(f"sleep 100 & echo $$ $! > '{tmp_path}/pid'; wait")
    program = (
        "import threading; from qsync_kernels_cutlass.compiling.compile import compile_files;"
        "from qsync_kernels_cutlass.sources import KernelSource;"
        "thread = threading.Thread(target=compile_files, args=([KernelSource('one', 'int x;', 'sm_80')],));"
        "thread.start(); thread.join()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    for pid in (tmp_path / "pid").read_text().split():
        while runs(int(pid)):
            assert time.monotonic() < deadline


def runs(pid):
    """Whether a process exists and has not ended (one that ended and was not waited for is still listed)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_programs_own_handler_of_termination_stays(stand_in_nvcc, own_cache, monkeypatch):
    stand_in_nvcc(COPY)
    before = signal.signal(signal.SIGTERM, handler := lambda number, frame: None)
    try:
        compile_files([SOURCE], progress=silent)
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        compile_files([KernelSource("conv", "int y;", "sm_80")], progress=silent)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_compiler_a_library_from_elsewhere_is_taken(stand_in_nvcc, own_cache, monkeypatch, tmp_path):
    stand_in_nvcc(COPY)
    (path,) = compile_files([SOURCE], progress=silent)
    monkeypatch.setattr(compiling.toolchain, "find_nvcc", lambda: None)
    assert compile_files([SOURCE], progress=silent) == [path]
    with pytest.raises(BackendError, match=r"needs nvcc; install .*; the kernel conv was not compiled ahead either"):
        compile_files([KernelSource("conv", "int y;", "sm_80")], progress=silent)


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_the_number_of_jobs_is_a_number(monkeypatch, jobs):
    monkeypatch.setenv("QSYNC_COMPILE_JOBS", jobs)
    with pytest.raises(BackendError, match=f"QSYNC_COMPILE_JOBS is the number of compilers that run at once, got '{jobs}'"):
        compiling.default_jobs()


def test_jobs_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("QSYNC_COMPILE_JOBS", "3")
    assert compiling.default_jobs() == 3
    monkeypatch.delenv("QSYNC_COMPILE_JOBS")
    assert compiling.default_jobs() >= 1


def test_as_many_compilers_run_at_once_as_asked(stand_in_nvcc, own_cache, tmp_path):
    # Each waits for the other: with one at a time this would never end.
    here = tmp_path / "here"
    here.mkdir()
    wait = f"while [ $(ls '{here}' | wc -l) -lt 2 ]; do sleep 0.02; done"
    stand_in_nvcc(f"touch '{here}/'$(basename \"$source\"); {wait}; {COPY}")
    sources = [KernelSource(name, name, "sm_80") for name in ("one", "two")]
    assert [path.read_text() for path in compile_files(sources, 2, progress=silent)] == ["one", "two"]


def test_every_kernel_is_progress_also_one_that_fails(stand_in_nvcc, own_cache):
    stand_in_nvcc('case "$source" in *bad*) exit 1;; esac; ' + COPY)
    events = []
    with pytest.raises(BackendError, match="kernel bad"):
        compile_files([SOURCE, KernelSource("bad", "int y;", "sm_75")], 1, progress=lambda *event: events.append(event))
    assert [(done, total) for done, total, _ in events] == [(0, 2), (1, 2), (2, 2)]
    assert events[0][2] == "compiling CUTLASS kernels for sm_75, sm_80, once for all runs"
    assert [re.sub(r"\d+", "0", what) for _, _, what in events[1:]] == ["compiled gemm in 0 s", "failed bad in 0 s"]


def test_progress_is_a_line_each_and_one_line_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, expected in (
        (io.StringIO(), "compiling (0 of 2)\ncompiled one (1 of 2)\ncompiled two (2 of 2)\n"),
        (Terminal(), "\r\x1b[Kcompiling (0 of 2)\r\x1b[Kcompiled one (1 of 2)\r\x1b[Kcompiled two (2 of 2)\n"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        for done, what in enumerate(("compiling", "compiled one", "compiled two")):
            print_progress(done, 2, what)
        assert stream.getvalue() == expected


def test_kernels_that_are_compiled_one_by_one_are_counted_together(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    tally = compiling.Tally()
    for done, what in [(0, "compiling"), (0, "compiling"), (0, "compiling"), (1, "compiled a"), (1, "failed b"), (1, "compiled c")]:
        tally.update(done, 1, what)
    assert stream.getvalue() == "compiling (0 of 1)\nfailed b (2 of 3)\ncompiled c (3 of 3)\n"


def test_progress_comes_from_one_thread_at_a_time(stand_in_nvcc, own_cache):
    stand_in_nvcc(COPY)
    inside, most, counts = [], [], []

    def progress(done, total, what):
        inside.append(what)
        most.append(len(inside))
        time.sleep(0.01)
        counts.append(done)
        inside.remove(what)

    compile_files([KernelSource(name, name, "sm_80") for name in ("one", "two", "three")], 3, progress=progress)
    assert max(most) == 1
    assert counts == [0, 1, 2, 3]

"""Compiling kernels with nvcc, several at once, through the cache."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from qsync_core.errors import BackendError
from qsync_core.progress import ProgressCallback
from qsync_kernels_cutlass.compiling import toolchain
from qsync_kernels_cutlass.compiling.cache import KernelCache
from qsync_kernels_cutlass.compiling.library import Library
from qsync_kernels_cutlass.sources import KernelSource

TEMPLATES = Path(__file__).parents[1] / "templates"
EXPORTS = TEMPLATES / "exports.map"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-shared",
    "-cudart=static",
    "-Xcompiler=-fPIC",
    "-Xcompiler=-fvisibility=hidden",
    "--expt-relaxed-constexpr",
    "-diag-suppress=20012,177",
)
"""The same for every kernel.  The CUDA runtime is linked into each library, so that none depends on the one that torch brings."""

_GUARDED = """\
exec 3<&0
nice -n 10 "$@" </dev/null 3<&- &
compiler=$!
{ read -r _ <&3; kill -KILL 0; } &
guard=$!
wait $compiler
status=$?
kill $guard
exit $status
"""
"""Runs a command and kills it with all that it started when standard input, a pipe from this process, ends: however this process
ends, no compiler outlives it.  Its own session keeps Ctrl-C from it, so that errors of ended compilers are not printed.  It gives
way to whatever else wants the cores: a training step, or the clock of a tuning."""

_ERROR_CHARACTERS = 2000
_AWAKE_S = 0.05
"""How long a signal may wait."""
_LINE_EVERY_S = 10.0
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def print_progress(done: int, total: int, what: str, /) -> None:
    """Write one line to standard error that counts where that is a terminal; elsewhere a line for each event."""
    line = f"{what} ({done} of {total})"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


class Tally:
    """Progress of kernels that are compiled one by one, by several threads: one count of all that this process has asked for.

    Where standard error is no terminal it is a line at the first kernel, at one that fails, at the last, and every ten seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done, self._total, self._printed = 0, 0, float("-inf")

    def update(self, done: int, total: int, what: str, /) -> None:
        """A :data:`ProgressCallback` for the kernels of one call, which begins with nothing done."""
        with self._lock:
            if done:
                self._done += 1
            else:
                self._total += total
            now, is_last = time.monotonic(), self._done == self._total
            if sys.stderr.isatty() or is_last or what.startswith("failed") or now - self._printed >= _LINE_EVERY_S:
                self._printed = now
                print_progress(self._done, self._total, what)


TALLY = Tally()
_running: set[threading.Event] = set()
"""One for each call that compiles: set, its compilers are ended."""
_running_lock = threading.Lock()


def interrupt() -> None:
    """End all compilers of this process; calls that wait for them raise a BackendError."""
    with _running_lock:
        for stopped in _running:
            stopped.set()


def compiled(source: KernelSource) -> Library:
    """The loaded library of a source, from the user's cache or compiled now.

    Raises:
        BackendError: when there is no compiler or no CUTLASS, the compiler fails, the cache cannot be used, or the library cannot
            be loaded.
    """
    (path,) = compile_files([source], progress=TALLY.update)
    return Library(path, source)


def compile_files(
    sources: Sequence[KernelSource], jobs: int | None = None, *, progress: ProgressCallback = print_progress
) -> list[Path]:
    """The libraries of several sources in the user's cache, in their order, without loading them.

    What is not in the cache is compiled, ``jobs`` at a time.  This needs neither a GPU nor a driver.

    Args:
        sources: what to compile.
        jobs: compilers that run at once; None takes ``$QSYNC_COMPILE_JOBS``, else one per CPU that this process may use.
        progress: receives the number of kernels that are finished, compiled or failed; one thread calls it at a time.

    Raises:
        BackendError: as :func:`compiled`, for the first source that fails; the others are finished and kept.
    """
    cache = KernelCache()
    uncompilable = {arch: toolchain.uncompilable_reason(arch) for arch in {source.arch for source in sources}}
    ready = {source: _compiled_ahead(cache, source, reason) for source in sources if (reason := uncompilable[source.arch])}
    keys = {source: cache_key(source) for source in sources if source not in ready}
    missing = {key: source for source, key in keys.items() if cache.find(key) is None}
    if missing:
        _compile_missing(missing, jobs or default_jobs(), progress, cache)
    return [ready[source] if source in ready else _found(cache, keys[source], source) for source in sources]


def must_compile(source: KernelSource) -> bool:
    """Whether :func:`compiled` would run the compiler: there is one for the chip, and the library is not in the user's cache.

    Raises:
        BackendError: when the cache cannot be used.
    """
    return toolchain.uncompilable_reason(source.arch) is None and KernelCache().find(cache_key(source)) is None


def _compiled_ahead(cache: KernelCache, source: KernelSource, reason: str) -> Path:
    """A library that was compiled elsewhere from the same source, by whatever version of the compiler."""
    path = cache.find_any(source_key(source) + "-")
    if path is None:
        raise BackendError(f"{reason}; the kernel {source.name} was not compiled ahead either (cache {cache.folder})")
    return path


def default_jobs() -> int:
    """``$QSYNC_COMPILE_JOBS``, else one per CPU that this process may use."""
    named = os.environ.get("QSYNC_COMPILE_JOBS", "")
    if named:
        if not named.isdigit() or int(named) < 1:
            raise BackendError(f"QSYNC_COMPILE_JOBS is the number of compilers that run at once, got {named!r}")
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_key(source: KernelSource) -> str:
    """The :func:`source_key` and a digest of the CUTLASS and nvcc versions.

    Raises:
        BackendError: when there is no compiler or no CUTLASS.
    """
    return f"{source_key(source)}-{_digest(_versions(*toolchain.required()))[:16]}"


def source_key(source: KernelSource) -> str:
    """``<arch>-<digest>`` of what a library is made of: text, templates that it includes, compiler's flags, the host's processor.

    Not the driver: a library holds machine code for its chip, and nothing for a driver to translate.
    """
    made_of = (source.name, source.text, "flags", *FLAGS, EXPORTS.read_text(), *included_templates(source.text), platform.machine())
    return f"{source.arch}-{_digest(*made_of)[:32]}"


def included_templates(text: str) -> tuple[str, ...]:
    """``name digest`` of every template that a text includes, directly or through another, in order of the names."""
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name not in found and (TEMPLATES / name).is_file():
                content = (TEMPLATES / name).read_text()
                found[name] = _digest(content)
                waiting.append(content)
    return tuple(f"{name} {found[name]}" for name in sorted(found))


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def command(source: KernelSource, nvcc: Path, include: Path, text_file: Path, output: Path) -> list[str]:
    """The compiler's command line."""
    number = source.arch.removeprefix("sm_")
    return [
        str(nvcc),
        *FLAGS,
        f"-gencode=arch=compute_{number},code=sm_{number}",
        f"-Xlinker=--version-script={EXPORTS}",
        f"-I{TEMPLATES}",
        f"-I{include}",
        f"-I{include.parent / 'tools' / 'util' / 'include'}",
        "-o",
        str(output),
        str(text_file),
    ]


def _versions(nvcc: Path, include: Path) -> str:
    return f"cutlass {toolchain.headers_version(include)}; nvcc {toolchain.nvcc_build(nvcc)}"


def _found(cache: KernelCache, key: str, source: KernelSource) -> Path:
    path = cache.find(key)
    if path is None:
        raise BackendError(f"the kernel {source.name} vanished from the cache {cache.folder} after it was compiled; try again")
    return path


def _compile_missing(missing: dict[str, KernelSource], jobs: int, progress: ProgressCallback, cache: KernelCache) -> None:
    stopped = threading.Event()
    counting, count = threading.Lock(), itertools.count(1)
    archs = ", ".join(sorted({source.arch for source in missing.values()}))
    progress(0, len(missing), f"compiling CUTLASS kernels for {archs}, once for all runs")

    def make(item: tuple[str, KernelSource]) -> BackendError | None:
        key, source = item
        started, failed = time.monotonic(), None
        try:
            compile_unless_kept(source, key, cache, stopped)
        except BackendError as error:
            failed = error
        with counting:
            seconds = time.monotonic() - started
            how = "interrupted" if stopped.is_set() else "failed" if failed else "compiled"
            progress(next(count), len(missing), f"{how} {source.name} in {seconds:.0f} s")
        return failed

    with interruptible(stopped), _termination_raised(), ThreadPoolExecutor(max_workers=min(jobs, len(missing))) as pool:
        futures: list[Future[BackendError | None]] = []
        done: list[Future[BackendError | None]] = []
        try:
            for item in missing.items():
                futures.append(pool.submit(make, item))
                futures[-1].add_done_callback(done.append)
            # A signal that the kernel hands to another thread does not wake this one from a wait without end.
            while len(done) < len(futures):
                time.sleep(_AWAKE_S)
            errors = [future.result() for future in futures]
        except BaseException:  # Ctrl-C, SIGTERM: compilers that run are ended, those that wait do not start
            stopped.set()
            for future in futures:
                future.cancel()
            raise
    for error in errors:
        if error is not None:
            raise error


def compile_unless_kept(source: KernelSource, key: str, cache: KernelCache, stopped: threading.Event) -> bool:
    """Compile a source into the cache; False where its library is there already, or another process has just made it.

    Raises:
        BackendError: when the compiler fails or is interrupted.
    """
    with cache.locked(key, stopped):
        if cache.find(key) is not None or stopped.is_set():
            return False
        _compile_one(source, key, cache, stopped)
        return True


@contextlib.contextmanager
def interruptible(stopped: threading.Event) -> Iterator[None]:
    """Have :func:`interrupt` set an event."""
    with _running_lock:
        _running.add(stopped)
    try:
        yield
    finally:
        with _running_lock:
            _running.discard(stopped)


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _termination_raised() -> Iterator[None]:
    """SIGTERM ends the process inside this only after compilers, which run in sessions of their own, were ended and cleaned up.

    Only in the main thread, where Python handles signals, and where the program has no handler of its own.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is not interrupted by a second one
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _compile_one(source: KernelSource, key: str, cache: KernelCache, stopped: threading.Event) -> None:
    nvcc, include = toolchain.required()
    with cache.workplace() as place:
        text_file, output = place / f"{source.name}.cu", place / "kernel.so"
        text_file.write_text(source.text)
        line = command(source, nvcc, include, text_file, output)
        status, said = _run(line, place, stopped)
        if status != 0 or not output.is_file():
            raise BackendError(_failure(source, status, said))
        facts = {
            "name": source.name,
            "arch": source.arch,
            "symbols": [source.symbol, source.workspace_symbol],
            "flags": [part for part in line[1:-3] if not part.startswith(("-I", "-Xlinker"))],
            "versions": _versions(nvcc, include),
            "source_sha256": hashlib.sha256(source.text.encode()).hexdigest(),
            "templates": list(included_templates(source.text)),
        }
        cache.add(key, output, facts)


def _run(line: list[str], place: Path, stopped: threading.Event) -> tuple[int, str]:
    """Exit status and output of a command that ends, with all its children, when ``stopped`` is set or this process ends."""
    environment = os.environ | {"TMPDIR": str(place)}
    guarded = ["/bin/sh", "-c", _GUARDED, "sh", *line]
    with contextlib.ExitStack() as opened, open(place / "log", "w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        except OSError as error:
            raise BackendError(f"{line[0]} cannot be started: {error.strerror}") from None
        assert process.stdin is not None
        opened.enter_context(process.stdin)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=0.2)
                    break
                if stopped.is_set():
                    raise BackendError("compiling was interrupted")
        finally:
            if process.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return status, log.read()


def _failure(source: KernelSource, status: int, said: str) -> str:
    what = f"nvcc could not compile the kernel {source.name} for {source.arch}"
    if status < 0 or "died due to signal" in said or status in (137, 139):
        ended = f"it was killed by signal {-status}" if status < 0 else "one of its steps was killed"
        return f"{what}: {ended}, usually for want of memory; set QSYNC_COMPILE_JOBS to a smaller number and try again"
    lines = said.splitlines()
    first = next((number for number, text in enumerate(lines) if "error" in text.lower()), 0)
    shown = "\n".join(lines[first:])[:_ERROR_CHARACTERS]
    return f"{what} (exit status {status}): {shown or 'it said nothing'}"

"""Python processes that have imported torch and QSync already: forked from a server that did it once.

They are processes of their own, with an exit status, output and environment of their own, and can be killed; what an interpreter
does before its first line and after its last is not in them.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from processes import Ended

PRELOADED = [
    "torch.distributed", "torch.nn.parallel", "torch._dynamo", "qsync_torch.apply.apply", "qsync_torch.prepare.planning",
    "qsync_core.cli.root", "qsync_planner.reporting.report", "torch.export._trace",
]  # fmt: skip
"""What takes a rank longest to import.  None of it starts a thread, which a fork would lose."""

TORCHRUN = str(Path(__file__).with_name("forking_agent.py"))
"""What stands for ``-m torch.distributed.run`` where ranks are to be forks as well."""

SELDOM = (50_000, 10, 10)
"""How many new objects Python's garbage collector waits for, by generation, as in the root's ``conftest.py``."""

SERVED = multiprocessing.get_context("forkserver")
"""Starts what :mod:`multiprocessing` starts, in forks of the server too."""
SERVED.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Have these modules imported as well, where they are installed; before the first process."""
    SERVED.set_forkserver_preload([*PRELOADED, *modules])


def run_forked(
    arguments: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, cwd: Path, timeout_s: float
) -> list[Ended]:
    """:func:`processes.run_together` of ``python`` with each of these arguments.

    Raises:
        AssertionError: with what every process printed, where one has not ended in time; those that are left are killed.
    """
    processes = [
        Forked(own, env=variables, cwd=cwd, stderr=subprocess.STDOUT)
        for own, variables in zip(arguments, environments, strict=True)
    ]
    end, late = time.monotonic() + timeout_s, []
    for rank, process in enumerate(processes):
        if process.wait(max(0.0, end - time.monotonic())) is None:
            late.append(rank)
    for process in processes:
        process.kill()
    outputs = [process.communicate(0.0)[0] for process in processes]
    if late:
        said = "\n".join(f"-- process {rank}: {output}" for rank, output in enumerate(outputs))
        raise AssertionError(f"processes {late} of {len(processes)} have not ended within {timeout_s} s\n{said}")
    return [Ended(process.returncode or 0, output) for process, output in zip(processes, outputs, strict=True)]


class Forked:
    """``subprocess.Popen([sys.executable, *arguments], env=env, cwd=cwd, stdout=PIPE, stderr=PIPE, text=True)``, started sooner.

    Args:
        arguments: a script, ``-m`` and a module, or ``-c`` and code; then what is in ``sys.argv`` after it.
        env: the whole environment; that of this process by default.
        cwd: the folder it runs in; this process's by default.
        stderr: ``subprocess.STDOUT`` to have one output; by default the two are apart.
        output: a file to which all that it prints is appended.
        first: what the process does before anything else; it is pickled.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stderr: int | None = None,
        output: Path | None = None,
        first: Callable[[], object] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("out", "out" if stderr == subprocess.STDOUT else "err")]
        if output:
            self._files = [output, output]
        for file in self._files:
            file.touch()
        settings = dict(os.environ if env is None else env), str(cwd or Path.cwd()), *map(str, self._files)
        self._process = SERVED.Process(target=_run, args=([str(argument) for argument in arguments], *settings, first))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return :attr:`returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; return its status, None where the time is over first."""
        self._process.join(timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.wait(timeout) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        out, err = (file.read_text(errors="replace") for file in self._files)
        return out, err

    def kill(self) -> None:
        """End it by SIGKILL, where it still runs."""
        self._process.kill()
        self._process.join()


def _run(arguments: list[str], env: dict[str, str], cwd: str, out: str, err: str, first: Callable[[], object] | None) -> None:
    """Become what ``python arguments`` is; end as an interpreter ends, but without destructors."""
    if first:
        first()
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    status = become(arguments, env, cwd)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(arguments: Sequence[str], env: Mapping[str, str], cwd: str) -> int:
    """Do in this process, which is a fork, what ``python arguments`` does; its exit status."""
    gc.freeze()  # what the server has imported stays to the end; profiling would look through all of it many times
    gc.set_threshold(*SELDOM)
    multiprocessing.set_start_method(None, force=True)  # what the process starts, it starts as Python does by default
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in sys.path]
    status = 0
    try:
        _main(list(arguments))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _main(arguments: list[str]) -> None:
    first = arguments[0]
    if first.startswith("-m") and first != "-m":
        arguments = ["-m", first.removeprefix("-m"), *arguments[1:]]
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *_]:
            sys.argv = arguments
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")

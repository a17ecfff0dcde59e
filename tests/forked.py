"""Python processes that have imported torch and QSync already: forked from a server that did it once.

They are processes of their own, with an exit status, output and environment of their own, and can be killed; only what a process does
between its start and its first line is not tested by them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = ["torch.distributed", "torch.nn.parallel", "torch._dynamo", "qsync_torch.apply.apply", "qsync_core.cli.root"]
"""What takes a rank longest to import.  None of it starts a thread, which a fork would lose."""

_SERVED = multiprocessing.get_context("forkserver")
_SERVED.set_forkserver_preload(PRELOADED)


class Forked:
    """``subprocess.Popen([sys.executable, *arguments], env=env, cwd=cwd, stdout=PIPE, stderr=PIPE, text=True)``, started sooner.

    Args:
        arguments: a script, ``-m`` and a module, or ``-c`` and code; then what is in ``sys.argv`` after it.
        env: the whole environment; that of this process by default.
        cwd: the folder it runs in; this process's by default.
        stderr: ``subprocess.STDOUT`` to have one output; by default the two are apart.
    """

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, stderr: int | None = None
    ) -> None:
        self._files = [tempfile.NamedTemporaryFile("r", errors="replace") for _ in range(2)]
        out, err = (file.name for file in self._files)
        settings = (
            dict(os.environ if env is None else env),
            str(cwd or Path.cwd()),
            out,
            out if stderr == subprocess.STDOUT else err,
        )
        self._process = _SERVED.Process(target=_run, args=([str(argument) for argument in arguments], *settings))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; return standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        out, err = (Path(file.name).read_text(errors="replace") for file in self._files)
        return out, err

    def kill(self) -> None:
        """End it by SIGKILL, where it still runs."""
        self._process.kill()
        self._process.join()


def _run(arguments: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """Become what ``python arguments`` is; end as an interpreter ends, but without destructors."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    status = 0
    try:
        _main(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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

"""A training script, run up to the line at which it says what it trains (docs/your-script.md)."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import attrs
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from qsync_core.errors import JobError, QSyncError
from qsync_torch.caller import Caller
from qsync_torch.capturing.script_text import ScriptText
from qsync_torch.capturing.sources import may_have_line
from qsync_torch.distributed.meeting import store_of_environment
from qsync_torch.distributed.process_group import backend_without_nccl, in_process_group
from qsync_torch.distributed.ranks import is_of_lost_rank
from qsync_torch.job import Job

LINE = "qsync.hybrid(model, optimizer, loss_fn, loader)"
"""The line, as messages show it."""
_TORCHRUN = "torchrun, as in 'torchrun --nproc-per-node 2 -m qsync prepare train.py'"
_VARIABLE = "QSYNC_PREPARING"
"""Set to the process's number while a script runs, so that processes which the script starts know."""


class LineReached(BaseException):
    """Ends a script at its line.  Not an ``Exception``: a script that goes on after errors is to end all the same."""


class TrainingBegun(BaseException):
    """Ends a script that trains without its line."""


@attrs.define
class _Handover:
    """Where the script that runs now leaves its job."""

    script: Path
    job: Job | None = None
    caller: Caller | None = None
    main: ModuleType | None = None
    says_compiled: bool = False
    backend: str = ""


@attrs.frozen
class Said:
    """What a script says.

    Attributes:
        job: what it trains.
        caller: what it calls to say so.
        backend: of its process group, where that has no NCCL, so that measurements are to have none either; else empty.
    """

    job: Job
    caller: Caller
    backend: str = ""


_running: _Handover | None = None


def is_wanted() -> bool:
    """Whether :func:`job_of_script` runs this script, so that the line is to hand its job over.

    Raises:
        JobError: in a process that such a script has started, which is none of the job's ranks.
    """
    starter = os.environ.get(_VARIABLE)
    if starter is None or (_running is not None and starter == str(os.getpid())):
        return _running is not None
    raise JobError(
        f"{LINE} was reached in a process that the script started by itself; start its ranks with {_TORCHRUN}, instead of "
        "torch.multiprocessing.spawn"
    )


def hand_over(job: Job, caller: Caller, *, says_compiled: bool = False) -> NoReturn:
    """Give the script's job, and the line that says it, to the one that runs the script, and end the script here.

    ``says_compiled``: the line says whether the model is compiled; else the script's text does.
    """
    assert _running is not None
    _running.job, _running.caller, _running.says_compiled = job, caller, says_compiled
    _running.main = sys.modules["__main__"]
    _running.backend = backend_without_nccl()
    raise LineReached(f"{_running.script} has said what it trains")


def job_of_script(path: str | Path, arguments: Sequence[str] = ()) -> Said:
    """The job that a training script trains, what it calls to say so, and by what its ranks communicate.

    The script runs as ``python path arguments`` does, up to its line.  What stands before the line runs whole, ``finally`` blocks
    too; what it prints goes to standard error.  A script without the line is not trained to its end: where its source shows that it
    has none it does not run, else its first optimizer step ends it.
    PyTorch's settings (TF32, ``cudnn.benchmark``, threads, the current device) stay as the script leaves them, because training has
    them so, its folder stays on ``sys.path``, and a script that came to its line stays ``__main__``: PyTorch's compiler, pickles
    and a loader's processes look there for what the script defines.  The command line and the working directory are put back.

    Under torchrun every rank runs its script, which may call ``init_process_group``: so there may be no group yet, and none is left
    afterwards.  :func:`qsync_torch.distributed.ranks.process_group_from_environment` then makes one that does not meet the keys of
    the script's.

    Raises:
        JobError: when there is no such file; it has no line, or trains, ends, fails or exits before it, with the place; or what it
            passes there makes no job.
    """
    global _running
    path = Path(path)
    if not path.is_file():
        raise JobError(f"there is no file {str(path)!r}")
    if in_process_group():
        raise JobError(f"there is a process group already, so {path} cannot make its own; run the script first")
    if not may_have_line(path):
        raise JobError(
            f"{path} does not say what it trains, nor does a module that it imports: add the line {LINE} before its training loop "
            "(docs/your-script.md)"
        )
    store_of_environment()  # outlives the script's process group, so that another can be made in its place
    _running = handover = _Handover(path)
    try:
        with _as_main(path, arguments), contextlib.redirect_stdout(sys.stderr), _no_training(path):
            _run(path, handover)
    finally:
        _running = None
        _leave_process_group()
    if handover.job is None or handover.caller is None or handover.main is None:
        raise JobError(
            f"{path} ended without saying what it trains: add the line {LINE} before its training loop (docs/your-script.md)"
        )
    sys.modules["__main__"] = handover.main
    job, text, how = handover.job, ScriptText(path), handover.job.compiles
    if how is not None or not handover.says_compiled:
        how = text.compiles or how if handover.says_compiled else how or text.compiles
    job = attrs.evolve(
        job, compiles=how, reads_loss=job.reads_loss or text.reads_loss, communication=job.communication or text.communication
    )
    return Said(job, handover.caller, handover.backend)


def unsaid_autocast(path: str | Path, job: Job) -> str:
    """A sentence on a script that calls autocast, and says nothing of it in its line; empty for others."""
    if job.amp is not None or not ScriptText(path).calls_autocast:
        return ""
    return (
        f"{path} calls autocast, and its line was not reached under it: where the loop trains under autocast, write "
        "qsync.hybrid(..., amp='bfloat16'), or its training is refused under this plan, which is for a loop without it"
    )


def _run(path: Path, handover: _Handover) -> None:
    """Run the script; what ends it after its line is of no interest."""
    try:
        runpy.run_path(str(path.resolve()), run_name="__main__")
    except LineReached:
        pass
    except TrainingBegun as error:
        if handover.job is None:
            raise JobError(
                f"{path} trains without having said what: its first optimizer step came{_place(path, error)}, and no line {LINE} "
                "before it; add the line before the training loop (docs/your-script.md)"
            ) from error
    except SystemExit as error:
        if handover.job is None:
            code = 0 if error.code is None else error.code
            advice = "; the script's own arguments stand behind --" if code == 2 else ""
            raise JobError(
                f"{path} ended with exit status {code!r}{_place(path, error)}, before it reached {LINE}{advice}"
            ) from error
    except QSyncError:
        if handover.job is None:
            raise
    except Exception as error:
        if handover.job is None and is_of_lost_rank(error):
            raise JobError(
                f"{path} waited{_place(path, error)} for a rank that has left, at its line or by an error of its own; every rank "
                f"is to come to {LINE} ({_sentence(error).partition('. ')[0]})"
            ) from error
        if handover.job is None:
            alone = "rendezvous" in str(error) and "RANK" not in os.environ
            advice = f"; start its ranks with {_TORCHRUN}" if alone else ""
            failed = f"{path} failed{_place(path, error)}, before it reached {LINE}"
            raise JobError(f"{failed}: {_sentence(error)}{advice}") from error


@contextlib.contextmanager
def _no_training(path: Path) -> Iterator[None]:
    """A block in which the first step of any optimizer ends the script."""
    process = os.getpid()

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        where = f"{type(optimizer).__name__}.step() in {path}"
        if os.getpid() != process:  # one that the script has forked, whose error it passes on
            raise JobError(f"{where} was reached before {LINE}")
        raise TrainingBegun(where)

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _leave_process_group() -> None:
    """End what the script left: a process that ends with a group, or with a wrapper that outlives one, can abort."""
    if in_process_group():
        gc.collect()  # wrappers are in cycles
        dist.destroy_process_group()


@contextlib.contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """The process as it is under ``python path arguments``; runpy sees to ``__main__`` and ``sys.argv[0]``."""
    folder, command_line, before = str(path.resolve().parent), sys.argv, Path.cwd()
    sys.argv = [str(path), *arguments]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    os.environ[_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        os.chdir(before)
        sys.argv = command_line


def _place(path: Path, error: BaseException) -> str:
    """Where in the script an error comes from, or in what lies beside it."""
    folder = path.resolve().parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    frames = [frame for frame in frames if folder in Path(frame.filename).resolve().parents]
    return f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""


def _sentence(error: BaseException) -> str:
    """An error's type and text; of one that brings another process's traceback, the last line of that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"

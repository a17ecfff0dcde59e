"""The extension in C++ that runs recorded programs: compiled once for a machine and a version of PyTorch.

Nothing needs it: without it Python runs the same calls.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.utils import cpp_extension

from qsync_core.artifacts.own_folder import make_own, why_untrusted
from qsync_core.errors import BackendError
from qsync_core.tuning.store import default_store_path

REPLAY_VARIABLE = "QSYNC_REPLAY"
"""Environment variable: ``background``, as without it, replays calls on GPUs, and compiles the extension beside training if it is
missing; 1 waits for the compiler, and replays calls on CPUs too; 0 runs all calls in Python (docs/decisions/replays.md)."""
_SOURCE = Path(__file__).with_name("replay.cpp")
_MODULE, _BACKGROUND, _PARTIAL = "qsync_replay", "background", "partial-"
_GOODBYE_S = 10.0
"""How long a process that ends waits for the thread whose compiler it has ended."""
_LOG = logging.getLogger("qsync_torch.replaying")
_loaded: Any = None
_asked: set[str] = set()
"""Types of devices for which it was wanted."""
_lock = threading.Lock()
_compiler: subprocess.Popen[str] | None = None
"""That runs."""
_ends = False
"""Whether the process does."""


def loaded() -> Any:
    """The extension, if it is there."""
    return _loaded


def want(device: torch.device, *, wait: bool = False) -> Any:
    """The extension where it is there; it is made where calls on this device are replayed.

    Args:
        device: where they run.
        wait: for the compiler, as before steps that are measured: calls cost what they cost from the second training on.

    Raises:
        BackendError: where ``QSYNC_REPLAY`` is 1 and the extension cannot be had, or is none of its values.
    """
    if _loaded is None and (wait or device.type not in _asked):
        _asked.add(device.type)
        _make(device, wait)
    return _loaded


def _make(device: torch.device, wait: bool) -> None:
    said = os.environ.get(REPLAY_VARIABLE) or _BACKGROUND
    if said not in ("0", "1", _BACKGROUND):
        raise BackendError(
            f"{REPLAY_VARIABLE} is 1 (wait for the compiler), {_BACKGROUND} or 0 (run all calls in Python), got {said!r}"
        )
    if said == "1":
        _load()
    elif said == _BACKGROUND and device.type == "cuda":
        if wait:
            _load_quietly()
        else:
            thread = threading.Thread(target=_load_quietly, name="qsync compiles replays", daemon=True)
            thread.start()
            atexit.register(_end, thread, os.getpid())


def _end(thread: threading.Thread, process: int) -> None:
    """A process that ends leaves no compiler behind, and nothing half written."""
    global _ends
    _ends = True
    if _compiler is not None and os.getpid() == process:  # and not a fork of it
        os.killpg(_compiler.pid, signal.SIGKILL)
        thread.join(_GOODBYE_S)


def _load_quietly() -> None:
    try:
        _load()
    except BackendError as error:
        if not _ends:
            _LOG.warning("%s; 8-bit calls run in Python, which is slower", error)


def _load() -> None:
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _import(_compiled())


def _import(path: Path) -> Any:
    try:
        spec = importlib.util.spec_from_file_location(_MODULE, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BackendError(f"{path} cannot be loaded: {error}; delete it") from None
    return module


def _compiled() -> Path:
    """The extension's file, which one process of a machine compiles if it is missing."""
    facts = (_SOURCE.read_text(), torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), platform.platform())
    folder = default_store_path().parent / "replays" / hashlib.sha256("|".join(map(str, facts)).encode()).hexdigest()[:24]
    try:
        folder = make_own(folder)
        if problem := why_untrusted(folder):
            raise BackendError(
                f"{folder}, where the extension is kept, {problem}, so code in it cannot be trusted; make that folder yours alone "
                "(chmod 700), or set QSYNC_TUNING to a file below your home"
            )
        path = folder / f"{_MODULE}.so"
        with FileLock(folder / "lock"):
            if not path.exists():
                _compile(path)
    except OSError as error:
        raise BackendError(f"the extension cannot be stored in {folder} ({error.strerror}): set QSYNC_TUNING") from None
    return path


def _compile(path: Path) -> None:
    """Run the C++ compiler.

    Raises:
        BackendError: with what it said.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise BackendError(f"no C++ compiler compiles {_SOURCE.name}: install g++, or name one in CXX")
    include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()
    for left in path.parent.glob(f"{_PARTIAL}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-w", f"-DQSYNC_MODULE={_MODULE}"]
        command += [*(f"-I{where}" for where in include), str(_SOURCE), *(f"-L{where}" for where in libraries)]
        command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(made)]
        status, said = _run(command)
        if status:
            raise BackendError(f"{compiler} does not compile {_SOURCE.name}: {said.strip()[:2000]}")
        made.replace(path)


def _run(command: list[str]) -> tuple[int, str]:
    """Status of a command that :func:`_end` can end with all that it has started, and what it printed."""
    global _compiler
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True) as _compiler:
        try:
            said, _ = _compiler.communicate()
        except BaseException:  # Ctrl-C, which does not reach another session
            os.killpg(_compiler.pid, signal.SIGKILL)
            raise
        status = _compiler.returncode
    _compiler = None
    return status, said

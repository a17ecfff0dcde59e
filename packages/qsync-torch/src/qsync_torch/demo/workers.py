"""The demo's two workers: how the parent runs them under torchrun, and what each of them does.

A worker is ``python -m qsync_torch.demo.workers KIND TASK.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from qsync_core.errors import QSyncError
from qsync_core.progress import ProgressCallback
from qsync_torch.demo.cores import WORKERS, die_with_parent, pin_to_core
from qsync_torch.demo.messages import GROUPS, MeasureTask, Rendezvous, TrainTask, parse, read_json, report_error, write_json
from qsync_torch.distributed.watch import watched

_LOG_LINES_SHOWN = 12


def run_workers(kind: str, task: Any, folder: Path, progress: ProgressCallback) -> None:
    """Give both workers a task and wait for them; what they print goes to ``<kind>.log`` in ``folder``.

    Raises:
        QSyncError: with the workers' own sentence where they gave one, else the end of the log.
    """
    path, log_path = folder / f"{kind}-task.json", folder / f"{kind}.log"
    write_json(task, path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={WORKERS}"]
    command = [*torchrun, "-m", "qsync_torch.demo.workers", kind, str(path)]
    process = subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        preexec_fn=die_with_parent,
    )
    errors = []
    try:
        assert process.stdout is not None
        with log_path.open("w", encoding="utf-8") as log:
            for line in process.stdout:
                event = parse(line)
                if isinstance(event, dict):
                    errors.append(event["error"])
                elif event is not None:
                    progress(*event)
                else:
                    log.write(line)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    if errors:
        raise QSyncError(errors[0])
    if status:
        tail = "".join(log_path.read_text(encoding="utf-8").splitlines(keepends=True)[-_LOG_LINES_SHOWN:])
        raise QSyncError(f"the demo's workers failed while they should {kind} (whole log: {log_path}):\n{tail}")


def _environment() -> dict[str, str]:
    """Give workers one thread each, and gloo on the loopback interface: they are on this machine whatever its name resolves to."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    environment.pop("QSYNC_GROUP", None)
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def main(kind: str, path: str) -> int:
    """Do the task as the worker of this rank; returns the exit status."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    core = pin_to_core(rank)
    os.environ["QSYNC_GROUP"] = GROUPS[rank]
    try:
        rendezvous = Rendezvous()
        with watched(f"the demo's task to {kind}", rendezvous.members):
            if kind == "measure":
                from qsync_torch.demo.measuring import measure

                measure(read_json(Path(path), MeasureTask), rendezvous, core)
            else:
                from qsync_torch.demo.training import train

                train(read_json(Path(path), TrainTask), rendezvous, core)
    except QSyncError as error:
        report_error(str(error))
        return 1
    except Exception as error:
        report_error(f"the {GROUPS[rank]} worker failed while it should {kind}: {type(error).__name__}: {error}; see {kind}.log")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

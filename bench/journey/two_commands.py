"""Row U1: what a user types and edits, from a script that exists to a hybrid run with a report.

The script is one of others' style; its edits are counted by comparing the files.  Both commands run on two CPU workers, as two
machines would, each with its group; each machine types both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from journey.scripts import ALL, IMPORT, Script

ROOT = Path(__file__).parents[2]
GROUPS = ("train", "infer")
PREPARE = ("-m", "qsync", "prepare", "train.py", "-o", "run", "--group", "infer=role:infer")
TRAIN = ("train.py",)


def rows() -> list[dict[str, Any]]:
    """Prepare and train the first script."""
    script = ALL[0]
    added = script.added()
    if any(line.startswith("-") for line in added):
        raise RuntimeError(f"the line replaces lines of {script.name}")
    with tempfile.TemporaryDirectory() as folder:
        seconds, said = _go(script, Path(folder))
    lines = [line for line in added if line != IMPORT]
    return [
        {
            "id": "U1",
            "what": f"commands and edits from an existing script ({script.name}, in torchvision's style) to a hybrid run with a "
            "report, two CPU workers",
            "value": f"2 commands, {len(lines)} line" + (" and its import" if IMPORT in added else ""),
            "unit": "counted",
            "spread": f"the line: {' '.join(lines)}; prepare took {seconds[0]:.0f} s, training {seconds[1]:.0f} s: {said}",
            "target": "2 commands, 1 line",
        }
    ]


def _go(script: Script, folder: Path) -> tuple[tuple[float, float], str]:
    (folder / "train.py").write_text(script.hybrid)
    prepared, _ = both_machines(PREPARE, folder, 29631)
    if not (folder / "run" / "report.html").is_file():
        raise RuntimeError("qsync prepare ended without a report")
    trained, output = both_machines(TRAIN, folder, 29632)
    [*_, last] = [line for line in output.splitlines() if line.strip()]
    return (prepared, trained), last


def both_machines(command: Sequence[str], folder: Path, port: int) -> tuple[float, str]:
    """Type one torchrun command on both; how long it took, and what they printed, the first machine last."""
    packages = os.pathsep.join(map(str, ROOT.glob("packages/*/src")))
    started = time.perf_counter()
    running = []
    for rank, group in enumerate(GROUPS):
        launch = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        environment = {**os.environ, "QSYNC_GROUP": group, "OMP_NUM_THREADS": "1", "PYTHONPATH": packages}
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *launch, *command],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    return time.perf_counter() - started, "\n".join(reversed(outputs))

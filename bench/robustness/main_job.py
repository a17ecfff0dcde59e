"""Rows T3 of ``docs/results/robustness.json``: how long the installed main job takes on slow, busy and ordinary machines.

    python bench/robustness/main_job.py --runs 1

A slow machine is this one with its libraries held to AVX2; a busy one has a process that computes all the time for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import write_rows

TARGET_S = 300
_GIVE_UP_S = 1800
BUSY_PROCESSES = 2
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@attrs.frozen
class Machine:
    """How this machine is made to look: environment variables, and processes that run beside the job."""

    id: str
    what: str
    environment: Mapping[str, str]
    busy_processes: int


MACHINES = (
    Machine("T3-avx2-busy", "held to AVX2, two busy processes beside it", AVX2, BUSY_PROCESSES),
    Machine("T3-native", "no limits", {}, 0),
)


@attrs.frozen
class Run:
    """One run: seconds, exit status, lines of progress in its log, and what it showed."""

    seconds: float
    status: int
    progress_lines: int
    shown: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", choices=[machine.id for machine in MACHINES])
    parser.add_argument("--dry", action="store_true", help="print the rows instead of writing them")
    args = parser.parse_args()
    rows = [row(m, [run(m) for _ in range(args.runs)]) for m in MACHINES if args.only in (None, m.id)]
    if args.dry:
        print(json.dumps(rows, indent=1))
        return
    write_rows("robustness", rows, f"python bench/robustness/main_job.py --runs {args.runs}")


def row(machine: Machine, runs: list[Run]) -> dict[str, Any]:
    """The slowest run's seconds, and beside it every run with what failed."""
    failed = sum(one.status != 0 or one.progress_lines < 5 for one in runs)
    each = "; ".join(
        f"{one.seconds:.0f} s, status {one.status}, {one.progress_lines} lines of progress, {one.shown}" for one in runs
    )
    return {
        "id": machine.id,
        "what": f"the main job (qsync demo) from the installed state, slowest of {len(runs)}: {machine.what}",
        "value": round(max(one.seconds for one in runs), 1),
        "unit": "s",
        "spread": f"{failed} failed; {each}",
        "target": f"≤ {TARGET_S}",
    }


def run(machine: Machine) -> Run:
    """Run the installed command, its output in files as in a log of a batch system."""
    with tempfile.TemporaryDirectory(prefix="qsync-main-job-") as name, busy(machine.busy_processes):
        folder = Path(name)
        command = [sys.executable, "-m", "qsync_core.cli", "demo", "--json", "--out", str(folder / "out")]
        started = time.monotonic()
        with (folder / "out.json").open("w") as out, (folder / "log").open("w") as log:
            environment = {**os.environ, **machine.environment}
            status = subprocess.run(command, stdout=out, stderr=log, env=environment, timeout=_GIVE_UP_S, check=False).returncode
        seconds = time.monotonic() - started
        lines = (folder / "log").read_text().splitlines()
        print(*lines[-3:], f"{machine.id}: {seconds:.0f} s, status {status}", sep="\n", file=sys.stderr)
        shown = _shown(json.loads((folder / "out.json").read_text())) if status == 0 else lines[-1]
        return Run(seconds, status, sum(line.startswith("[") for line in lines), shown)


def _shown(outcome: Mapping[str, Any]) -> str:
    rows = {method["name"]: method for method in outcome["methods"]}
    if outcome["saves_time"]:
        return f"saves time: QSync's step {outcome['qsync_over_full']:.2f} of full precision's"
    mebi = {name: rows[name]["peak_bytes"] / 2**20 for name in ("full", "qsync")}
    return (
        f"saves memory: budget {outcome['budget_bytes'] / 2**20:.1f}, QSync {mebi['qsync']:.1f}, float32 {mebi['full']:.1f} MiB, "
        f"gradient error {rows['qsync']['gradient_error']:.2%} (uniform {rows['uniform']['gradient_error']:.2%})"
    )


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that compute all the time."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()

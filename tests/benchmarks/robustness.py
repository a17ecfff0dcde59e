"""Rows T1 to T6 of ``docs/results/robustness.json``: scripts, machines and faults that were not tried before.

    python tests/benchmarks/robustness.py [--only zoo_runs,kills] [--jobs 16]

Each row has a script of its own, which runs in a process of its own; what none of them is given here is set in that script.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
SCRIPTS = {
    "zoo_runs": ("robustness/zoo_runs.py", "--jobs"),
    "wrong_scripts": ("robustness/wrong_scripts.py", "--jobs"),
    "main_job": ("robustness/main_job.py", ""),
    "kills": ("robustness/kills.py", ""),
    "damaged": ("robustness/damaged.py", "--processes"),
    "indicator": ("indicator_rows.py", "--jobs"),
}
"""By name: the script of T1, T2, and so on, and its option for the number of processes."""


def main() -> None:
    """Run them in turn; one that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="which, comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in SCRIPTS]:
        raise SystemExit(f"no such script: {', '.join(unknown)}; known are {', '.join(SCRIPTS)}")
    failed = []
    for name in names:
        script, jobs = SCRIPTS[name]
        command = [sys.executable, str(BENCHMARKS / script), *([jobs, str(options.jobs)] if jobs else [])]
        command += ["--no-write"] * options.no_write
        print("+", *command[1:], flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

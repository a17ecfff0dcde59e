"""Rows C1 to C11 of ``docs/results/cluster.json``: several GPUs in a group, autocast, shared GPUs, frozen ranks, hostile files.

    python tests/benchmarks/cluster.py [--only communicators,hostile] [--out FOLDER]

Each row has a script of its own, which runs in a process of its own and writes its rows.  Rows that need GPUs are skipped by name
where there are none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from results import RESULTS

SCRIPTS = {
    "communicators": "C1",
    "canary": "C2",
    "autocast_jobs": "C3",
    "scripts": "C4",
    "losses": "C5",
    "silences": "C6",
    "hostile": "C7",
    "autocast_memory": "C8",
    "verdicts": "C9",
    "omega": "C10",
    "mutants": "C11",
}
"""Row by the name of its script in ``cluster/``."""


def main() -> None:
    """Run the scripts in turn; one that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="names of scripts, comma-separated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in SCRIPTS]:
        raise SystemExit(f"no such script: {', '.join(unknown)}; known are {', '.join(SCRIPTS)}")
    failed = []
    for name in names:
        command = [sys.executable, str(Path(__file__).parent / "cluster" / f"{name}.py"), "--out", str(options.out)]
        print("+", SCRIPTS[name], *command[1:], flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Rows T1 to T6 of ``docs/results/robustness.json``: scripts, machines and faults that were not tried before.

    python bench/robustness.py [--only zoo_runs,kills] [--jobs 16]

Each row has a script of its own, which runs in a process of its own; what none of them is given here is set in that script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from in_turn import run_in_turn

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
    """Run them in turn."""

    def command_of(options: argparse.Namespace, name: str) -> Sequence[str]:
        script, jobs = SCRIPTS[name]
        own = [jobs, str(options.jobs)] if jobs else []
        return [str(BENCHMARKS / script), *own, *["--no-write"] * options.no_write]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--no-write", action="store_true", help="only print")
    run_in_turn(parser, SCRIPTS, command_of)


if __name__ == "__main__":
    main()

"""Rows C1 to C11 of ``docs/results/cluster.json``: several GPUs in a group, autocast, shared GPUs, frozen ranks, hostile files.

    python bench/cluster.py [--only communicators,hostile] [--out FOLDER]

Each row has a script of its own, which runs in a process of its own and writes its rows.  Rows that need GPUs are skipped by name
where there are none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from in_turn import run_in_turn
from results import parser_of

SCRIPTS = (
    "communicators", "canary", "autocast_jobs", "scripts", "losses", "silences", "hostile", "autocast_memory", "verdicts", "omega",
    "mutants",
)  # fmt: skip
"""The names of the scripts of C1, C2, and so on, in ``cluster/``."""


def main() -> None:
    """Run the scripts in turn."""

    def command_of(options: argparse.Namespace, name: str) -> Sequence[str]:
        return str(Path(__file__).parent / "cluster" / f"{name}.py"), "--out", str(options.out)

    run_in_turn(parser_of(__doc__), SCRIPTS, command_of)


if __name__ == "__main__":
    main()

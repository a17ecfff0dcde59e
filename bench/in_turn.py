"""The scripts of several rows, run one after the other, each in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

from results import names_in


def run_in_turn(
    parser: argparse.ArgumentParser, names: Iterable[str], command_of: Callable[[argparse.Namespace, str], Sequence[str]]
) -> None:
    """Run those that ``--only`` names, by default all; one that fails does not keep the others from running.

    Args:
        parser: of the other options.
        names: of all scripts, in their order.
        command_of: given the options and a name, the script's path and its arguments.
    """
    known = list(names)
    parser.add_argument("--only", default=",".join(known), help="names of scripts, comma-separated")
    options = parser.parse_args()
    wanted = names_in(options.only, known, "script")
    failed = []
    for name in wanted:
        command = command_of(options, name)
        print("+", *command, flush=True)
        if subprocess.run([sys.executable, *command], check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")

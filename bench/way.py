"""Rows of ``docs/results/way.json``: the way in, from a laptop to a cluster.

    python bench/way.py --only W1 --public FOLDER     a copy of the profiles of eth-easl/sailor (*.csv); no GPU
    python bench/way.py --only W2                     seconds and peaks of `qsync fits` on a CPU; with a GPU, its peaks too
    python bench/way.py --only W3                     a slow rank is named; W3b: what the watch costs; two processes on a CPU
    python bench/way.py --only W4 [--venv FOLDER]     `qsync bench` from wheels alone, on a CPU; the environment is kept in FOLDER
    python bench/way.py --only W5                     from a script of another style to training: commands, edits, warnings
    python bench/way.py --only W6                     the documentation: pages that no link leads to, dead examples, sizes
    python bench/way.py --only W7 --crds FOLDER       manifests against schemas; FOLDER has CustomResourceDefinitions (*.yaml)
    python bench/way.py --only W8                     README's command for the main job in a fresh clone; needs a package index

A row is written as soon as it has a value.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from results import names_in, parser_of, write_rows

COMMAND = "python bench/way.py"
Row = Mapping[str, Any]


def parts(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    """What measures rows, by the name that ``--only`` takes."""
    return {
        "W1": partial(_rows, "fitting.across_chips", "rows", options.public),
        "W2": partial(_rows, "fitting.peaks", "rows"),
        "W3": partial(_rows, "watching.slow_rank", "rows"),
        "W3b": partial(_rows, "watching.slow_rank", "overhead"),
        "W4": partial(_rows, "journey.backends_compared", "rows", options.venv),
        "W5": partial(_rows, "journey.first_hour", "rows"),
        "W6": partial(_rows, "journey.pages", "rows"),
        "W7": partial(_rows, "journey.manifests", "rows", options.crds),
        "W8": partial(_rows, "journey.fresh_machine", "rows"),
    }


def _rows(module: str, name: str, *arguments: Any) -> Iterator[Row]:
    """Import what measures a part when it is wanted, so that one needs nothing of the others."""
    found: Iterator[Row] = getattr(importlib.import_module(module), name)(*arguments)
    return found


def main() -> None:
    """Measure the parts that are asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="parts, comma-separated")
    parser.add_argument("--public", type=Path, default=None, help="folder of the public set's files, for W1")
    parser.add_argument("--venv", type=Path, default=None, help="folder of the environment for W4, made where there is none")
    parser.add_argument("--crds", type=Path, default=None, help="folder of CustomResourceDefinitions, for W7")
    options = parser.parse_args()
    known = parts(options)
    wanted = names_in(options.only, known, "parts") or list(known)
    if "W1" in wanted and options.public is None:
        raise SystemExit(
            "W1 reads eth-easl/sailor's profiles: say where their copy is with --public FOLDER, or leave it out of --only"
        )
    for name in wanted:
        folders = {"W1": " --public FOLDER", "W7": " --crds FOLDER" if options.crds else ""}
        line = f"{COMMAND} --only {name}{folders.get(name, '')}"
        for row in known[name]():
            write_rows("way", [row], line, directory=options.out)
            print(f"{row['id']}: {row['value']} {row['unit']}", flush=True)


if __name__ == "__main__":
    main()

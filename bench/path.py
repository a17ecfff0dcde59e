"""Rows U1 to U7 of ``docs/results/path.json``: the path from a script to a hybrid run, and through the night.

    python bench/path.py [--only prepare,uneven]

Each part is a module of ``journey/`` with ``rows()``, which measures and returns its rows.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from results import write_rows

PARTS = ("prepare_time", "uneven", "kills", "two_commands", "overhead", "compatibility")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, by comma; all by default")
    parts = parser.parse_args().only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for part in parts:
        rows = importlib.import_module(f"journey.{part}").rows()
        for row in rows:
            print(f"{row['id']}: {row['what']}: {row['value']} {row['unit']} ({row['target']})")
        print(f"written to {write_rows('path', rows, f'python bench/path.py --only {part}')}")


if __name__ == "__main__":
    sys.exit(main())

"""S2: how long ``import qsync_core`` takes, with everything that reads and writes artifacts, in fresh interpreters.

Each run starts two interpreters, one that imports and one that does not, and takes the difference; the median of all runs counts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from results import write_rows

_STATEMENTS = {
    "S2": "import qsync_core.artifacts.files, qsync_core.cluster_file",
    "S2b": "import qsync_core.artifacts.files, qsync_core.cluster_file, qsync_core.plugins.registry, qsync_core.cli.root",
}
_WHAT = {
    "S2": "import of core: all types, artifacts, cluster files",
    "S2b": "the same with the plugin registry and the command line",
}


def seconds(statement: str) -> float:
    """Wall time of an interpreter that runs one statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and write ``docs/results/spine.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    rows = []
    for key, statement in _STATEMENTS.items():
        seconds(statement)  # compiles the modules
        costs_ms = sorted(1e3 * (seconds(statement) - seconds("pass")) for _ in range(options.runs))
        value = round(statistics.median(costs_ms), 1)
        quartiles = statistics.quantiles(costs_ms, n=4)
        spread = f"quartiles {quartiles[0]:.1f} to {quartiles[2]:.1f} of {options.runs} runs"
        print(f"{key} {_WHAT[key]}: {value} ms ({spread})")
        row = {"id": key, "what": _WHAT[key], "value": value, "unit": "ms", "spread": spread}
        rows.append(row | {"target": "≤ 100" if key == "S2" else "reported"})
    if not options.no_write:
        write_rows("spine", rows, "python bench/import_core.py")


if __name__ == "__main__":
    main()

"""T2: wrong and unusual training scripts: each must be refused in one sentence, or compute what an independent reference computes.

A script is a small function of :mod:`robustness.wrong`. What it returns is compared: values that the model under a plan gave, and
those of a plain model, run in the same way under :mod:`reference` or, where no plan should be in force, as it is. A script that
ends with an error of QSync is refused; of PyTorch's own errors only those count that the script names. Everything else is a
failure: other numbers without a word are silent, other errors are tracebacks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attrs
import torch

from qsync_core.errors import QSyncError
from results import write_rows
from robustness.wrong import (
    checkpoints,
    copies,
    derivatives,
    other_jobs,
    outputs,
    outside,
    patched,
    two_ranks,
    under_autocast,
    weights,
    wrapped,
)
from robustness.wrong.two import SCRIPTS, Silent, compare_with_either

PARTS = (
    under_autocast, other_jobs, copies, wrapped, patched, checkpoints, outside, derivatives, outputs, weights, two_ranks
)  # fmt: skip
"""Importing them enters their scripts."""


@attrs.frozen
class Outcome:
    """What became of a script: ``right``, ``refused``, ``silent`` or ``failed``."""

    name: str
    status: str
    detail: str = ""


def run(name: str) -> Outcome:
    """One script."""
    torch.set_num_threads(1)
    function, refusals = SCRIPTS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compare_with_either(function)
    except Silent as error:
        return Outcome(name, "silent", str(error))
    except QSyncError as error:
        return Outcome(name, "failed" if "\n" in str(error) else "refused", str(error))
    except refusals as error:
        return Outcome(name, "refused", f"by PyTorch: {str(error).splitlines()[0]}")
    except BaseException:
        return Outcome(name, "failed", traceback.format_exc()[-2000:])
    return Outcome(name, "right")


def rows_of(found: list[Outcome]) -> list[dict[str, Any]]:
    """The row T2."""
    count = Counter(outcome.status for outcome in found)
    spread = f"{len(found)} scripts: {count['refused']} refused in a sentence, {count['right']} right, {count['failed']} failed"
    what = "wrong and unusual scripts: other numbers than an independent reference, without a word"
    return [{"id": "T2", "what": what, "value": count["silent"], "unit": "scripts", "spread": spread, "target": "0"}]


def main() -> None:
    """Run, print, and write the row T2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scripts, comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or list(SCRIPTS)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:  # whose workers may start processes
        found = list(pool.map(run, names))
    for outcome in found:
        print(json.dumps(attrs.asdict(outcome)), file=sys.stderr, flush=True)
    rows = rows_of(found)
    print(json.dumps(rows, indent=2))
    if not options.no_write and not options.only:
        write_rows("robustness", rows, "python bench/robustness/wrong_scripts.py")
    if any(outcome.status in ("silent", "failed") for outcome in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Rows of ``docs/results/today.json``: 8 bit over the base that people train with, bfloat16 autocast under ``torch.compile``.

    python bench/today.py --only P1,P1b [--tune 30] [--contenders "int8|torchao float8"] [--directory docs/results]

A1 to A3 (plans; with OMP_NUM_THREADS=1) and P4 (and P4b, minutes of a CPU) need no GPU.  The others need a CUDA device, P1 and P1b
torchao too; P6 needs nvcc, and no other work on the machine; P8 and P9 two GPUs (``--gpus 0,1``), and the right to start an MPS
daemon.  P7 to P10 keep what they have measured in the folder of ``--save``, from which the same command goes on.  ``--tiny`` tries
all on a CPU, with small models; such rows are printed only.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from allocator import rows_today
from eight_bit import curves, eager, first_step, predicted, products_tuned, scales, steps, unequal
from jobs.measured import Clock
from kernels.bench import Bench, Row
from results import names_in, write_rows

COMMAND = "python bench/today.py"


def parts(bench: Bench, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    """What measures rows, by the name that ``--only`` takes."""
    steps_of = {part: partial(of_steps, bench, part, options) for part in steps.SHAPES}
    plans_of = {part: partial(rows_today.rows, part, quick=options.tiny) for part in rows_today.PARTS}
    steps_of["P5"] = partial(eager.rows, bench, options.contenders)
    others = {"P6": partial(first_step.rows, bench), "P10": partial(curves.rows, bench, options.save)}
    others["P7"] = partial(predicted.rows, bench, options.save / "predicted", options.models)
    for part in unequal.SHARES:
        others[part] = partial(unequal.rows, bench, part, options.gpus, options.save / "hybrid", options.clock, options.models)
    return {**steps_of, "P4": partial(scales.rows, bench), **others, **plans_of}


def of_steps(bench: Bench, part: str, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one shape, whose products are tuned first where that is asked for."""
    if options.tune:
        products_tuned.tune(steps.SHAPES[part], bench, options.tune)
    yield from steps.rows(bench, part, options.contenders)


ON_A_CPU = {"P4", *rows_today.PARTS}
"""Rows that need no device."""


def main() -> None:
    """Measure the parts that are asked for; a row is written as soon as it has a value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, comma-separated")
    parser.add_argument("--contenders", default="", help="of P1 to P3 and P5, by name (a|b); PyTorch's own 16 bit is always one")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for which products of each of P1 to P3 are tuned")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    parser.add_argument("--save", type=Path, default=Path("today-runs"), help="folder of what P7 to P10 have finished")
    parser.add_argument("--gpus", default="0,1", help="of P8 and P9: the strong one and the weak one")
    models = f"of P8 and P9, comma-separated: {', '.join(unequal.MODELS)}; of P7: {', '.join(predicted.MODELS)}"
    parser.add_argument("--models", default="", help=models)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of P8 and P9, after which everything has ended")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU too; nothing is written")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that contenders and ranks are ended as well
    options.clock, cuda = Clock(60 * options.minutes), torch.cuda.is_available()
    options.gpus = options.gpus.split(",") if cuda and not options.tiny else []
    options.models = names_in(options.models, dict.fromkeys((*unequal.MODELS, *predicted.MODELS)), "models")
    bench = Bench(torch.device("cuda", 0) if cuda else torch.device("cpu"), quick=options.tiny)
    known = parts(bench, options)
    wanted = names_in(options.only, known, "parts") or list(known)
    if not cuda and not options.tiny and not ON_A_CPU.issuperset(wanted):
        raise SystemExit("these rows need a CUDA device, and torch sees none; --tiny tries them on a CPU")
    if cuda and not set(unequal.SHARES).isdisjoint(wanted) and torch.cuda.device_count() < len(options.gpus):
        wanted = [name for name in wanted if name not in unequal.SHARES]
        print("P8 and P9 are left out: they need two GPUs, and torch sees one", file=sys.stderr)
    where = {"directory": options.directory} if options.directory else {}
    for name in wanted:
        command = f"{COMMAND} --only {name}{f' --tune {options.tune:g}' if options.tune and name in steps.SHAPES else ''}"
        try:
            for row in known[name]():
                if not options.tiny:
                    write_rows("today", [row], command, **where)
        except Exception:
            print(f"{name}: not measured", file=sys.stderr)
            traceback.print_exc()


if __name__ == "__main__":
    main()

"""Rows L1 to L9 of ``docs/results/steps.json``: what low precision is worth in whole training steps, in time and in memory.

Run it on a machine with a CUDA device (L5: two of them), part by part where a call may take ten minutes at most::

    python bench/gpu_steps.py --out OUT --only prepare-L1     # compiles and tunes; again, it goes on
    python bench/gpu_steps.py --out OUT --only L1             # L1, L1-fused and L1f
    python bench/gpu_steps.py --out OUT --only L2,L3          # in this order

A row is written as soon as it has a value, and again when a better contender, or more of what it counts, has been measured; a run
that is stopped leaves those.  A row that misses its bound prints what its steps are made of: time, launches, bytes, and the share
of the copy rate.  A row that cannot be measured is missing, with the reason on stderr.  L9 needs no GPU.

``--tiny`` tries the script on a CPU, with small models; its rows mean nothing and are printed only.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from kernels.bench import Bench, Row
from kernels.whole_model import release
from results import names_in, write_rows
from steps import rows_capped, rows_compiled, rows_learning, rows_memory, rows_rounding, rows_time

COMMAND = "python bench/gpu_steps.py --out OUT"
WITHOUT_GPU = ("L9",)


def parts(bench: Bench, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    """What measures rows, by the name that ``--only`` takes."""
    how = {"tuned": not options.untuned, "words": options.contenders}
    return {
        **{f"prepare-{row}": partial(rows_time.prepare_rows, bench, row, **how) for row in rows_time.CONTENDERS},
        "L1": partial(rows_time.step_rows, bench, "L1", **how),
        "L2": partial(rows_time.step_rows, bench, "L2", **how),
        "L3": partial(rows_time.eager_rows, bench, **how),
        "L4": partial(rows_memory.memory_rows, bench, "L4", **how),
        "L4-bert": partial(rows_memory.memory_rows, bench, "L4-bert", **how),
        "L5": partial(rows_capped.capped_rows, bench, tuned=how["tuned"]),
        "L6": partial(rows_rounding.replay_rows, bench),
        "L7": partial(rows_rounding.producer_rows, bench, options.contenders),
        "L8": partial(rows_learning.learning_rows, bench),
        "L9": partial(rows_compiled.build_rows, bench),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the tables of steps that miss")
    parser.add_argument(
        "--only", default="", help="parts, comma-separated: prepare-L1 to -L3, L1 (with L1-fused and L1f), L2 to L9"
    )
    help_ = "8-bit contenders of L1 to L4, and backends of L7, with one of these texts (a|b) in their name"
    parser.add_argument("--contenders", default="", help=help_)
    parser.add_argument("--untuned", action="store_true", help="kernels as they are chosen without tuning")
    parser.add_argument("--libraries", type=int, default=1, help="kernels that a request may have compiled")
    parser.add_argument("--just-in-time", type=int, default=2, help="configurations of a product from backends that do not compile")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU too; nothing is written")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    bench = Bench(
        torch.device("cuda", 0) if cuda else torch.device("cpu"),
        options.out,
        quick=options.tiny,
        libraries=options.libraries,
        just_in_time=options.just_in_time,
    )
    known = parts(bench, options)
    wanted = names_in(options.only, known, "parts") or [name for name in known if not name.startswith("prepare")]
    if not cuda and not options.tiny and any(name not in WITHOUT_GPU for name in wanted):
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none; --tiny tries it on a CPU, --only L9 needs none")
    where = {"directory": options.directory} if options.directory else {}
    missed = []
    for name in wanted:
        try:
            for row in known[name]():
                if not options.tiny:
                    write_rows("steps", [row], f"{COMMAND} --only {name}{_settings(parser, options)}", **where)
        except Exception:
            print(f"{name}: not measured", file=sys.stderr)
            traceback.print_exc()
            missed.append(name)
        release()
    bench.say("done" + (f"; not measured: {', '.join(missed)}" if missed else ""))


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The options that decide what a row says, as far as they are not the defaults."""
    text = " --untuned" if options.untuned else ""
    for name in ("contenders", "libraries", "just_in_time"):
        value = getattr(options, name)
        if value != parser.get_default(name):
            text += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
    return text


if __name__ == "__main__":
    main()

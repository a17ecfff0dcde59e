"""Rows K1 to K12 of ``docs/results/kernels.json``: what the kernel backends are worth on one GPU.

Run it on a machine with a CUDA device; a row that cannot be measured is missing, with the reason on stderr::

    python bench/gpu_kernels.py --out OUT [--only K1,K4] [--profile] [--directory docs/results]

``--quick`` tries the script on a CPU, with small shapes; its rows mean nothing and are printed only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from kernels import rows_conv, rows_producers, rows_products, rows_quantize, rows_steps, rows_stored, rows_tuning
from kernels.bench import Bench, Row
from kernels.whole_model import Mode, release
from qsync_core.ir.precision import Precision
from qsync_torch.benchmarking.contenders import compile_ahead
from results import names_in, write_rows

COMPILED = ("K1", "K2", "K3", "K6")
"""Rows whose kernels are compiled all at once, when the first of them is reached."""
COMMAND = "python bench/gpu_kernels.py --out OUT"


def groups(bench: Bench, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    """What measures rows, by the name that ``--only`` takes."""
    backend = None if options.backend in (None, "auto") else options.backend
    step = partial(
        rows_steps.step_rows,
        bench,
        backend=backend,
        outputs=[Precision(name) for name in options.outputs.split(",")],
        modes=[Mode[name.upper()] for name in options.modes.split(",")],
        profile=options.profile,
        wanted=options.int8,
    )
    return {
        "K1": partial(rows_products.product_rows, bench),
        "K2": partial(rows_products.small_product_rows, bench),
        "K3": partial(rows_products.step_rows, bench),
        "K4": partial(rows_quantize.quantize_rows, bench),
        "K6": partial(rows_conv.conv_rows, bench),
        "K7": partial(step, "K7"),
        "K8": partial(step, "K8"),
        "K9": partial(rows_steps.ablation_rows, bench, backend=backend),
        "K10": partial(rows_tuning.exhaustive_rows, bench),
        "K10b": partial(rows_tuning.duration_rows, bench),
        "K11": partial(rows_producers.producer_rows, bench),
        "K12": partial(rows_stored.stored_rows, bench),
    }


def _compile(bench: Bench, wanted: list[str]) -> None:
    """Everything that products and convolutions need, side by side; nothing is left to do for the second of them."""
    requests = [request for name in ("K1", "K2", "K3") if name in wanted for request in rows_products.requests(bench, name)]
    requests += rows_conv.requests(bench) if "K6" in wanted else []
    if requests:
        compile_ahead(bench.backends, requests)
        bench.say("compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for profiles")
    parser.add_argument(
        "--only", default="", help="groups of rows, comma-separated: K1,K2,K3,K4 (with K5),K6,K7,K8,K9,K10,K10b,K11,K12"
    )
    parser.add_argument("--backend", default=None, help="backends of K7 to K9, a+b; default the fastest, tuned first")
    parser.add_argument("--profile", action="store_true", help="write what the steps of K7 and K8 are made of to OUT")
    parser.add_argument("--modes", default="eager,graph,compiled", help="of K7 and K8, in this order")
    parser.add_argument("--int8", default="", help="K7 and K8: only the int8 settings whose name has this text in it")
    parser.add_argument("--outputs", default="float16,bfloat16", help="formats of int8 operators' outputs that K7 and K8 try")
    parser.add_argument("--libraries", type=int, default=2, help="kernels that a request may have compiled")
    parser.add_argument("--just-in-time", type=int, default=3, help="configurations of a product from backends that do not compile")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    parser.add_argument("--quick", action="store_true", help="small shapes, nothing written")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.quick:
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none; --quick tries it on a CPU")
    bench = Bench(
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"),
        options.out,
        quick=options.quick,
        libraries=options.libraries,
        just_in_time=options.just_in_time,
    )
    known = groups(bench, options)
    wanted = names_in(options.only, known, "rows") or list(known)
    where = {"directory": options.directory} if options.directory else {}
    missed = []
    for name in wanted:
        command = f"{COMMAND} --only {name}" + _settings(parser, options)
        try:
            if name in COMPILED and not options.quick:
                _compile(bench, [later for later in wanted[wanted.index(name) :] if later in COMPILED])
            for row in known[name]():
                if not options.quick:
                    write_rows("kernels", [row], command, **where)
        except Exception:
            print(f"{name}: not measured", file=sys.stderr)
            traceback.print_exc()
            missed.append(name)
            rest = wanted[wanted.index(name) + 1 :]
            if rest and not _device_lives():
                print(
                    f"the device does not answer in this process any more; going on in a new one with {', '.join(rest)}", flush=True
                )
                os.execv(sys.executable, [sys.executable, *_without_only(sys.argv), "--only", ",".join(rest)])
        release()
    bench.say("done" + (f"; not measured: {', '.join(missed)}" if missed else ""))


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The options that decide what a row says, as far as they are not the defaults."""
    text = ""
    for name in ("backend", "modes", "int8", "outputs", "libraries", "just_in_time"):
        value = getattr(options, name)
        if value != parser.get_default(name):
            text += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
    return text


def _device_lives() -> bool:
    try:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return False
    return True


def _without_only(arguments: list[str]) -> list[str]:
    kept = list(arguments)
    if "--only" in kept:
        place = kept.index("--only")
        del kept[place : place + 2]
    return [entry for entry in kept if not entry.startswith("--only=")]


if __name__ == "__main__":
    main()

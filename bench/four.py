"""Rows Q1 to Q6 of ``docs/results/four.json``: jobs of four and more ranks in two and three groups.

    python bench/four.py --gpus 0,1,2,3 --minutes 9.5 --save four-runs [--only Q1,Q4,Q5,Q6] [--layouts 2+2@50,3+1@50]
    python bench/four.py --cpu --save four-runs                           small models over gloo, rows with -cpu behind

A layout is the ranks of each group, and the share of a GPU in percent that each rank of it has by MPS: ``2+2@50``.  Group a trains.
Every job is prepared (``qsync prepare``), and trained in full precision, by group a alone, under QSync's plan, in uniform
precision, and in the way that the verdict recommends.  Q1 to Q3 are of two groups, Q4 of three; Q5 kills a rank of a weak group
(Q5b: its only one); Q6 plans for twice and four times the ranks, and where there are eight GPUs measures one such job.

Needs as many NVIDIA GPUs as ranks, and the right to start an MPS daemon.  Where there are fewer, ranks stand side by side on
them, with smaller shares and over gloo: a check of what jobs do, not of how fast they are, whose rows have ``-shared`` behind.

The table of docs/hybrid.md is written with the rows; ``--only ""`` writes it alone, of rows that came from another machine.

After ``--minutes`` everything has ended: the same command goes on with what is not finished, on this machine or on one of its kind
that is given the folder of ``--save``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from four import killed, larger
from four.layouts import EIGHT, FOUR, SHARED, THREE_GROUPS, Layout, UnsuitedLayout, is_shared, on_gpus
from four.rows import rows
from hybrid.page import fill, targets
from hybrid.processes import mps
from jobs.measured import Clock, Found, JobOf, known, measure, plan_of
from jobs.models import KINDS
from jobs.places import Place, on_cores
from results import RESULTS, ROOT, parser_of, provenance, write_rows

PAGE = ROOT / "docs" / "hybrid.md"
PARTS = ("Q1", "Q4", "Q5", "Q6")
"""Q1 to Q3 are measured together, in two groups; Q4 is of three."""
KILLED = ("2+2", "3+1")
"""Whoever is killed need not be slow."""
ON_CPU = {"Q1": ("2+2@50", "3+1@50"), "Q4": ("2+1@75+1@50",), "Q5": KILLED}
MODELS = ("resnet50", "bert-large", "gpt2-medium")
BASES = ("float32", "bfloat16")
OF_FOUR = 4
"""Ranks of the jobs of Q1 to Q4; more are Q6's."""


@contextmanager
def places(options: argparse.Namespace) -> Iterator[Callable[[Layout], Any]]:
    """What makes the place of a layout, a context each."""
    if options.cpu:

        def of_cores(layout: Layout) -> Any:
            by_group = layout.by_group.items()
            return on_cores({name: count for name, (count, _) in by_group}, {name: share for name, (_, share) in by_group})

        yield of_cores
        return
    with mps(on_gpu=True) as daemon:

        @contextmanager
        def of_gpus(layout: Layout) -> Iterator[Place]:
            yield on_gpus(layout, options.gpus, daemon.environment)

        yield of_gpus


def layouts_of(options: argparse.Namespace, part: str) -> list[Layout]:
    """Those that were asked for, or that the GPUs do for."""
    if options.layouts:
        wanted = [Layout.parse(text) for text in options.layouts]
        return [layout for layout in wanted if part == "Q5" or (len(layout.counts) == 3) == (part == "Q4")]
    if options.cpu:
        texts: Sequence[str] = ON_CPU.get(part, ())
    elif len(options.gpus) < OF_FOUR:
        texts = SHARED[len(options.gpus)] if part in ("Q1", "Q5") else ()
    elif part == "Q6":
        texts = EIGHT if len(options.gpus) >= 2 * OF_FOUR else ()
    else:
        texts = {"Q1": FOUR, "Q4": THREE_GROUPS, "Q5": KILLED}[part]
    return [Layout.parse(text) for text in texts]


def job_of(layout: Layout, model: str, base: str) -> JobOf:
    """A job of a layout."""
    how = "in float32" if base == "float32" else "under autocast"
    return JobOf(f"{layout}-{model}-{base}", f"{model} {how}, {layout}", model, base)


def gpu_name(gpus: Sequence[str]) -> str:
    """What the driver calls the first of these GPUs; asked in a process of its own, before MPS is there."""
    line = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", gpus[0]]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure what is left, and write the rows after every job."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", default="", help="which, comma-separated")
    parser.add_argument("--cpu", action="store_true", help="on cores of this machine, with small models")
    parser.add_argument("--tiny", action="store_true", help="on two cores, one small model; nothing is written")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--layouts", default="", help="comma-separated, in the place of those for this many GPUs")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--bases", default=",".join(BASES), help="float32, bfloat16 (autocast)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which everything has ended")
    parser.add_argument("--save", type=Path, default=Path("four-runs"), help="folder of what is finished")
    options = parser.parse_args()
    options.cpu |= options.tiny
    for name in ("gpus", "only", "layouts", "models", "bases"):
        setattr(options, name, [word for word in getattr(options, name).split(",") if word])
    words = {"only": PARTS, "models": tuple(KINDS), "bases": BASES}
    if stray := [word for name, allowed in words.items() for word in getattr(options, name) if word not in allowed]:
        raise SystemExit(f"no such part, model or base: {', '.join(stray)}; known are {words}")
    if not options.only:
        write_page(options.out)
        return
    if not options.cpu and not options.gpus:
        raise SystemExit("say which GPUs with --gpus 0,1,2,3, or --cpu for small models on cores")
    if not options.cpu and len(options.gpus) < OF_FOUR:
        print(f"{len(options.gpus)} GPUs are fewer than four: ranks stand side by side, over gloo; speeds are not those of a job")
    try:
        run(options)
    except UnsuitedLayout as error:
        raise SystemExit(str(error)) from None


def run(options: argparse.Namespace) -> None:
    """All parts, as far as the time goes."""
    clock, about = Clock(60 * options.minutes), provenance()
    here = {**about, "device": "CPU" if options.cpu else gpu_name(options.gpus)}
    options.save = options.save.resolve()
    options.save.mkdir(parents=True, exist_ok=True)
    where = "cores of a CPU, small models" if options.cpu else f"{len(options.gpus)} × {here['device']}"
    wanted = {part: layouts_of(options, part) for part in options.only}
    layouts = dict.fromkeys(layout for part in ("Q1", "Q4", "Q6") for layout in wanted.get(part, ()))
    jobs = [(layout, job_of(layout, *which)) for layout in layouts for which in itertools.product(options.models, options.bases)]
    of_four = sum(layout.ranks <= OF_FOUR for layout in layouts) * len(options.models) * len(options.bases)
    found: dict[str, tuple[Layout, Found]] = {}
    left, suffix = [], "-cpu" if options.cpu else ""

    def write(made: Sequence[Mapping[str, Any]], part: str) -> None:
        given = f"--gpus {','.join(options.gpus)}" if options.gpus else "--cpu"
        chosen = {"models": MODELS, "bases": BASES, "layouts": ()}
        given += "".join(
            f" --{name} {','.join(said)}" for name, all_ in chosen.items() if tuple(said := getattr(options, name)) != all_
        )
        device = {} if options.cpu else {"device": where}
        for row in made:
            print(f"{row['id']}: {row['value']:.4g} {row['unit']} ({row['spread']})", flush=True)
        if not options.tiny:
            line = f"python bench/four.py {given} --only {part}"
            write_rows("four", [{**row, **device} for row in made], line, directory=options.out)
            write_page(options.out)

    with places(options) as place_of:
        for layout, job in jobs:
            folder = options.save / job.name
            with place_of(layout) as place:
                suffix = "-shared" if is_shared(place) else suffix
                found[job.name] = layout, measure(job, place, folder, here, clock.left)
            one = found[job.name][1]
            print(told(one, folder, layout), flush=True)
            left += [] if one.is_finished else [job.name]
            in_groups = [entry for entry in found.values() if entry[0].ranks <= OF_FOUR]
            write(list(rows(in_groups, of_four, suffix, where, speeds=not place.is_crowded)), "Q1,Q4")
        for layout in wanted.get("Q5", ()):
            with place_of(layout) as place:
                suffix = "-shared" if is_shared(place) else suffix
                kills = killed.Kills.of(layout, place, here["device"])
                done = killed.measure(kills, options.save / f"kills-{layout}", here, clock.left)
            if done["kills"]:
                loses_all = "b" if layout.counts[1] == 1 else ""
                write([killed.row(f"Q5{loses_all}{suffix}", layout, done, where)], "Q5")
            if len(done["kills"]) < killed.KILLS:
                left.append(f"kills of {layout}")
    if "Q6" in options.only:
        for layout in layouts_of(options, "Q1")[:1]:
            for model, base in itertools.product(options.models, options.bases):
                job, of_twice = job_of(layout, model, base), found.get(job_of(layout.times(2), model, base).name)
                one = known(job, options.save / job.name, {name: here[name] for name in ("machine", "device")})
                if one.prepared:
                    twice = of_twice[1] if of_twice else None
                    write(list(larger.rows(layout, one, options.save / job.name, suffix, where, twice)), "Q6")
    print(f"left: {', '.join(left)}" if left else "all is measured", flush=True)


def write_page(results: Path) -> None:
    """Put all rows into the page, where they are the repository's."""
    if results == RESULTS:
        stored = json.loads((results / "four.json").read_text(encoding="utf-8"))["rows"]
        fill(PAGE, {"FOUR": targets({row["id"]: row for row in stored}, every=True)}, "bench/four.py")


def told(found: Found, folder: Path, layout: Layout) -> str:
    """How far a job is, for who watches, with its verdict."""
    plan = plan_of(found, folder, tuple(layout.by_group))
    return f"{found.told}. {plan.verdict.sentence if plan is not None and plan.verdict else ''}"


if __name__ == "__main__":
    main()

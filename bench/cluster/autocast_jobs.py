"""Row C3 of ``docs/results/cluster.json``: six models under bfloat16 autocast on two unequal groups, by the path of the README;
C3-cpu of small stand-ins on CPUs, C3-reading of a loop that reads the loss of every step.

    python bench/cluster/autocast_jobs.py --pairs 0,1 2,3 [--seconds 580] [--out FOLDER]     # on GPUs
    python bench/cluster/autocast_jobs.py --cpu [--out FOLDER]                               # small stand-ins
    python bench/cluster/autocast_jobs.py --pairs 0,1 --reading                              # the jobs of a row by itself

Group ``a`` has the first GPU of a pair to itself, group ``b`` a share of the second one by MPS; on CPUs each has a core, and ``b``
shares its own with a busy process.  Each job is prepared (``qsync prepare``), and trained in full precision by both groups, by
group ``a`` alone, under QSync's plan, and in the way that the verdict recommends, one after the other in one start.

On GPUs the shares of a model are prepared in one run folder: what was measured of group ``a`` is kept.  So are tuned and compiled
kernels, where all jobs of this machine have theirs.

At a share at which the library computes wrong numbers ``prepare`` refuses the job and names the nearest that are right
(docs/shared-gpus.md#canary): the job is then measured at the nearest of these, and the row says so.

A verdict is borne out where the steps of the plan and of the recommended way are predicted to within the row's tolerance, and no
other way that was measured makes more samples a second than the recommended one by more than that.

What is finished is kept beside the results (``autocast_jobs/``), so that the script started again goes on with the next job;
``--seconds`` ends it before a job that would hardly end in time.
"""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hybrid.processes import mps
from jobs.places import Place, gpu_pair, on_cores
from jobs.ways import READING, SCRIPT, TUNE_S, Way, limit_s, prepare, train, ways_of
from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.run_folder import RunFolder
from results import parser_of, provenance, write_rows

SHARES = (0.5, 0.75)
JOBS = tuple(itertools.product(("gpt2-medium", "llama-1b", "bert-large", "vit-large", "resnet50", "convnext"), SHARES))


@attrs.frozen
class Row:
    """A row, and how its jobs run.

    Attributes:
        jobs: models, and shares of group ``b``.
        tolerance: of a step's prediction, and of what counts as slower.
        script: which the jobs run.
    """

    id: str
    where: str
    jobs: Sequence[tuple[str, float]] = JOBS
    tolerance: float = 0.05
    script: Path = SCRIPT

    def file(self, folder: Path, model: str, share: float) -> Path:
        """Where a finished job is kept."""
        return folder / f"{model}-{share:g}{self.id.removeprefix('C3')}.json"


_GPUS = "a GPU and a share of another (layers of the transformers halved)"
ON_GPUS = Row("C3", _GPUS)
READ = Row("C3-reading", f"{_GPUS}, which read the loss of every step", [("gpt2-medium", 0.5)], script=READING)
ON_CPUS = Row("C3-cpu", "two CPU cores, small stand-ins", tolerance=0.15)

JOB_S = 150
"""With fewer seconds left no job is begun on GPUs; one that is cut off goes on from its run folder, where ``--work`` keeps it."""


def measure(
    row: Row, model: str, share: float, place_at: Callable[[float], Place], work: Path, instead: Mapping[float, float] = {}
) -> dict[str, Any]:
    """The same as :func:`measured_at`, at the nearest share that is right where ``prepare`` refuses this one, or is known to."""
    if other := instead.get(share):
        told = f"{share:g}, which other jobs were refused there, was not tried"
        return measured_at(row, model, other, place_at(other), work) | {"refused": told, "share": share, "measured_at": other}
    found = measured_at(row, model, share, place_at(share), work)
    if not (right := found.get("right_shares")):
        return found
    nearest = min(right, key=lambda other: abs(other - share))
    refused = {"refused": f"refused at {share:g}, nearest right {nearest:g}", "refused_after_s": found["prepare_s"]}
    return measured_at(row, model, nearest, place_at(nearest), work) | refused | {"share": share, "measured_at": nearest}


def measured_at(row: Row, model: str, share: float, place: Place, work: Path) -> dict[str, Any]:
    """Prepare a job, train it in every way, and judge the verdict."""
    # MPS's share is among what measurements depend on; how busy a core is, is not.
    run = RunFolder(work / (model if place.on_gpus else f"{model}-{share:g}") / "run")
    of_share = run.path.with_name("share.txt")
    if of_share.exists() and of_share.read_text(encoding="utf-8") != f"{share:g}":
        for of_other_share in (run.cluster, run.profile("b")):
            of_other_share.unlink(missing_ok=True)
    of_share.parent.mkdir(parents=True, exist_ok=True)
    of_share.write_text(f"{share:g}", encoding="utf-8")
    common = {"MODEL": model, "RUN": str(run.path), "AMP": "bfloat16", **({"SIZE": "halved"} if place.on_gpus else {})}
    prepared = prepare(place, run, common, limit_s("prepare", place), row.script)
    found: dict[str, Any] = {"model": model, "share": share, "prepare_s": round(prepared.seconds, 1), "stages": prepared.stages}
    if right := prepared.right_shares:
        return found | {"right_shares": right, "borne_out": False, "why": prepared.failure}
    if any(prepared.statuses) or not run.plan("ab").exists():
        return found | {"borne_out": False, "why": f"prepare ended without a plan: {prepared.failure}"}
    plan = load(run.plan("ab"), PrecisionPlan)
    lowered = sum(a.variant.compute != plan.base for group in plan.groups for a in group.assignments.values())
    found |= {"verdict": plan.verdict.sentence if plan.verdict else "", "lowered": lowered}
    began = time.monotonic()
    name, ways = ways_of(run, "ab", run.path.parent)
    measured, _ = train(place, ways, common, script=row.script)
    found["train_s"] = round(time.monotonic() - began, 1)
    return found | _judged(name, measured, row.tolerance)


def _judged(recommended: str, ways: Mapping[str, Way], tolerance: float) -> dict[str, Any]:
    why = [f"{name} failed: {way.failure}" for name, way in ways.items() if not way.measured]
    why += [
        f"{name}: {ways[name].predicted_ms:.1f} ms predicted, {ways[name].measured['ms']:.1f} measured"  # type: ignore[index]
        for name in dict.fromkeys(("plan", recommended))
        if ways[name].measured and ways[name].off > tolerance
    ]
    fastest = max(ways, key=lambda name: ways[name].rate)
    if ways[fastest].rate > ways[recommended].rate * (1 + tolerance):
        rates = f"{ways[fastest].rate:,.1f} samples/s, {ways[recommended].rate:,.1f} with {recommended}, which is recommended"
        why.append(f"{fastest} makes {rates}")
    measured = {name: attrs.asdict(way) for name, way in ways.items()}
    return {"recommended": recommended, "ways": measured, "borne_out": not why, "why": "; ".join(why)}


def write(row: Row, jobs: Sequence[Mapping[str, Any]], command: str, out: Path) -> None:
    """The row, of the jobs that are finished."""
    good, of_all = sum(job["borne_out"] for job in jobs), len(row.jobs)
    told = "; ".join(f"{job['model']} at {job['share']:g}: {job['why']}" for job in jobs if not job["borne_out"])
    refused = "; ".join(
        f"{job['model']}: {job['refused']}" + (f" after {job['refused_after_s']:.0f} s" if "refused_after_s" in job else "")
        for job in jobs
        if "refused" in job
    )
    offs = [
        abs(way["predicted_ms"] / way["measured"]["ms"] - 1)
        for job in jobs
        for name, way in job.get("ways", {}).items()
        if name in ("plan", job["recommended"]) and way["measured"] and way["predicted_ms"]
    ]
    found = {
        "id": row.id,
        "what": f"jobs under bfloat16 autocast on {row.where}: a plan, and a verdict that measured steps bear out to "
        f"{row.tolerance:.0%}; "
        f"{len(jobs)} of {of_all} jobs were tried, kernels tuned for {TUNE_S} s in each"
        + (f"; measured at another share: {refused}" if refused else "")
        + (f"; not borne out: {told}" if told else ""),
        "value": good,
        "unit": f"jobs of {of_all}",
        "spread": f"steps predicted to {sum(offs) / len(offs):.1%} on average, worst {max(offs):.1%}"
        if offs
        else "nothing measured",
        "target": f"{of_all} of {of_all}",
    }
    write_rows("cluster", [found], command, directory=out, measured=jobs[-1].get("measured_by"))


def main() -> None:
    """Measure what is left, job by job."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", nargs="+", metavar="A,B", help="pairs of GPUs, each with a job at a time")
    parser.add_argument("--cpu", action="store_true", help="small stand-ins on two CPU cores")
    parser.add_argument("--reading", action="store_true", help="a loop that reads the loss of every step")
    parser.add_argument("--models", help="which are measured now, comma-separated")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of group b, comma-separated")
    parser.add_argument("--instead", nargs="+", default=[], metavar="SHARE=OTHER", help="where a share is known to be refused")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job that would not end in these")
    parser.add_argument("--again", action="store_true", help="measure finished jobs again")
    parser.add_argument("--work", type=Path, help="where run folders stay (else they are temporary)")
    options = parser.parse_args()
    if not options.cpu and not options.pairs:
        print("C3 needs two GPUs (--pairs 0,1) or --cpu: skipped")
        return
    began, kept = time.monotonic(), options.out / "autocast_jobs"
    kept.mkdir(parents=True, exist_ok=True)
    row = ON_CPUS if options.cpu else READ if options.reading else ON_GPUS
    models, shares = (options.models or "").split(","), [float(share) for share in options.shares.split(",")]
    wanted = [(model, share) for model, share in row.jobs if model in models or not options.models if share in shares]
    left = [one for one in wanted if options.again or not row.file(kept, *one).exists()]
    waiting: queue.Queue[str] = queue.Queue()
    for model in dict.fromkeys(model for model, _ in left):
        waiting.put(model)
    instead = {float(share): float(other) for share, other in (pair.split("=") for pair in options.instead)}
    command = f"python bench/cluster/autocast_jobs.py {'--cpu' if options.cpu else '--pairs ' + ' '.join(options.pairs)}"
    command += " --reading" if options.reading else ""
    work, writing = options.work or Path(tempfile.mkdtemp(prefix="autocast-jobs-")), threading.Lock()

    def write_finished() -> None:
        files = [row.file(kept, *job) for job in row.jobs]
        if done := [json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()]:
            write(row, done, command, options.out)

    def finish(model: str, share: float, place_at: Callable[[float], Place]) -> None:
        try:
            found = measure(row, model, share, place_at, work, instead)
        except Exception as error:  # one job that fails does not keep the others from running
            found = {"model": model, "share": share, "borne_out": False, "why": f"{type(error).__name__}: {error}"[:300]}
        found["measured_by"] = provenance()
        with writing:
            row.file(kept, model, share).write_text(json.dumps(found, indent=2), encoding="utf-8")
            write_finished()
            judged = "borne out" if found["borne_out"] else found["why"]
            took = f"prepare {found.get('prepare_s', 0):.0f} s, training {found.get('train_s', 0):.0f} s"
            where = f"{model} at {share:g}" + (f" ({found['refused']})" if "refused" in found else "")
            print(f"{where}, {took}: {judged} {found.get('verdict', '')}", flush=True)
            print(*(f"    {stage}" for stage in found.get("stages", ())), sep="\n", flush=True)

    def in_time() -> bool:
        return time.monotonic() - began + (0 if options.cpu else JOB_S) < options.seconds

    def work_off(place_at: Any) -> None:
        while in_time():
            try:
                model = waiting.get_nowait()
            except queue.Empty:
                return
            for one in [one for one in left if one[0] == model]:
                if not in_time():
                    return
                with ExitStack() as stack:
                    finish(*one, partial(place_at, stack))
                left.remove(one)

    try:
        if options.cpu:
            work_off(lambda stack, share: stack.enter_context(on_cores({"a": 1, "b": 1}, {"a": 1.0, "b": share})))
        else:
            with mps(on_gpu=True) as daemon:
                lanes = [
                    threading.Thread(target=work_off, args=(lambda _, share, pair=pair: gpu_pair(pair, share, daemon.environment),))
                    for pair in options.pairs
                ]
                for lane in lanes:
                    lane.start()
                for lane in lanes:
                    lane.join()
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    write_finished()
    print(f"{len(left)} jobs are left" if left else "all jobs are measured")


if __name__ == "__main__":
    main()

"""Row C3 of ``docs/results/cluster.json``: six models under bfloat16 autocast on two unequal groups, by the path of the README;
C3-cpu of small stand-ins on CPUs.

    python bench/cluster/autocast_jobs.py --pairs 0,1 2,3 [--seconds 580] [--out FOLDER]     # on GPUs
    python bench/cluster/autocast_jobs.py --cpu [--out FOLDER]                               # small stand-ins

Group ``a`` has the first GPU of a pair to itself, group ``b`` a share of the second one by MPS; on CPUs each has a core, and ``b``
shares its own with a busy process.  Each job is prepared (``qsync prepare``), and trained in full precision by both groups, by
group ``a`` alone, under QSync's plan, and in the way that the verdict recommends, one after the other in one start.

On GPUs the shares of a model are prepared in one run folder: what was measured of group ``a`` is kept.  So are tuned and compiled
kernels, where all jobs of this machine have theirs.

At a share at which the library computes wrong numbers ``prepare`` refuses the job and names the nearest that are right
(docs/shared-gpus.md#canary): the job is then measured at the nearest of these, and the row says so.

A verdict is borne out where the steps of the plan and of the recommended way are predicted to within ``TOLERANCE``, and no other
way that was measured makes more samples a second than the recommended one by more than that.

What is finished is kept beside the results (``autocast_jobs/``), so that the script started again goes on with the next job;
``--seconds`` ends it before a job that would not end in time.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from processes import free_port, run_together
from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.run_folder import RunFolder
from results import parser_of, write_rows

SCRIPT = Path(__file__).with_name("autocast_script.py")
MODELS = ("gpt2-medium", "llama-1b", "bert-large", "vit-large", "resnet50", "convnext")
SHARES = (0.5, 0.75)
TOLERANCE = {"gpu": 0.05, "cpu": 0.15}
"""Of a step's prediction, and of what counts as slower."""
LIMITS_S = {"prepare": (300, 400), "train": (60, 120)}
"""Seconds of a phase on GPUs and CPUs."""
JOB_S = 120
"""What a job takes on GPUs, for ``--seconds``, until one has taken longer."""
TUNE_S = 15
TUNE = ("--tune", str(TUNE_S))
"""How long kernels are tuned in a job; the others continue with what it has found."""
_TOOK = re.compile(r"\[ *\d+ s\] .* took [\d.]+ s")
_RIGHT_SHARES = re.compile(r"the nearest shares that are right here: ([\d.]+)(?: and ([\d.]+))?;")
BUSY = "while True: pass"
NICE = {0.5: 0, 0.75: 5}
"""Of the busy process: the scheduler gives it as much as group b's, or a third."""


@attrs.frozen
class Ended:
    """How a phase ended: torchrun's statuses, what was printed, and how long it took."""

    statuses: tuple[int, ...]
    text: str
    seconds: float

    @property
    def failure(self) -> str:
        """Its last line, where it failed."""
        if not any(self.statuses):
            return ""
        lines = self.text.strip().splitlines() or ["no output"]
        return ([line for line in lines if "rror" in line] or lines)[-1][:300]

    @property
    def right_shares(self) -> list[float]:
        """The nearest shares that are right, where the one that was asked for is refused."""
        found = _RIGHT_SHARES.search(" ".join(self.text.split()))
        return [float(share) for share in found.groups() if share] if found else []

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """What rank 0 measured, by mode."""
        lines = [line for line in self.text.splitlines() if line.startswith("STEP ")]
        return {found.pop("mode"): found for found in (json.loads(line.removeprefix("STEP ")) for line in lines)}

    @property
    def stages(self) -> list[str]:
        """What ``qsync prepare`` says of how long its stages took, and when they ended."""
        return [line for line in self.text.splitlines() if _TOOK.match(line)]


@attrs.frozen
class Place:
    """Where a job runs: the environments of groups a and b, what each command begins with, and whether these are GPUs."""

    environments: Mapping[str, Mapping[str, str]]
    prefixes: Mapping[str, Sequence[str]]
    on_gpus: bool

    def run(self, groups: Sequence[str], command: Sequence[str], extra: Mapping[str, str], limit_s: int) -> Ended:
        """Start torchrun for each group, as one does on each machine, and wait."""
        port, began, commands, environments = free_port(), time.monotonic(), [], []
        for number, group in enumerate(groups):
            line = [*self.prefixes[group], sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(groups))]
            line += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
            commands.append([*line, "--node-rank", str(number), *command])
            environments.append({**os.environ, **self.environments[group], **extra, "QSYNC_GROUP": group})
        try:
            ended = run_together(commands, environments, cwd=Path.cwd(), timeout_s=limit_s)
        except AssertionError as error:  # says what each printed
            return Ended((1,) * len(groups), str(error), time.monotonic() - began)
        text = "".join(process.output for process in ended)
        return Ended(tuple(process.status for process in ended), text, time.monotonic() - began)


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """One daemon for all GPUs, unless the environment names one."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    names = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in names.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **names}, check=True)
    time.sleep(3)
    try:
        yield names
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env={**os.environ, **names}, check=False)


def gpu_place(pair: str, share: float, mps: Mapping[str, str]) -> Place:
    """A pair of GPUs, the second one shared."""
    first, second = pair.split(",")
    whole = {**mps, "CUDA_VISIBLE_DEVICES": first, "OMP_NUM_THREADS": "4"}
    part = {**whole, "CUDA_VISIBLE_DEVICES": second, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(round(100 * share))}
    return Place({"a": whole, "b": part}, {"a": (), "b": ()}, True)


@contextmanager
def cpu_place(share: float) -> Iterator[Place]:
    """Two cores, the second one with a busy process."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("--cpu needs two cores")
    pinned = {name: ("taskset", "-c", str(core)) for name, core in zip("ab", cores, strict=True)}
    line = [*pinned["b"], "nice", "-n", str(NICE[share]), sys.executable, "-c", BUSY]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SMALL": "1", "CUDA_VISIBLE_DEVICES": ""}
    busy = subprocess.Popen(line)
    try:
        yield Place({"a": own, "b": own}, pinned, False)
    finally:
        busy.kill()
        busy.wait()


@attrs.frozen
class Way:
    """A way that was measured, or was to be: its prediction, what was measured, or why not."""

    predicted_ms: float | None
    measured: Mapping[str, Any] | None
    failure: str = ""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return 1e3 * self.measured["samples"] / self.measured["ms"] if self.measured else 0.0

    @property
    def off(self) -> float:
        """By which part of it the measured step is predicted wrongly."""
        if not self.measured or not self.predicted_ms:
            return float("inf")
        return abs(self.predicted_ms / self.measured["ms"] - 1)


def measure(model: str, share: float, place_at: Callable[[float], Place], work: Path) -> dict[str, Any]:
    """The same as :func:`measured_at`, at the nearest share that is right where ``prepare`` refuses this one."""
    found = measured_at(model, share, place_at(share), work)
    if not (right := found.get("right_shares")):
        return found
    nearest = min(right, key=lambda other: abs(other - share))
    refused = {"refused": f"refused at {share:g}, nearest right {nearest:g}", "refused_after_s": found["prepare_s"]}
    return measured_at(model, nearest, place_at(nearest), work) | refused | {"share": share, "measured_at": nearest}


def measured_at(model: str, share: float, place: Place, work: Path) -> dict[str, Any]:
    """Prepare a job, train it in every way, and judge the verdict."""
    limits = {name: seconds[not place.on_gpus] for name, seconds in LIMITS_S.items()}
    # MPS's share is among what measurements depend on; how busy a core is, is not.
    run = RunFolder(work / (model if place.on_gpus else f"{model}-{share:g}") / "run")
    for of_other_share in (run.cluster, run.profile("b")):
        of_other_share.unlink(missing_ok=True)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    common = {"MODEL": model, "RUN": str(run.path), "QSYNC_RANK_TIMEOUT_S": "60"}
    common |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    prepared = place.run("ab", ["-m", "qsync", "prepare", str(SCRIPT), "-o", str(run.path), *TUNE], common, limits["prepare"])
    found: dict[str, Any] = {"model": model, "share": share, "prepare_s": round(prepared.seconds, 1), "stages": prepared.stages}
    whole = run.plan("ab")
    if right := prepared.right_shares:
        return found | {"right_shares": right, "borne_out": False, "why": prepared.failure}
    if any(prepared.statuses) or not whole.exists():
        return found | {"borne_out": False, "why": f"prepare ended without a plan: {prepared.failure}"}
    plan = load(whole, PrecisionPlan)
    lowered = sum(a.variant.compute != plan.base for group in plan.groups for a in group.assignments.values())
    found |= {"verdict": plan.verdict.sentence if plan.verdict else "", "lowered": lowered}

    alone = load(run.plan("a"), PrecisionPlan).predicted_iteration_ns if run.plan("a").exists() else None
    modes = {"full": ("full", "ab", plan.baselines.get("full")), "a alone": ("alone", "ab", alone)}
    modes["plan"] = ("plan", "ab", plan.predicted_iteration_ns)
    name, recommended = _recommended(run, plan, work)
    if recommended is not None:
        groups = "".join(group for group in "ab" if group in {g.group for g in recommended[0].groups})
        modes[name] = (str(recommended[1]), groups, recommended[0].predicted_iteration_ns)
    together = [mode for mode, groups, _ in modes.values() if groups == "ab"]
    ended = place.run("ab", [str(SCRIPT)], {**common, "MODES": " ".join(together)}, limits["train"] * len(together))
    steps = ended.steps
    found["train_s"] = round(ended.seconds, 1)
    ways = {}
    for way, (mode, groups, predicted_ns) in modes.items():
        if mode not in steps:  # it failed, or one before it; or other groups run it
            ended = place.run(groups, [str(SCRIPT)], {**common, "MODES": mode}, limits["train"])
            steps |= ended.steps
        predicted_ms = None if predicted_ns is None else predicted_ns / 1e6
        ways[way] = Way(predicted_ms, steps.get(mode), "" if mode in steps else ended.failure)
    return found | _judged(name, ways, TOLERANCE["gpu" if place.on_gpus else "cpu"])


def _recommended(run: RunFolder, plan: PrecisionPlan, work: Path) -> tuple[str, tuple[PrecisionPlan, Path] | None]:
    """Which way the verdict recommends, and its plan where it is none of the three."""
    best = plan.recommended_way
    options = best.options if best is not None else ""
    groups = best.groups if best is not None else plan.recommended_groups
    if groups == ("a",):
        return "a alone", None
    if "full" in options.split():
        return "full", None
    if not options:
        return "plan", None
    path = work / f"{run.path.parent.name}.recommended.qsync"
    line = [sys.executable, "-m", "qsync", "plan", "--dag", str(run.dag), "--cluster", str(run.cluster)]
    for name in groups:
        line += ["--profile", f"{name}={run.profile(name)}"]
    if run.communication(groups).exists():
        line += ["--communication", str(run.communication(groups))]
    line += ["--sensitivity", str(run.sensitivity), *options.split(), "-o", str(path)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return f"qsync plan {options}", (load(path, PrecisionPlan), path)


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


def write(jobs: Sequence[Mapping[str, Any]], of_all: int, on_gpus: bool, command: str, out: Path) -> None:
    """The row, of the jobs that are finished."""
    good = sum(job["borne_out"] for job in jobs)
    told = "; ".join(f"{job['model']} at {job['share']:g}: {job['why']}" for job in jobs if not job["borne_out"])
    refused = "; ".join(
        f"{job['model']}: {job['refused']} after {job['refused_after_s']:.0f} s" for job in jobs if "refused" in job
    )
    offs = [
        abs(way["predicted_ms"] / way["measured"]["ms"] - 1)
        for job in jobs
        for name, way in job.get("ways", {}).items()
        if name in ("plan", job["recommended"]) and way["measured"] and way["predicted_ms"]
    ]
    where = "a GPU and a share of another (layers of the transformers halved)" if on_gpus else "two CPU cores, small stand-ins"
    tolerance = TOLERANCE["gpu" if on_gpus else "cpu"]
    row = {
        "id": "C3" if on_gpus else "C3-cpu",
        "what": f"jobs under bfloat16 autocast on {where}: a plan, and a verdict that measured steps bear out to {tolerance:.0%}; "
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
    write_rows("cluster", [row], command, directory=out)


def main() -> None:
    """Measure what is left, job by job."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", nargs="+", metavar="A,B", help="pairs of GPUs, each with a job at a time")
    parser.add_argument("--cpu", action="store_true", help="small stand-ins on two CPU cores")
    parser.add_argument("--models", default=",".join(MODELS), help="which, comma-separated")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of group b, comma-separated")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job that would not end in these")
    parser.add_argument("--again", action="store_true", help="measure finished jobs again")
    options = parser.parse_args()
    if not options.cpu and not options.pairs:
        print("C3 needs two GPUs (--pairs 0,1) or --cpu: skipped")
        return
    began, longest_s, kept = time.monotonic(), float(JOB_S), options.out / "autocast_jobs"
    kept.mkdir(parents=True, exist_ok=True)
    wanted = [(model, float(share)) for model in options.models.split(",") for share in options.shares.split(",")]
    left = [one for one in wanted if options.again or not _file(kept, *one, options.cpu).exists()]
    waiting: queue.Queue[str] = queue.Queue()
    for model in dict.fromkeys(model for model, _ in left):
        waiting.put(model)
    command = f"python bench/cluster/autocast_jobs.py {'--cpu' if options.cpu else '--pairs ' + ' '.join(options.pairs)}"
    work, writing = Path(tempfile.mkdtemp(prefix="autocast-jobs-")), threading.Lock()

    def write_finished() -> None:
        files = [_file(kept, *one, options.cpu) for one in wanted]
        if done := [json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()]:
            write(done, len(wanted), not options.cpu, command, options.out)

    def finish(model: str, share: float, place_at: Callable[[float], Place]) -> None:
        try:
            found = measure(model, share, place_at, work)
        except Exception as error:  # one job that fails does not keep the others from running
            found = {"model": model, "share": share, "borne_out": False, "why": f"{type(error).__name__}: {error}"[:300]}
        with writing:
            _file(kept, model, share, options.cpu).write_text(json.dumps(found, indent=2), encoding="utf-8")
            write_finished()
            judged = "borne out" if found["borne_out"] else found["why"]
            took = f"prepare {found.get('prepare_s', 0):.0f} s, training {found.get('train_s', 0):.0f} s"
            where = f"{model} at {share:g}" + (f" ({found['refused']})" if "refused" in found else "")
            print(f"{where}, {took}: {judged} {found.get('verdict', '')}", flush=True)
            print(*(f"    {stage}" for stage in found.get("stages", ())), sep="\n", flush=True)

    def in_time() -> bool:
        return time.monotonic() - began + (0 if options.cpu else longest_s) < options.seconds

    def work_off(place_at: Any) -> None:
        nonlocal longest_s
        while in_time():
            try:
                model = waiting.get_nowait()
            except queue.Empty:
                return
            for one in [one for one in left if one[0] == model]:
                if not in_time():
                    return
                started = time.monotonic()
                with ExitStack() as stack:
                    finish(*one, partial(place_at, stack))
                left.remove(one)
                longest_s = max(longest_s, time.monotonic() - started)

    try:
        if options.cpu:
            work_off(lambda stack, share: stack.enter_context(cpu_place(share)))
        else:
            with mps_daemon(work / "mps") as mps:
                lanes = [
                    threading.Thread(target=work_off, args=(lambda _, share, pair=pair: gpu_place(pair, share, mps),))
                    for pair in options.pairs
                ]
                for lane in lanes:
                    lane.start()
                for lane in lanes:
                    lane.join()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write_finished()
    print(f"{len(left)} jobs are left" if left else "all jobs are measured")


def _file(kept: Path, model: str, share: float, cpu: bool) -> Path:
    return kept / f"{model}-{share:g}{'-cpu' if cpu else ''}.json"


if __name__ == "__main__":
    main()

"""The jobs of ``gpu_hybrid.py``, the plans that are measured on one GPU, and how a step is timed."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.timing import Stopwatch

INT8, BFLOAT16, FLOAT32 = (Variant.of(precision) for precision in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32))
LADDER = (INT8, BFLOAT16, FLOAT32)
HYBRID_LADDER = (BFLOAT16, FLOAT32)
"""Of the hybrid jobs: without tuned kernels an 8-bit step of these models takes longer than a 16-bit one."""
Variants = Mapping[OpId, Variant]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A machine without a GPU can run the smallest workload, to see that the scripts run."""


@attrs.frozen
class Workload:
    """A model as the job's name has it, with its batch on one GPU (rows H1, H3) and per rank of a hybrid job (the others).

    ``steps`` are those of one repetition, fewer where they would take longer than :data:`REPETITION_S`.
    """

    job: str
    batch_alone: int
    batch_hybrid: int
    steps: int = 8

    @property
    def needs_gpu(self) -> bool:
        """Whether its figures are for the rows."""
        return self.steps > 1


WORKLOADS = {
    "resnet50": Workload("resnet50:image=224", 128, 64),
    "vgg16-bn": Workload("vgg16_bn:image=224", 64, 32),
    "bert-base": Workload("bert-base:seq=384", 12, 12),
    "roberta-base": Workload("roberta-base:seq=384", 16, 12),
    "smallest": Workload("resnet18:image=32,small_stem=true,classes=10", 4, 4, 1),
}
REPETITIONS = 5
WARM_UP = 3
REPETITION_S = 0.6
LEAST_STEPS = 2


def gpu_name() -> str:
    """What the driver calls the device."""
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"


def take_half_of_cores(number: int) -> None:
    """Keep this process to one half of the cores (0 or 1), so that its dispatch is not held up by the process on the other GPU.

    Hardware threads of one core stay together: beside a busy one, a call takes half as long again.
    """
    cores = sorted({threads_of_core(cpu) for cpu in os.sched_getaffinity(0)})
    half = cores[number * len(cores) // 2 : (number + 1) * len(cores) // 2]
    os.sched_setaffinity(0, set(itertools.chain(*half)) & os.sched_getaffinity(0))


def threads_of_core(cpu: int, cpus: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """The CPUs of the core that one belongs to, itself among them; itself alone where the system does not say."""
    path = cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    if not path.exists():
        return (cpu,)
    found: list[int] = []
    for part in path.read_text().strip().split(","):  # 0,16 or 0-1
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def without_tf32() -> None:
    """Float32 means float32, in products and in convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def make_job(name: str, batch: int) -> Job:
    """A workload's job, with the same weights in every process."""
    torch.manual_seed(0)
    return load_job(WORKLOADS[name].job, batch)


def fresh_model(job: Job) -> torch.nn.Module:
    """The job's model as it was made, on the device: a copy, so that the next plan finds the same."""
    return copy.deepcopy(job.model).to(DEVICE).train()


def cluster_of(device: str, share: float, memory_bytes: int = 0) -> Cluster:
    """The job: a whole GPU that trains and a share of another."""
    train = DeviceGroup("train", device, 1, Role.TRAIN, Precision.FLOAT32, (FLOAT32,))
    infer = DeviceGroup("infer", device, 1, Role.INFER, Precision.FLOAT32, HYBRID_LADDER, memory_bytes, share)
    return Cluster("two GPUs", (train, infer))


def configurations(dag: PrecisionDag) -> dict[str, Variants]:
    """The plans of row H1."""
    ids = [operator.op_id for operator in dag.adjustable]

    def uniform(variant: Variant) -> Variants:
        return dict.fromkeys(ids, variant)

    def lowered(chosen: Callable[[int, OpId], bool]) -> Variants:
        return {op_id: BFLOAT16 if chosen(number, op_id) else FLOAT32 for number, op_id in enumerate(ids)}

    def mixture(seed: int) -> Variants:
        source = random.Random(seed)
        return {op_id: source.choice(LADDER) for op_id in ids}

    def in_odd_layer(number: int, op_id: OpId) -> bool:
        layer = re.search(r"\blayer\.(\d+)\.", op_id.fqn)
        return (int(layer[1]) if layer else 6 * number // len(ids)) in (1, 3, 5)

    return {
        "float32": uniform(FLOAT32),
        "bfloat16": uniform(BFLOAT16),
        "int8": uniform(INT8),
        "half": lowered(lambda number, _: number % 2 == 1),
        "layers135": lowered(in_odd_layer),
        "mixture0": mixture(0),
        "mixture1": mixture(1),
    }


@attrs.frozen
class Measured:
    """One plan, measured: the period of steps run back to back per repetition, peaks, and what the process holds besides.

    Attributes:
        step_ms: one entry per repetition.
        peak_bytes: ``max_memory_allocated``; reserved_bytes: ``max_memory_reserved``.
        process_bytes: device memory in use when it ended, less what was in use before the process began, where it is alone.
        loss: of the last step.
    """

    step_ms: tuple[float, ...]
    peak_bytes: int
    reserved_bytes: int
    process_bytes: int
    loss: float


class TimeLeft:
    """Whether there is time for one more piece of work, as long as the longest until now; counted from the beginning."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._last = self._longest = 0.0

    def for_another(self, agree: Callable[[float], float] = float) -> bool:
        """To be asked before each piece; ``agree`` takes the largest of all ranks' numbers."""
        now = time.monotonic()
        if self._last:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        return agree(now + self._longest - self._end) <= 0


def write(path: Path, found: Mapping[str, object]) -> None:
    """Put a JSON file in the place of the last one; a process that is killed meanwhile leaves that."""
    write_atomically(path, json.dumps(found).encode())


def kept(path: Path, here: Mapping[str, object]) -> dict[str, Any]:
    """What an earlier process wrote and this one may go on with; nothing where it differs from ``here``: in the commit, the batch,
    the kind of GPU, or the CPU, whose dispatch is part of a step.
    """
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if found and all(_of_kind(found.get(name)) == _of_kind(value) for name, value in here.items()) else {}


def _of_kind(value: Any) -> Any:
    """A machine's memory differs a little from one to the next."""
    return {name: value[name] for name in ("cpu", "cores")} if isinstance(value, dict) and "cpu" in value else value


def with_turn(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with one more; of a plan and a way that were measured before the steps of all turns count, and the largest peaks."""
    for number, earlier in enumerate(runs):
        if (earlier["plan"], earlier["label"]) == (run["plan"], run["label"]):
            before, now, turns = earlier["measured"], run["measured"], earlier["turns"]
            measured = {**now, "step_ms": (*before["step_ms"], *now["step_ms"])}
            measured |= {name: max(before[name], now[name]) for name in now if name.endswith("_bytes")}
            measured["alone_ms"] = (turns * before["alone_ms"] + now["alone_ms"]) / (turns + 1)
            return [*runs[:number], {**run, "measured": measured, "turns": turns + 1}, *runs[number + 1 :]]
    return [*runs, run]


def cap_memory(nbytes: float | None) -> None:
    """Limit what PyTorch's allocator may reserve on the current GPU; None: no longer."""
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        share = 1.0 if nbytes is None else min(1.0, max(0.0, nbytes / total))
        torch.cuda.set_per_process_memory_fraction(share)


def release() -> None:
    """Give back what the last plan held."""
    gc.collect()
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def repeated(steps: int, step_s: float) -> int:
    """How many steps of a length one repetition has."""
    return min(steps, max(LEAST_STEPS, math.ceil(REPETITION_S / max(step_s, 1e-6))))


def measure(
    step: Callable[[], Any], steps: int, *, level: Callable[[], None] = lambda: None, agree: Callable[[float], float] = float
) -> Measured:
    """Time a training step and watch its memory.

    Args:
        step: one step; returns its loss.
        steps: of one repetition, at most.
        level: brings all ranks to the same moment.
        agree: makes one number of what all ranks have.
    """
    for _ in range(WARM_UP):
        step()
    synchronize()
    begin = time.perf_counter()
    loss = step()
    synchronize()
    steps = repeated(steps, agree(time.perf_counter() - begin))
    times = []
    for _ in range(REPETITIONS):
        synchronize()
        level()
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step()
        synchronize()
        times.append((time.perf_counter() - begin) / steps * 1e3)
    if DEVICE == "cpu":
        return Measured(tuple(times), 1, 1, 1, float(loss.detach()))
    free, total = torch.cuda.mem_get_info()
    return Measured(
        tuple(times), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free, float(loss.detach())
    )


Phase = Callable[[], Any]


def phases(job: Job, model: torch.nn.Module, batch: int, seed: int = 0) -> tuple[Phase, Phase, Phase]:
    """Forward, which returns the loss, backward and update of a step on this process's GPU, with one batch that stays there."""
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    data = job.batch(seed, batch).to(DEVICE)
    losses: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        losses.append(job.compute_loss(data, model))
        return losses[0]

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return forward, backward, update


def in_turn(parts: tuple[Phase, Phase, Phase]) -> Callable[[], torch.Tensor]:
    """A training step of its phases; returns its loss."""
    forward, backward, update = parts

    def step() -> torch.Tensor:
        loss: torch.Tensor = forward()
        backward()
        update()
        return loss

    return step


def host_times(parts: tuple[Phase, Phase, Phase]) -> dict[str, object]:
    """The CPU's side of a step: ``issue_ms``, its time to issue each phase to an idle GPU, and ``call_us``, its time for a small
    call of PyTorch on itself, which says whether it is now as fast as at another time.
    """
    rows = []
    for _ in range(REPETITIONS):
        row = []
        for part in parts:
            synchronize()
            begin = time.perf_counter()
            part()
            row.append((time.perf_counter() - begin) * 1e3)
        rows.append(row)
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    return {"issue_ms": medians, "call_us": Stopwatch(torch.device("cpu")).overhead_ns / 1e3}

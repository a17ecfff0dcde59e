"""Where a step that misses its bound spends its time: its kernels, their bytes at the copy rate, and what the CPU does."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from kernels.bench import Bench
from kernels.job_kernels import offered
from kernels.whole_model import Setting
from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import Producer
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import CallShapes, operator_requests
from qsync_core.kernels.roofline import read_bytes
from qsync_torch.benchmarking.peaks import copy_calls
from qsync_torch.benchmarking.race import race
from qsync_torch.devices import device_facts
from qsync_torch.dtypes import PRECISION

STEPS = 3
LONGEST, NAME = 32, 90
"""How many kernels are listed, and how much of their names."""
PARTS = {
    "quantization": re.compile(r"quantize|partial_absmax|rows_of_many|partials_of_many|round_many|transpose_bytes"),
    "producers": re.compile(
        r"channel_(statistics|coefficients)|normalize_|_gradient|round_(normalized|activated)|activate_|absmax_of_activated|finish_sums"
    ),
    "attention": re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE),
    "products": re.compile(r"gemm|cutlass|xmma|wgrad|dgrad|fprop|cudnn|cublas|convolve|nvjet|sm\d\d_", re.IGNORECASE),
    "optimizer": re.compile(r"multi_tensor|adam|sgd", re.IGNORECASE),
}
"""Kernels by their names, in this order; what no pattern finds are PyTorch's and inductor's own."""
REST = "elementwise and the rest"


class Kernel(NamedTuple):
    """A kernel of a step: milliseconds and launches of one step."""

    name: str
    ms: float
    launches: float


def part_of(kernel: str) -> str:
    """Which part of a step a kernel is."""
    return next((part for part, pattern in PARTS.items() if pattern.search(kernel)), REST)


def floor_bytes(dag: PrecisionDag, setting: Setting, device: torch.device, lowered: Collection[OpId] | None = None) -> Counter[str]:
    """Bytes that a step's operators must read and write, each operand once for each pass that the mathematics needs.

    Products: as their requests say, and what they write.  Chains, forward and backward: their input (twice where statistics come
    first), a residual, their result in 16 bit where others read it, its 8-bit copy, and what is kept.

    Args:
        lowered: the operators that have the setting's variant, all by default; the others are in the base.
    """
    base = Variant.of(PRECISION[setting.autocast or torch.float32])
    variant = setting.variant or base
    low, found = variant.compute.needs_scale, Counter[str]()
    for operator in dag.adjustable:
        call, own = CallShapes.of(operator), variant if lowered is None or operator.op_id in lowered else base
        for asked in operator_requests(call, offered(own, call), *device_facts(device)):
            is_quantization = asked.request.op == Op.QUANTIZE
            if is_quantization and setting.fused and asked.role == Op.QUANTIZE:
                continue  # the producer writes it
            wide = 4 if asked.request.op in (Op.LINEAR_GRAD_WEIGHT, Op.CONV2D_GRAD_WEIGHT) else 2
            written = math.prod(asked.result_shape) * (1 if is_quantization else wide)
            found["quantization" if is_quantization else "products"] += read_bytes(asked) + written
    kept = 1 if setting.saved else 2
    part = "producers" if setting.fused and low else REST
    for chain in chains_of(dag):
        numel = math.prod(dag[chain.last].output_shape)
        passes = 2 if chain.producer is Producer.BATCH_NORM else 1
        copied, floats = low and bool(chain.product_readers), len(chain.readers) > len(chain.product_readers) or not low
        forward = 2 * passes + 2 * (chain.residual is not None) + 2 * floats + copied + (1 if setting.saved else 0)
        backward = passes * (2 + kept) + 2 + 2 * (chain.residual is not None)
        if chain.factor is not None:
            forward, backward = forward + 2 + (1 if setting.saved else 0), backward + kept + 2
        found[part] += numel * (forward + backward)
    return found


def copy_bytes_per_s(bench: Bench) -> float:
    """The rate of a large copy, read and written."""
    measured, _ = race({"copy": copy_calls(bench.device)}, bench.device, rounds=7, timer=bench.timer)
    return 2 * (1 << 30 if bench.device.type == "cuda" else 1 << 25) / (measured["copy"].median_ns * 1e-9)


def recorded(step: Callable[[], None], device: torch.device) -> Sequence[Any]:
    """What PyTorch's profiler sees of some steps, by name."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return seen.key_averages()  # type: ignore[no-any-return]


def kernels_of(events: Sequence[Any], device: torch.device) -> list[Kernel]:
    """The kernels of recorded steps; on a CPU its operators."""
    found = []
    for event in events:
        on_device = str(event.device_type).endswith("CUDA")
        # What PyTorch marks on the device's line, such as the optimizer's step, is the time of kernels that are there too.
        if on_device == (device.type == "cuda") and not (on_device and event.is_user_annotation):
            taken_us = event.self_device_time_total if on_device else event.self_cpu_time_total
            found.append(Kernel(event.key, taken_us / 1e3 / STEPS, event.count / STEPS))
    return found


def lines(title: str, kernels: Sequence[Kernel], floors: Mapping[str, int], copy_bytes_per_s: float) -> Iterator[str]:
    """A table of the parts of a step: time, launches, bytes at least, and the share of the copy rate that this is; and the kernels
    that take the longest."""
    time_ms, launches = Counter[str](), Counter[str]()
    for kernel in kernels:
        time_ms[part_of(kernel.name)] += kernel.ms
        launches[part_of(kernel.name)] += kernel.launches
    yield f"{title}: {sum(time_ms.values()):.2f} ms busy a step, copy rate {copy_bytes_per_s / 1e12:.2f} TB/s"
    yield f"  {'part':26} {'ms':>8} {'launches':>9} {'GiB at least':>13} {'ms at copy rate':>16} {'share':>6}"
    for part in sorted({*time_ms, *floors}, key=lambda part: -time_ms[part]):
        floor = floors.get(part, 0)
        floor_ms = floor / copy_bytes_per_s * 1e3
        share = f"{floor_ms / time_ms[part]:6.0%}" if time_ms[part] and floor else " " * 6
        yield f"  {part:26} {time_ms[part]:8.2f} {launches[part]:9.0f} {floor / 2**30:13.2f} {floor_ms:16.2f} {share}"
    yield f"  the {LONGEST} kernels that take the longest, of {len(kernels)}"
    for kernel in sorted(kernels, key=lambda kernel: -kernel.ms)[:LONGEST]:
        yield f"  {part_of(kernel.name):26} {kernel.ms:8.2f} {kernel.launches:9.0f} {kernel.name[:NAME]}"


def host_lines(title: str, events: Sequence[Any]) -> Iterator[str]:
    """Where the CPU spends the most time of its own while it issues recorded steps: PyTorch's operators, calls of CUDA, and
    functions of autograd, of which our operators are some; Python between operators is theirs, or of the module around them."""
    times = Counter[str]()
    calls = Counter[str]()
    for event in events:
        if not str(event.device_type).endswith("CUDA"):
            times[event.key] += event.self_cpu_time_total / 1e3 / STEPS
            calls[event.key] += event.count / STEPS
    yield f"{title}: {sum(times.values()):.2f} ms of the CPU to issue a step, under the profiler"
    for name, taken_ms in times.most_common(LONGEST):
        yield f"  {taken_ms:8.2f} ms {calls[name]:9.0f} calls {name[:NAME]}"

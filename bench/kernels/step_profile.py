"""What a training step is made of: its kernels, how long the device is busy, and what the CPU issues them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_STEPS = 3
_KERNELS = 40


def write_profile(step: Callable[[], None], device: torch.device, path: Path, title: str) -> str:
    """Profile a few steps, write the tables to ``path``, and return a line that sums them up."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as recorded:
        begin = _now(device)
        for _ in range(_STEPS):
            step()
        wall_ms = (_now(device) - begin) * 1e3 / _STEPS
    events = recorded.key_averages()
    kernels = sorted((e for e in events if str(e.device_type).endswith("CUDA")), key=lambda e: -e.self_device_time_total)
    busy_ms = sum(e.self_device_time_total for e in kernels) / 1e3 / _STEPS
    launches = sum(e.count for e in kernels) / _STEPS
    own_cpu_ms = sum(e.self_cpu_time_total for e in events if not str(e.device_type).endswith("CUDA")) / 1e3 / _STEPS
    summary = (
        f"{title}: {wall_ms:.2f} ms a step under the profiler, device busy {busy_ms:.2f} ms in {launches:.0f} kernels, "
        f"CPU {own_cpu_ms:.2f} ms"
    )
    lines = [summary, "", f"{'ms/step':>9} {'calls':>7} {'µs each':>9}  kernel"]
    for event in kernels[:_KERNELS]:
        each = event.self_device_time_total / max(event.count, 1)
        lines.append(
            f"{event.self_device_time_total / 1e3 / _STEPS:9.3f} {event.count / _STEPS:7.0f} {each:9.1f}  {event.key[:150]}"
        )
    lines += ["", f"{'ms/step':>9} {'calls':>7}  on the CPU"]
    on_cpu = sorted((e for e in events if not str(e.device_type).endswith("CUDA")), key=lambda e: -e.self_cpu_time_total)
    for event in on_cpu[:_KERNELS]:
        lines.append(f"{event.self_cpu_time_total / 1e3 / _STEPS:9.3f} {event.count / _STEPS:7.0f}  {event.key[:150]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return summary


def _now(device: torch.device) -> float:
    import time

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

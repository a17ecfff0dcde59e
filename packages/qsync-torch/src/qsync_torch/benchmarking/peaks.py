"""What the device reaches here and now: the rate of a large copy, and of large products in every format.

Shares are of these, measured in the same run, not of a datasheet: of the shortest sample, because whatever else runs can only lower
them, and of a product of the run itself where one was faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping

import attrs
import torch

from qsync_torch.aten.int8 import int8_product
from qsync_torch.benchmarking.race import Thunk, race

_CUDA_SIDE = 8192
_CPU_SIDE = 512
_EIGHT_BIT = ("int8", "float8_e4m3fn")


@attrs.frozen
class Peaks:
    """Measured limits of a device.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written by a large copy, per second.
        flops: operations per second of the fastest large product by format; the 8-bit formats share the best of both.
    """

    copy_bytes_per_s: float
    flops: Mapping[str, float]

    def raised(self, reached: Iterable[tuple[str, float]]) -> Peaks:
        """The same where products of a run, given as format and operations per second, were faster than the large one."""
        flops = dict(self.flops)
        for name, rate in reached:
            flops[name] = max(flops.get(name, 0.0), rate)
        return Peaks(self.copy_bytes_per_s, _alike_in_8_bit(flops))

    def as_rates(self) -> dict[str, float]:
        """All of them by name, the copy's as ``copy``."""
        return {"copy": self.copy_bytes_per_s, **self.flops}

    def share(self, flops: int, floor_bytes: int, arithmetic: str, time_ns: float) -> tuple[float, str]:
        """Share of what the limits allow, and which of them binds: ``compute`` or ``bandwidth``."""
        memory_s = floor_bytes / self.copy_bytes_per_s
        compute_s = flops / self.flops[arithmetic] if flops and self.flops.get(arithmetic) else 0.0
        bound = "compute" if compute_s > memory_s else "bandwidth"
        return max(compute_s, memory_s) / (time_ns * 1e-9), bound


def copy_calls(device: torch.device, nbytes: int = 0) -> tuple[Thunk, ...]:
    """Copies between large tensors, on a GPU several times its L2 cache."""
    nbytes = nbytes or (1 << 30 if device.type == "cuda" else 1 << 25)
    source, target = (
        torch.randn(nbytes // 4, dtype=torch.float32, device=device),
        torch.empty(nbytes // 4, dtype=torch.float32, device=device),
    )
    return functools.partial(target.copy_, source), functools.partial(source.copy_, target)


def measure_peaks(device: torch.device, formats: Collection[str] | None = None) -> Peaks:
    """Measure them; a format that the device does not multiply is left out.

    Args:
        formats: names of those that are wanted; None for all.
    """
    side = _CUDA_SIDE if device.type == "cuda" else _CPU_SIDE
    nbytes = 1 << 30 if device.type == "cuda" else 1 << 25
    contenders: dict[str, tuple[Thunk, ...]] = {"copy": copy_calls(device, nbytes)}
    makers: dict[str, Callable[[int, torch.device], Thunk]] = {
        "float32": functools.partial(_float_product, torch.float32),
        "float16": functools.partial(_float_product, torch.float16),
        "bfloat16": functools.partial(_float_product, torch.bfloat16),
        "int8": _int8_product,
        "float8_e4m3fn": _float8_product,
    }
    for name, make in makers.items():
        if formats is not None and name not in formats:
            continue
        try:
            contenders[name] = (make(side, device), make(side, device))
        except (RuntimeError, AttributeError):
            continue
    measured, _ = race(contenders, device, rounds=7, budget_s=3.0)
    flops = {name: 2 * side**3 / (found.fastest_ns * 1e-9) for name, found in measured.items() if name != "copy"}
    return Peaks(2 * nbytes / (measured["copy"].fastest_ns * 1e-9), _alike_in_8_bit(flops))


def _alike_in_8_bit(flops: dict[str, float]) -> dict[str, float]:
    best = max((flops.get(name, 0.0) for name in _EIGHT_BIT), default=0.0)
    return flops | (dict.fromkeys(_EIGHT_BIT, best) if best else {})


def _float_product(dtype: torch.dtype, side: int, device: torch.device) -> Thunk:
    a, b = (torch.randn(side, side, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def _int8_product(side: int, device: torch.device) -> Thunk:
    a, b = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device) for _ in range(2))
    return functools.partial(int8_product, a, b)


def _float8_product(side: int, device: torch.device) -> Thunk:
    if device.type != "cuda":
        raise RuntimeError("float8 products are measured on CUDA devices")
    a, b = (torch.randn(side, side, dtype=torch.float32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one, by_tensor = torch.ones((), dtype=torch.float32, device=device), torch.nn.functional.ScalingType.TensorWise
    return functools.partial(torch.nn.functional.scaled_mm, a, b.t(), one, by_tensor, one, by_tensor)

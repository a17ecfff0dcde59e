"""Rows K12: stored weights written dense in bfloat16, against the copy rate, PyTorch's operators and bitsandbytes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import attrs
import torch

from qsync_core.ir.precision import Precision, Storage
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_torch.aten.stored_weights import StoredWeight, dequantize_weight, quantize_weight
from qsync_torch.benchmarking.peaks import copy_calls
from qsync_torch.benchmarking.race import Thunk, race
from qsync_torch.devices import device_facts
from qsync_torch.kernels.selection import AUTO, find_backends

from .bench import Bench, Row, best_of, ratio, ratio_spread

SHAPES = ((4096, 4096), (2048, 5632))
_QUICK = ((256, 256), (64, 704))
_ROTATED = 384 << 20
"""Bytes of all operands together: several times an L2 cache."""
_COPY, _LIBRARY = "copy", "bitsandbytes"


def stored_rows(bench: Bench) -> Iterator[Row]:
    """K12-<storage>-<shape>, and the same with -aten and -bitsandbytes."""
    for shape in _QUICK if bench.quick else SHAPES:
        for storage in (Storage.NF4, Storage.INT8_ROW, Storage.INT8_BLOCK):
            yield from _rows(bench, storage, shape)


def _rows(bench: Bench, storage: Storage, shape: tuple[int, int]) -> Iterator[Row]:
    once = quantize_weight(torch.randn(shape, device=bench.device), storage)
    nbytes = once.nbytes + 2 * shape[0] * shape[1]
    sets = 2 if bench.quick else max(2, _ROTATED // nbytes)
    operands = [once, *(quantize_weight(torch.randn(shape, device=bench.device), storage) for _ in range(sets - 1))]
    outs = [torch.empty(shape, dtype=torch.bfloat16, device=bench.device) for _ in operands]
    contenders = _of_backends(bench, storage, shape, operands, outs)
    own = [name for name in contenders if name != "aten"] or ["aten"]
    contenders[_COPY] = copy_calls(bench.device)
    if storage is Storage.NF4 and importlib.util.find_spec(_LIBRARY) is not None:
        contenders[_LIBRARY] = _by_library(operands, outs)
    measured, failures = race(contenders, bench.device, rounds=5 if bench.quick else 21, timer=bench.timer)
    name = f"{storage} {shape[0]}x{shape[1]} to bfloat16"
    bench.say(f"{name}: " + "; ".join(f"{who} {found.median_ns / 1e3:.1f} µs" for who, found in measured.items()))
    for who, why in failures.items():
        bench.say(f"{name}: {who}: {why}")
    best = best_of(measured, own)
    rate = 2 * contenders[_COPY][0].args[0].nbytes / measured[_COPY].median_ns
    took = measured[best].median_ns
    id_ = f"K12-{storage}-{shape[0]}x{shape[1]}"
    spread = f"{took / 1e3:.1f} µs at {rate / 1e3:.2f} TB/s; IQR/median {measured[best].spread:.3f}"
    what = f"{name}: what is read and written, at the copy rate, over the time it takes ({best})"
    yield bench.row(id_, what, nbytes / rate / took, "fraction", spread=spread)
    others = {"aten": "PyTorch's operators", _LIBRARY: "bitsandbytes' dequantize_4bit"}
    for who, whose in others.items():
        if who in measured and who != best:
            times = f"{measured[who].median_ns / 1e3:.1f} and {took / 1e3:.1f} µs"
            text = f"{ratio_spread(measured[who], measured[best])}; {times}"
            yield bench.row(f"{id_}-{who}", f"{name}: {whose} over {best}", ratio(measured[who], measured[best]), "×", spread=text)


def _of_backends(
    bench: Bench, storage: Storage, shape: tuple[int, int], operands: list[StoredWeight], outs: list[torch.Tensor]
) -> dict[str, tuple[Thunk, ...]]:
    """Every configuration of every backend that takes the request, and PyTorch's operators."""
    variant = attrs.evolve(Variant.plain(Precision.BFLOAT16), storage=storage)
    kind, capability = device_facts(bench.device)
    request = KernelRequest(Op.DEQUANTIZE, variant, (shape,), device_kind=kind, compute_capability=capability)
    found: dict[str, tuple[Thunk, ...]] = {}
    for backend in find_backends(AUTO):
        if backend.name == "aten" or backend.unsupported_reasons(request):
            continue
        for config in backend.candidate_configs(request):
            kernel = backend.build(request, config)
            calls = tuple(functools.partial(kernel, *stored, out) for stored, out in zip(operands, outs, strict=True))
            found[f"{backend.name} {config.text}"] = calls
    # Not the backend, which asks bitsandbytes where that is installed.
    found["aten"] = tuple(functools.partial(dequantize_weight, stored, storage, shape, torch.bfloat16) for stored in operands)
    return found


def _by_library(operands: list[StoredWeight], outs: list[torch.Tensor]) -> tuple[Thunk, ...]:
    """That library's own function, with the state that it has of a weight stored so."""
    from bitsandbytes import functional

    calls = []
    for stored, out in zip(operands, outs, strict=True):
        code = functional.create_dynamic_map().to(out.device)
        nested = functional.QuantState(absmax=stored.scale, code=code, blocksize=256, dtype=torch.float32)
        table = functional.get_4bit_type("nf4", device=out.device)
        state = functional.QuantState(
            absmax=stored.constants, shape=out.shape, code=table, blocksize=64, quant_type="nf4", dtype=out.dtype,
            offset=stored.offset, state2=nested,
        )  # fmt: skip
        calls.append(
            functools.partial(functional.dequantize_4bit, stored.values.view(-1, 1), state, out=out if out.is_cuda else None)
        )
    return tuple(calls)

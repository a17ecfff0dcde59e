"""A lower bound of a kernel's time: what reading its operands and multiplying them takes at the device's peak rates.

Published as the roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009).  Tuning stops where a configuration is so close
to the bound that no other can win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import OperatorRequest
from qsync_core.kinds import KINDS

_OPS_PER_CYCLE = {
    "7.0": {"float16": 1024},
    "7.5": {"int8": 2048, "float16": 1024},
    "8.0": {"int8": 4096, "float16": 2048, "bfloat16": 2048},
    "8.6": {"int8": 2048, "float16": 1024, "bfloat16": 1024},
    "8.9": {"int8": 2048, "float8_e4m3fn": 2048, "float16": 1024, "bfloat16": 1024},
    "9.0": {"int8": 8192, "float8_e4m3fn": 8192, "float16": 4096, "bfloat16": 4096},
}
"""Dense multiplications and additions of a multiprocessor in one cycle, by compute capability and format.  float32 may run as TF32,
so nothing is said of it.  Source: NVIDIA's architecture whitepapers; A100: 624 TOP/s int8 over 108 multiprocessors at 1.41 GHz."""


@attrs.frozen
class Peaks:
    """What a device can do at most: bytes per nanosecond from memory, and operations per nanosecond by format (absent: unknown)."""

    bytes_per_ns: float
    ops_per_ns: Mapping[str, float] = attrs.field(factory=dict, hash=False)

    @classmethod
    def of_cuda(cls, bytes_per_ns: float, compute_capability: str, multiprocessors: int, clock_ghz: float) -> Peaks:
        """Find the peaks of a CUDA device; the products of an unknown chip bound nothing."""
        rates = _OPS_PER_CYCLE.get(compute_capability, {})
        return cls(bytes_per_ns, {name: per_cycle * multiprocessors * clock_ghz for name, per_cycle in rates.items()})


def operations(asked: OperatorRequest) -> int:
    """Multiplications and additions of a product; 0 for a quantization, which memory binds."""
    if asked.request.op == Op.QUANTIZE:
        return 0
    kind, _, product = asked.request.op.partition(".")
    (first, second), result = asked.request.shapes, asked.result_shape
    x, w, y = {
        "output": (first, second, result),
        "grad_input": (result, second, first),
        "grad_weight": (second, result, first),
    }[product]
    return KINDS[kind].flops(x, w, y)


def read_bytes(asked: OperatorRequest) -> int:
    """Bytes that must come from memory: every operand once (what is written may stay in a cache)."""
    request = asked.request
    if request.op == Op.QUANTIZE:
        return math.prod(request.shapes[0]) * asked.source.nbytes
    first, second = request.shapes
    quantized = request.variant.compute.nbytes
    return math.prod(first) * asked.source.nbytes + math.prod(second) * quantized


def lower_bound_ns(asked: OperatorRequest, peaks: Peaks) -> int:
    """No kernel of the request is faster on the device, in nanoseconds; 0 where nothing is known."""
    memory = read_bytes(asked) / peaks.bytes_per_ns if peaks.bytes_per_ns > 0 else 0.0
    rate = peaks.ops_per_ns.get(str(_product_format(asked)), 0.0)
    return int(max(memory, operations(asked) / rate if rate else 0.0))


def _product_format(asked: OperatorRequest) -> Precision:
    """The fastest format in which the product could be computed: the narrower of its operands' where both are of one kind."""
    return asked.source if not asked.request.op.endswith(".output") else asked.request.variant.compute

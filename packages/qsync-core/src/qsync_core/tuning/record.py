"""Tuning records: what was measured for one kernel on one device, in words that people can read, ship and join."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.ir import checks
from qsync_core.ir.precision import Granularity
from qsync_core.ir.semantics import steps_of
from qsync_core.kernels.backend import KernelRequest, Op


def _check_sizes(instance: object, attribute: attrs.Attribute[Any], value: tuple[tuple[int, ...], ...]) -> None:
    if not all(0 <= size <= checks.MAX_INT for shape in value for size in shape):
        raise ValueError(f"shapes must be lists of sizes, got {value!r}")


@attrs.frozen
class TuningKey:
    """What a measured latency is valid for.

    Attributes:
        device: the device's name; compute_capability: empty on a CPU.
        op: one of :class:`~qsync_core.kernels.backend.Op`.
        formats: of the operands and the result, with granularities, as text; whatever does not change the kernel is left out.
        shapes: of the operands; attributes: geometry and the like.
        layout: ``contiguous``, ``channels_last`` or ``strided``.
        software: what matters (torch, cuda, the backend's version) to its version.
    """

    device: str
    compute_capability: str
    backend: str
    op: str
    formats: str
    shapes: tuple[tuple[int, ...], ...] = attrs.field(validator=_check_sizes)
    attributes: Mapping[str, str] = attrs.field(hash=False)
    layout: str
    software: Mapping[str, str] = attrs.field(hash=False)

    @property
    def text(self) -> str:
        """A canonical identifier: equal keys have equal text."""
        return json.dumps(to_plain(self))

    @classmethod
    def parse(cls, text: str) -> TuningKey:
        """The key of that text.

        Raises:
            ValueError: saying what is wrong with it.
        """
        return _parse(text)

    @property
    def family(self) -> str:
        """The same without the shapes: keys of one family differ in their shapes only."""
        return json.dumps(to_plain(self) | {"shapes": [len(shape) for shape in self.shapes]})


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> TuningKey:
    return from_plain(json.loads(text), TuningKey)


@attrs.frozen
class Measurement:
    """One configuration: its median latency over ``samples`` runs in nanoseconds, or why it does not run."""

    latency_ns: int = attrs.field(default=0, validator=checks.non_negative_int)
    samples: int = attrs.field(default=0, validator=checks.non_negative_int)
    failure: str = ""


@attrs.frozen
class TuningRecord:
    """The best configuration found for a key, its latency in nanoseconds, and how many configurations were tried."""

    key: TuningKey
    config: str
    latency_ns: int = attrs.field(validator=checks.non_negative_int)
    tried: int = attrs.field(default=1, validator=checks.non_negative_int)


def formats_of(request: KernelRequest) -> str:
    """The part of a request's variant that its kernel depends on."""
    variant, op = request.variant, request.op
    parts = [str(variant.compute)]
    product = op.partition(".")[2] if op in Op.UNFUSED else ""
    rows = ["x=row"] if variant.x_granularity is Granularity.PER_ROW else []  # the gradient's scales follow the activation's
    if op == Op.QUANTIZE:
        parts += [f"x={variant.x_granularity}", f"round={variant.rounding}"]
    elif op == Op.DEQUANTIZE:
        parts += [f"store={variant.storage}"]
    elif product == "output":
        parts += [f"out={variant.output}", f"x={variant.x_granularity}", f"w={variant.w_granularity}"]
    elif product == "grad_input":
        parts += [f"gi={variant.grad_input}", f"grad={steps_of(variant).grad_input.precision}", f"w={variant.w_granularity}"]
        parts += [f"out={variant.output}", *rows] if variant.grad_input.needs_scale else []
    else:
        parts += [f"gw={variant.grad_weight}", f"grad={steps_of(variant).grad_weight.precision}", f"x={variant.x_granularity}"]
        parts += [f"w={variant.w_granularity}"] if variant.grad_weight.needs_scale else []
    parts += ["columns"] if request.column_scaled else []
    return ";".join(parts) if variant.symmetric else ";".join([*parts, "sym=false"])


def layout_of(request: KernelRequest) -> str:
    """The layout of a request's operands, in a word."""
    if not request.contiguous:
        return "strided"
    return "channels_last" if request.op in Op.CONVOLUTIONS else "contiguous"


def shape_distance(one: TuningKey, other: TuningKey) -> float:
    """How far apart the shapes of two keys of one family are: the sum of the factors between their dimensions, in powers of 2."""
    pairs = [(a, b) for s, t in zip(one.shapes, other.shapes, strict=True) for a, b in zip(s, t, strict=True)]
    return sum(0.0 if a == b else abs(math.log2(a) - math.log2(b)) if a and b else math.inf for a, b in pairs)


def work(key: TuningKey) -> int:
    """What a kernel's time grows with to first order: products of a multiplication, elements of a quantization."""
    if key.op in (Op.QUANTIZE, Op.DEQUANTIZE):
        return math.prod(key.shapes[0])
    first, second = key.shapes
    if key.op.endswith(".grad_weight"):
        return math.prod(first) * second[1]
    return math.prod(first) * math.prod(second) // max(1, first[1])

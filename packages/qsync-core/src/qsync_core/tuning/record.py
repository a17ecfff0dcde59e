"""Tuning records: what was measured for one kernel on one device, as lines of JSON that people can read, ship and join.

A line is either one measurement of one configuration, or the result of a finished search.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from qsync_core.ir import checks
from qsync_core.ir.semantics import steps_of
from qsync_core.kernels.backend import KernelRequest, Op


@attrs.frozen
class TuningKey:
    """What a measured latency is valid for.

    Attributes:
        device: the device's name; compute_capability: empty on a CPU.
        backend: whose kernel.
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
    shapes: tuple[tuple[int, ...], ...]
    attributes: Mapping[str, str] = attrs.field(hash=False)
    layout: str
    software: Mapping[str, str] = attrs.field(hash=False)

    @property
    def text(self) -> str:
        """A canonical identifier: equal keys have equal text."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    @property
    def family(self) -> str:
        """The same without the shapes: keys of one family differ in their shapes only."""
        return json.dumps(attrs.asdict(self) | {"shapes": [len(shape) for shape in self.shapes]}, sort_keys=True)


@attrs.frozen
class Measurement:
    """One configuration: its median latency over ``samples`` runs in nanoseconds, or why it does not run."""

    latency_ns: int = attrs.field(default=0, validator=checks.non_negative_int)
    samples: int = attrs.field(default=0, validator=checks.non_negative_int)
    failure: str = ""

    @property
    def trust(self) -> tuple[bool, int, int, str]:
        """A key that orders measurements of one configuration: of two the one with the larger trust counts."""
        return (not self.failure, self.samples, -self.latency_ns, self.failure)


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
    if op == Op.QUANTIZE:
        parts += [f"x={variant.x_granularity}", f"round={variant.rounding}"]
    elif product == "output":
        parts += [f"out={variant.output}", f"x={variant.x_granularity}", f"w={variant.w_granularity}"]
    elif product == "grad_input":
        parts += [f"gi={variant.grad_input}", f"grad={steps_of(variant).grad_input.precision}", f"w={variant.w_granularity}"]
        parts += [f"out={variant.output}"] if variant.grad_input.needs_scale else []
    else:
        parts += [f"gw={variant.grad_weight}", f"grad={steps_of(variant).grad_weight.precision}", f"x={variant.x_granularity}"]
        parts += [f"w={variant.w_granularity}"] if variant.grad_weight.needs_scale else []
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
    if key.op == Op.QUANTIZE:
        return math.prod(key.shapes[0])
    first, second = key.shapes
    if key.op.endswith(".grad_weight"):
        return math.prod(first) * second[1]
    return math.prod(first) * math.prod(second) // max(1, first[1])


def to_line(key: TuningKey, content: Mapping[str, Any]) -> str:
    """A line of a tuning file."""
    return json.dumps(attrs.asdict(key) | dict(content), ensure_ascii=False) + "\n"


def measurement_line(key: TuningKey, config: str, found: Measurement) -> str:
    """The line of a measurement."""
    what: dict[str, Any] = {"config": config}
    what |= {"failure": found.failure} if found.failure else {"latency_ns": found.latency_ns, "samples": found.samples}
    return to_line(key, what)


def record_line(record: TuningRecord) -> str:
    """The line of a finished search."""
    return to_line(record.key, {"config": record.config, "latency_ns": record.latency_ns, "best_of": record.tried})


def read_line(text: str) -> tuple[TuningKey, str, Measurement] | TuningRecord:
    """Read a line.

    Raises:
        ValueError: saying what is wrong with it.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, got {type(data).__name__}")
    data = dict(data)

    def take(name: str, kind: type, *default: Any) -> Any:
        if name not in data and default:
            return default[0]
        if name not in data:
            raise ValueError(f"it lacks {name!r}")
        value = data.pop(name)
        if type(value) is not kind:
            raise ValueError(f"{name!r} must be a {_NAMES[kind]}, got {type(value).__name__}")
        return value

    key = TuningKey(
        device=take("device", str),
        compute_capability=take("compute_capability", str),
        backend=take("backend", str),
        op=take("op", str),
        formats=take("formats", str),
        shapes=_shapes(take("shapes", list)),
        attributes=_texts("attributes", take("attributes", dict)),
        layout=take("layout", str),
        software=_texts("software", take("software", dict)),
    )
    config = take("config", str)
    failure = take("failure", str, "")
    if failure:
        found: tuple[TuningKey, str, Measurement] | TuningRecord = (key, config, Measurement(failure=failure))
    else:
        latency_ns = take("latency_ns", int)
        if "best_of" in data:
            found = TuningRecord(key, config, latency_ns, take("best_of", int))
        else:
            found = (key, config, Measurement(latency_ns, take("samples", int)))
    if data:
        raise ValueError(f"it has an unknown entry {min(data)!r}")
    return found


_NAMES = {str: "text", int: "number", list: "list", dict: "table"}


def _shapes(value: list[Any]) -> tuple[tuple[int, ...], ...]:
    if not all(isinstance(shape, list) and all(type(n) is int and 0 <= n <= checks.MAX_INT for n in shape) for shape in value):
        raise ValueError(f"'shapes' must be lists of sizes, got {value!r}")
    return tuple(tuple(shape) for shape in value)


def _texts(name: str, value: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(entry, str) for entry in value.values()):
        raise ValueError(f"{name!r} must have texts as values, got {value!r}")
    return value

"""Configurations: the knobs of one kernel, as an object and as the text that plans and tuning records store.

Compile-time knobs choose the library (``config.compiled`` has the run-time knobs at their defaults, so configurations that differ
in run-time knobs only share one library); run-time knobs travel in the kernel's arguments.

The text of a configuration is a canonical list ``path=tma;tile=128x256x128;…`` of every knob that differs from its default.
"""

from __future__ import annotations

import enum
from typing import Any, Self

import attrs

Shape3 = tuple[int, int, int]
"""Rows (m), columns (n) and depth (k), in elements of the operands."""


def shape_text(shape: tuple[int, ...]) -> str:
    """``128x256x64``."""
    return "x".join(map(str, shape))


class Family(enum.StrEnum):
    """Which family of templates a kernel comes from."""

    TMA = "tma"
    """CUTLASS 3.x on sm_90a: operands move by TMA, products run on warp-group tensor cores (wgmma)."""
    MMA = "mma"
    """CUTLASS 2.x on sm_70 and later: cp.async (from sm_80 on) or plain loads, warp-level tensor core instructions."""
    SIMT = "simt"
    """CUTLASS 2.x without tensor cores: any alignment, any chip."""


class Schedule(enum.StrEnum):
    """How the warp groups of a TMA kernel share the work."""

    COOPERATIVE = "cooperative"
    """Two consumer warp groups work on one tile (a tile has at least 128 rows)."""
    PINGPONG = "pingpong"
    """Two consumer warp groups alternate on two tiles: one's epilogue hides behind the other's main loop."""


class Scheduler(enum.StrEnum):
    """How tiles are given to thread blocks."""

    PERSISTENT = "persistent"
    STREAM_K = "streamk"
    """Tiles are split along k so that every SM works to the end."""


class Raster(enum.StrEnum):
    """Direction in which neighbouring thread blocks walk over the output's tiles (run-time knob)."""

    HEURISTIC = "auto"
    ALONG_M = "m"
    ALONG_N = "n"


class AddressIterator(enum.StrEnum):
    """How a 2.x convolution finds its operands' addresses."""

    OPTIMIZED = "optimized"
    ANALYTIC = "analytic"
    """Slower, and right for every geometry."""


@attrs.frozen
class _Knobs:
    """What both kinds of configuration do with their knobs."""

    @property
    def compiled(self) -> Self:
        """The configuration whose library runs this one: the same compile-time knobs, default run-time knobs."""
        defaults: dict[str, Any] = {"splits": 1, "raster": Raster.HEURISTIC, "swizzle": 1}
        return attrs.evolve(self, **defaults)

    @property
    def text(self) -> str:
        """Canonical text: ``path`` and ``tile`` always, the others where they differ from their defaults, in the class's order."""
        parts = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name in ("path", "tile") or value != field.default:
                parts.append(f"{field.name}={shape_text(value) if isinstance(value, tuple) else value}")
        return ";".join(parts)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of a configuration.

        Raises:
            ValueError: naming the knob that is unknown, repeated or has no such value.
        """
        defaults: dict[str, Any] = {field.name: field.default for field in attrs.fields(cls)}
        values: dict[str, Any] = {}
        for part in text.split(";"):
            name, equals, written = part.partition("=")
            if not equals or name not in defaults:
                known = ", ".join(defaults)
                raise ValueError(f"not a configuration: {text!r} ({part!r} is not one of {known} followed by '=' and a value)")
            if name in values:
                raise ValueError(f"not a configuration: {text!r} ({name} is given twice)")
            try:
                values[name] = _value(defaults[name], written)
            except ValueError as error:
                raise ValueError(f"not a configuration: {text!r} ({name}: {error})") from None
        config = cls(**values)
        if config.text != text:
            raise ValueError(f"not a configuration: {text!r} (its canonical text is {config.text!r})")
        return config


@attrs.frozen
class GemmConfig(_Knobs):
    """How one matrix product out[m, n] = sum over k of a[m, k] * b[n, k] runs.

    Attributes:
        path: family of templates.
        tile: of one thread block (of one CTA of the cluster on the TMA path).
        warp: tile of one warp (2.x paths; elsewhere (0, 0, 0)).
        instruction: tensor core instruction (2.x paths; elsewhere (0, 0, 0)).
        stages: shared memory buffers; 0 takes as many as fit (TMA path only).
        cluster: thread blocks of a cluster along m and n (TMA path only; else (1, 1)).
        schedule: warp groups (TMA path only).
        scheduler: persistent or stream-K (TMA path only).
        splits: run-time knob, parts into which k is split (their sums are added in the workspace); 1 does not split.
        raster: run-time knob, see :class:`Raster`.
        swizzle: run-time knob, width in tiles of the band that blocks walk together (a power of two).
    """

    path: Family = Family.TMA
    tile: Shape3 = (128, 128, 128)
    warp: Shape3 = (0, 0, 0)
    instruction: Shape3 = (0, 0, 0)
    stages: int = 0
    cluster: tuple[int, int] = (1, 1)
    schedule: Schedule = Schedule.COOPERATIVE
    scheduler: Scheduler = Scheduler.PERSISTENT
    splits: int = 1
    raster: Raster = Raster.HEURISTIC
    swizzle: int = 1


@attrs.frozen
class ConvConfig(_Knobs):
    """How one NHWC convolution runs as an implicit matrix product: m = output pixels, n = output channels, k = filter taps * input
    channels of the group.

    Attributes: as of :class:`GemmConfig`, and
        iterator: address computation of the 2.x path.
    """

    path: Family = Family.TMA
    tile: Shape3 = (128, 128, 64)
    warp: Shape3 = (0, 0, 0)
    instruction: Shape3 = (0, 0, 0)
    stages: int = 0
    cluster: tuple[int, int] = (1, 1)
    schedule: Schedule = Schedule.COOPERATIVE
    iterator: AddressIterator = AddressIterator.OPTIMIZED
    splits: int = 1
    raster: Raster = Raster.HEURISTIC
    swizzle: int = 1


Config = GemmConfig | ConvConfig


def _value(default: Any, written: str) -> Any:
    if isinstance(default, enum.StrEnum):
        return type(default)(written)
    if isinstance(default, tuple):
        numbers = tuple(_number(part) for part in written.split("x"))
        if len(numbers) != len(default):
            raise ValueError(f"expected {len(default)} numbers joined by 'x', got {written!r}")
        return numbers
    return _number(written)


def _number(written: str) -> int:
    if not (written.isascii() and written.isdigit() and len(written) < 10):
        raise ValueError(f"expected a whole number, got {written!r}")
    return int(written)

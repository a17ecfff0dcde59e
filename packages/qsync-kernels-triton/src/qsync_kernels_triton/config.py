"""The knobs of the Triton kernels, apart from the kernels, and which of them are worth trying for a product's shape.

Their text is what a plan or a tuning record writes as ``config``.
"""

from __future__ import annotations

from typing import TypeVar

import attrs

from qsync_core.errors import BackendError

_Config = TypeVar("_Config", bound=attrs.AttrsInstance)

MAX_BLOCK = 1 << 16
"""Triton refuses tensors of more than 2**20 elements in one program; beyond 2**16 nothing was ever gained."""
LARGE = 128 << 20
"""Bytes of a tensor beyond which nothing is held in the cache: on an H200, (512, 64, 56, 56) float32 took 5% longer with 24 MiB
held than with none, and (64, 64, 56, 56) 4% less with 40 MiB."""
MAX_PROGRAMS = 4096
"""Every program of the second pass reads all partial maxima of its row."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a program may use on compute capability 9.0; less elsewhere, and Triton then says so when it compiles."""
MULTIPROCESSORS = 132


@attrs.frozen
class QuantizeConfig:
    """How the quantization kernels are launched.

    Those that write a transposed copy beside the other one have tiles of their own: ``programs`` and ``sweep`` alone matter there.

    Attributes:
        block: elements that a program loads at a time; a power of two, at least 64.
        warps: warps of a program.
        programs: how many programs look for the largest magnitude; each leaves a partial maximum.
        keep: bytes at the end of a tensor that the cache is asked to keep between the two passes; tensors of more than
            ``LARGE`` bytes pass through without, because keeping then costs more than it saves.
        hold: 1 where those bytes are to be evicted last, 0 where they are treated as any others.
        sweep: how many programs round; each takes every sweep-th block.  0: one program for each block.
    """

    block: int = 4096
    warps: int = 8
    programs: int = 528
    keep: int = 40 << 20
    sweep: int = 1056
    hold: int = 1

    def __attrs_post_init__(self) -> None:
        if not 64 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two in 64..{MAX_BLOCK}, got {self.block}")
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"warps must be a power of two in 1..32, got {self.warps}")
        if not 1 <= self.programs <= MAX_PROGRAMS:
            raise ValueError(f"programs must be in 1..{MAX_PROGRAMS}, got {self.programs}")
        if self.keep < 0 or self.sweep < 0:
            raise ValueError(f"keep and sweep must not be negative, got {self.keep} and {self.sweep}")
        if self.hold not in (0, 1):
            raise ValueError(f"hold must be 0 or 1, got {self.hold}")

    def __str__(self) -> str:
        return _text(self)

    def kept_of(self, tensor_bytes: int) -> int:
        """How much of a tensor of that size the cache is asked to keep."""
        return self.keep if tensor_bytes <= LARGE or not self.hold else 0

    @classmethod
    def parse(cls, text: str) -> QuantizeConfig:
        """Read ``block=4096;warps=8;programs=528;keep=41943040;sweep=1056;hold=1``; knobs that are left out have their default.

        Raises:
            BackendError: when the text is not of that form.
        """
        return _parsed(cls, text)


ONE_READ = 8192
"""Rows up to this many elements stay in the registers of one program; a backward has γ·g and x̂ of a row, and two sums, there."""


@attrs.frozen
class ProducerConfig:
    """How normalizations and activations are cut into programs.

    Attributes:
        block: elements of a program's tile where tiles are cut freely; a row that is longer and fits is held whole.
        lane: elements of a tile that each thread has.
        strip: channels of a tile of the kernels that write images, at most; those that sum over positions take ``SUM_STRIP``.
        reduce: programs to a multiprocessor of kernels that leave partial sums.
        apply: programs to a multiprocessor of kernels that write, each of many tiles.  0: as many programs as tiles.
    """

    block: int = 2048
    lane: int = 8
    strip: int = 256
    reduce: int = 4
    apply: int = 8

    def __attrs_post_init__(self) -> None:
        for name, least, most in (("block", 64, MAX_BLOCK), ("lane", 1, 64), ("strip", 8, 1024)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name} must be a power of two in {least}..{most}, got {value}")
        if not 1 <= self.reduce <= 32:
            raise ValueError(f"reduce must be in 1..32, got {self.reduce}")
        if not 0 <= self.apply <= 64:
            raise ValueError(f"apply must be in 0..64, got {self.apply}")

    def __str__(self) -> str:
        return _text(self)

    def warps_of(self, tile: int) -> int:
        """Warps of a program with a tile of that many elements."""
        return 1 << min(16, max(1, tile // (32 * self.lane))).bit_length() - 1

    @classmethod
    def parse(cls, text: str) -> ProducerConfig:
        """Read ``block=2048;lane=8;strip=256;reduce=4;apply=8``; knobs that are left out have their default.

        Raises:
            BackendError: when the text is not of that form.
        """
        return _parsed(cls, text)


@attrs.frozen
class StoredConfig:
    """How the kernels that dequantize stored weights are cut into programs.

    Attributes:
        block: elements that a program writes; a power of two, at least 128.
        warps: warps of a program.
    """

    block: int = 4096
    warps: int = 8

    def __attrs_post_init__(self) -> None:
        if not 128 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two in 128..{MAX_BLOCK}, got {self.block}")
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"warps must be a power of two in 1..32, got {self.warps}")

    def __str__(self) -> str:
        return _text(self)

    @classmethod
    def parse(cls, text: str) -> StoredConfig:
        """Read ``block=4096;warps=8``; knobs that are left out have their default.

        Raises:
            BackendError: when the text is not of that form.
        """
        return _parsed(cls, text)


@attrs.frozen
class ProductConfig:
    """How a product is cut into programs.

    Attributes:
        m, n, k: rows and columns of a program's tile of the result, and how much of the contracted dimension it loads at a time.
        warps: warps of a program.
        stages: tiles of the operands in flight.
        group: rows of tiles that are walked together, so that they share columns in the cache.
        tma: 1 where 8-bit operands are read by the tensor memory accelerator (compute capability 9.0), if their layout allows it.
    """

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    tma: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if not 16 <= value <= 512 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two in 16..512, got {value}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps must be a power of two in 1..16, got {self.warps}")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must be in 1..8, got {self.stages}")
        if not 1 <= self.group <= 64:
            raise ValueError(f"group must be in 1..64, got {self.group}")
        if self.tma not in (0, 1):
            raise ValueError(f"tma must be 0 or 1, got {self.tma}")

    def __str__(self) -> str:
        return _text(self)

    @classmethod
    def parse(cls, text: str) -> ProductConfig:
        """Read ``m=128;n=128;k=64;warps=8;stages=3;group=8;tma=0``; knobs that are left out have their default.

        Raises:
            BackendError: when the text is not of that form.
        """
        return _parsed(cls, text)

    def shared_bytes(self, a_bytes: int, b_bytes: int) -> int:
        """Shared memory of the operands' tiles in flight, given the bytes of an element of each."""
        return self.stages * self.k * (self.m * a_bytes + self.n * b_bytes)

    @property
    def sums_per_thread(self) -> int:
        """How many elements of the result a thread sums."""
        return self.m * self.n // (32 * self.warps)

    def cost(self, m: int, n: int, k: int) -> float:
        """Relative time of a product under a wave model: waves of tiles, times the work of a tile at its expected efficiency.

        A tile's efficiency is bound by how often its operands are used, m * n / (m + n) times, and small tiles by latency.
        """
        tiles = -(-m // self.m) * -(-n // self.n)
        waves = -(-tiles // MULTIPROCESSORS)
        reuse = self.m * self.n / (self.m + self.n)
        efficiency = reuse / (reuse + 32)
        return waves * self.m * self.n * -(-k // self.k) * self.k / efficiency


def _cuts(group: int, *sizes: tuple[int, int, int, int, int]) -> tuple[ProductConfig, ...]:
    """Configurations of sizes m, n, k, warps and stages, with one group of tiles for all."""
    return tuple(ProductConfig(*size, group) for size in sizes)


_EIGHT_BIT = _cuts(
    8,
    (128, 256, 128, 8, 3),
    (128, 256, 128, 8, 4),
    (128, 128, 128, 8, 4),
    (128, 128, 128, 4, 4),
    (128, 128, 64, 4, 4),
    (256, 128, 128, 8, 3),
    (256, 128, 64, 8, 4),
    (64, 128, 128, 4, 4),
    (128, 64, 128, 4, 4),
    (64, 256, 128, 4, 3),
    (64, 64, 128, 4, 4),
    (64, 32, 128, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
)
FLOAT8_SUMS = 96
"""Most float32 sums that a thread has of a float8 product.  It keeps them twice (docs/decisions/float8-accumulation.md), and what
does not fit into its 255 registers spills."""
_FLOAT8 = (
    *(ProductConfig(m, n, 128, 8, 3, 8) for m, n in ((128, 128), (64, 256), (256, 64))),
    *(config for config in _EIGHT_BIT if config.sums_per_thread <= FLOAT8_SUMS),
)
_MIXED = _cuts(
    8,
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 32, 4, 4),
    (256, 128, 64, 8, 3),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (16, 64, 64, 4, 4),
)

_POINTWISE = _cuts(
    1,
    (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (64, 256, 64, 8, 3),
    (256, 64, 64, 8, 3),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
)
DEQUANTIZE = "dequantize"
"""A way to compute a gradient in a float format: the kept 8-bit copy is dequantized first, and cuBLAS or cuDNN multiplies."""
MOST_OUTPUTS = 256
"""Output channels of a 1x1 convolution up to which its weight's gradient reads the 8-bit copy by default.

An element of the copy enters as many sums.  Reading it directly saves 4 bytes an element, 1 ps on an H200; in return Triton's
product of 16-bit and 8-bit numbers reaches perhaps 350 TFLOP/s where cuDNN's reaches 600, which is 2.4 fs an output channel.  An
estimate: both ways are offered to tuning, which measures.  With a stride, what no filter touches is dequantized too, but not read
directly.
"""


def ranked_pointwise(outputs: int, channels: int, touched: float = 1.0) -> tuple[str, ...]:
    """Configurations of the weight's gradient of a 1x1 convolution, the most promising first: those that read least come first.

    ``touched``: the share of the activation that filters touch, less than 1 with a stride.
    """

    def cost(config: ProductConfig) -> tuple[int, int]:
        """Bytes that all tiles read of a position, and sums of a tile."""
        across, down = -(-channels // config.n), -(-outputs // config.m)
        return 2 * outputs * across + channels * down, config.m * config.n

    cuts = [str(config) for config in sorted(_POINTWISE, key=cost)]
    return (*cuts, DEQUANTIZE) if outputs * touched <= MOST_OUTPUTS else (DEQUANTIZE, *cuts)


def ranked(
    m: int, n: int, k: int, a_bytes: int, b_bytes: int, tma: bool = False, float8: bool = False
) -> tuple[ProductConfig, ...]:
    """Configurations for an (m, n) result over k, the most promising first, those that do not fit shared memory left out.

    ``tma``: also, and before its like, each with the tensor memory accelerator.  ``float8``: of float8 operands, whose sums are
    kept twice.
    """
    known = (_FLOAT8 if float8 else _EIGHT_BIT) if a_bytes == b_bytes == 1 else _MIXED
    fitting = [config for config in known if config.shared_bytes(a_bytes, b_bytes) <= SHARED_BYTES]
    ordered = sorted(fitting, key=lambda config: config.cost(m, n, k))
    if not tma:
        return tuple(ordered)
    return tuple(choice for config in ordered for choice in (attrs.evolve(config, tma=1), config))


class UnknownConfigError(BackendError):
    """A configuration that this backend does not have, whatever the shapes, so that ``apply_`` refuses it before a first step."""

    for_any_sizes = True


def _text(config: attrs.AttrsInstance) -> str:
    return ";".join(f"{name}={value}" for name, value in attrs.asdict(config).items())


def _parsed(cls: type[_Config], text: str) -> _Config:
    """The configuration ``name=value;name=value``, each knob at most once; knobs that are left out have their default."""
    known, knobs = attrs.fields_dict(cls), dict[str, int]()
    try:
        for part in text.split(";") if text else ():
            name, separator, value = part.partition("=")
            if not separator or name not in known:
                raise ValueError(f"it has {part!r}, and the knobs are {', '.join(known)}")
            if name in knobs:
                raise ValueError(f"it has {name} twice")
            knobs[name] = int(value)
        return cls(**knobs)
    except ValueError as error:
        raise UnknownConfigError(
            f"backend triton cannot read the configuration {text!r} ({error}); "
            f"one is written like '{cls()}', and with the empty text the backend chooses"
        ) from None

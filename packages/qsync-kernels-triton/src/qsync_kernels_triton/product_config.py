"""The knobs of the Triton products, apart from the kernels, and which of them are worth trying for a shape."""

from __future__ import annotations

import attrs

from qsync_kernels_triton.config import read_knobs, unreadable

SHARED_BYTES = 227 * 1024
"""Shared memory that a program may use on compute capability 9.0; less elsewhere, and Triton then says so when it compiles."""
MULTIPROCESSORS = 132


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
        return f"m={self.m};n={self.n};k={self.k};warps={self.warps};stages={self.stages};group={self.group};tma={self.tma}"

    @classmethod
    def parse(cls, text: str) -> ProductConfig:
        """Read ``m=128;n=128;k=64;warps=8;stages=3;group=8;tma=0``; knobs that are left out have their default.

        Raises:
            BackendError: when the text is not of that form.
        """
        try:
            return cls(**read_knobs(text, ("m", "n", "k", "warps", "stages", "group", "tma")))
        except ValueError as error:
            raise unreadable(text, error, cls()) from None

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


_EIGHT_BIT = tuple(
    ProductConfig(m, n, k, warps, stages, 8)
    for m, n, k, warps, stages in (
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
)
FLOAT8_SUMS = 96
"""Most float32 sums that a thread has of a float8 product.  It keeps them twice (docs/decisions/float8-accumulation.md), and what
does not fit into its 255 registers spills."""
_FLOAT8 = (
    *(ProductConfig(m, n, 128, 8, 3, 8) for m, n in ((128, 128), (64, 256), (256, 64))),
    *(config for config in _EIGHT_BIT if config.sums_per_thread <= FLOAT8_SUMS),
)
_MIXED = tuple(
    ProductConfig(m, n, k, warps, stages, 8)
    for m, n, k, warps, stages in (
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
)


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

"""The knobs of the Triton kernels, apart from the kernels: what a plan or a tuning record writes as ``config``."""

from __future__ import annotations

import attrs

from qsync_core.errors import BackendError

MAX_BLOCK = 1 << 16
"""Triton refuses tensors of more than 2**20 elements in one program; beyond 2**16 nothing was ever gained."""
LARGE = 128 << 20
"""Bytes of a tensor beyond which nothing is held in the cache: on an H200, (512, 64, 56, 56) float32 took 5% longer with 24 MiB
held than with none, and (64, 64, 56, 56) 4% less with 40 MiB."""
MAX_PROGRAMS = 4096
"""Every program of the second pass reads all partial maxima of its row."""


@attrs.frozen
class QuantizeConfig:
    """How the quantization kernels are launched.

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
        return (
            f"block={self.block};warps={self.warps};programs={self.programs};keep={self.keep};sweep={self.sweep};hold={self.hold}"
        )

    def kept_of(self, tensor_bytes: int) -> int:
        """How much of a tensor of that size the cache is asked to keep."""
        return self.keep if tensor_bytes <= LARGE or not self.hold else 0

    @classmethod
    def parse(cls, text: str) -> QuantizeConfig:
        """Read ``block=4096;warps=8;programs=528;keep=41943040;sweep=1056;hold=1``; knobs that are left out have their default.

        Raises:
            BackendError: when the text is not of that form.
        """
        try:
            return cls(**read_knobs(text, ("block", "warps", "programs", "keep", "sweep", "hold")))
        except ValueError as error:
            raise unreadable(text, error, cls()) from None


def read_knobs(text: str, known: tuple[str, ...]) -> dict[str, int]:
    """The knobs of ``name=value;name=value``, each at most once.

    Raises:
        ValueError: when a name is not known or repeated, or a value is not an integer.
    """
    knobs: dict[str, int] = {}
    for part in text.split(";") if text else ():
        name, separator, value = part.partition("=")
        if not separator or name not in known:
            raise ValueError(f"it has {part!r}, and the knobs are {', '.join(known)}")
        if name in knobs:
            raise ValueError(f"it has {name} twice")
        knobs[name] = int(value)
    return knobs


class UnknownConfigError(BackendError):
    """A configuration that this backend does not have, whatever the shapes: whoever names it is told before a first step."""

    for_any_sizes = True


def unreadable(text: str, error: ValueError, example: object) -> UnknownConfigError:
    """The error for a configuration that can not be read."""
    return UnknownConfigError(
        f"backend triton can not read the configuration {text!r} ({error}); "
        f"one is written like '{example}', and the empty text is the default"
    )

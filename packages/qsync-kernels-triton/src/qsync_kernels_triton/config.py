"""The knobs of the Triton kernels, apart from the kernels: what a plan or a tuning record writes as ``config``."""

from __future__ import annotations

import attrs

from qsync_core.errors import BackendError

MAX_BLOCK = 1 << 16
"""Triton refuses tensors of more than 2**20 elements in one program; beyond 2**16 nothing was ever gained."""


@attrs.frozen
class QuantizeConfig:
    """How the quantization kernels are launched.

    Attributes:
        block: elements that a program loads at a time; a power of two.
        warps: warps of a program.
    """

    block: int = 4096
    warps: int = 8

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two in 1..{MAX_BLOCK}, got {self.block}")
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"warps must be a power of two in 1..32, got {self.warps}")

    def __str__(self) -> str:
        return f"block={self.block};warps={self.warps}"

    @classmethod
    def parse(cls, text: str) -> QuantizeConfig:
        """Read ``block=4096;warps=8``; the empty text is the default.

        Raises:
            BackendError: when the text is not of that form.
        """
        if not text:
            return cls()
        try:
            knobs = dict(part.split("=", 1) for part in text.split(";"))
            if set(knobs) != {"block", "warps"}:
                raise ValueError(f"it has the knobs {', '.join(sorted(knobs))}")
            return cls(block=int(knobs["block"]), warps=int(knobs["warps"]))
        except ValueError as error:
            raise BackendError(
                f"backend triton can not read the configuration {text!r} ({error}); "
                "one is written like 'block=4096;warps=8', and the empty text is the default"
            ) from None

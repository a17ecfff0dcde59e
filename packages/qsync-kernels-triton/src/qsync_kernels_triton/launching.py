"""Launching a compiled kernel again without Triton's argument analysis, which takes longer than a small kernel runs.

The first launch for a key goes through ``function[grid](...)``, which compiles and returns a compiled kernel; later ones call that
kernel directly with addresses instead of tensors.  The caller's key has to hold everything that Triton would specialise on: types
and the alignment of addresses.  Integer arguments of the kernels are declared with their width and are never specialised.
"""

from __future__ import annotations

from typing import Any

import torch


def alignment(*tensors: torch.Tensor) -> bool:
    """True where every tensor starts at a multiple of 16 bytes, as Triton's wide loads need."""
    address = 0
    for x in tensors:
        address |= x.data_ptr()
    return address % 16 == 0


class Launch:
    """A kernel with its compile-time constants and launch options.

    Args:
        function: the ``triton.jit`` function; its constants come last.
        constants: values of its ``tl.constexpr`` parameters, in the order of the signature.
        options: ``num_warps`` and other options of Triton's launch.
    """

    def __init__(self, function: Any, constants: dict[str, Any], **options: Any) -> None:
        # Contraction to fused multiply-adds would make bits depend on the compiler.
        self._function, self._constants, self._options = function, constants, {"enable_fp_fusion": False} | options
        self._trailing = tuple(constants.values())
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, int, int], key: Any, *arguments: Any) -> None:
        """Run on the current stream of the current device."""
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._function[grid](*arguments, **self._constants, **self._options)
            if hasattr(compiled, "run"):  # Triton's interpreter returns nothing.
                self._compiled[key] = compiled
            return
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        compiled[grid](*addresses, *self._trailing)


def signed_words(value: int) -> tuple[int, int]:
    """The low and the high 32 bits as signed integers, so that a kernel sees one type whatever the value."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, ((value >> 32 & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000

"""Launching a compiled kernel again without Triton's argument analysis, which takes longer than a small kernel runs.

The first launch for a key goes through ``function[grid](...)``, which compiles and returns a compiled kernel; later ones call that
kernel directly with addresses instead of tensors.  The caller's key has to hold everything that Triton would specialise on: types,
values of specialised integers, the device; whether addresses are multiples of 16 is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Launch:
    """A kernel with its compile-time constants and launch options.

    Args:
        function: the ``triton.jit`` function: tensors first, then numbers, then constants.
        constants: values of its ``tl.constexpr`` parameters, in the order of the signature.
        options: ``num_warps`` and other options of Triton's launch.
    """

    def __init__(self, function: Any, constants: dict[str, Any], **options: Any) -> None:
        # Contraction to fused multiply-adds would make bits depend on the compiler.
        self._function, self._constants, self._options = function, constants, {"enable_fp_fusion": False} | options
        self._trailing = tuple(constants.values())
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, int, int], key: Any, tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...]) -> None:
        """Run on the current stream of the current device."""
        addresses = [x.data_ptr() for x in tensors]
        key = (key, *[address % 16 == 0 for address in addresses])
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*addresses, *numbers, *self._trailing)
            return
        compiled = self._function[grid](*tensors, *numbers, **self._constants, **self._options)
        if hasattr(compiled, "run"):  # Triton's interpreter returns nothing.
            self._compiled[key] = compiled


class Planned:
    """A kernel that checks its operands, and decides how to treat them, once for all operands of the same types and layouts.

    Args:
        plan: takes the operands and returns what a call with operands like these does; raises where they do not fit.
    """

    def __init__(self, plan: Callable[..., Callable[..., None]]) -> None:
        self._plan = plan
        self._plans: dict[Any, Callable[..., None]] = {}

    def __call__(self, first: torch.Tensor, *others: torch.Tensor | None) -> None:
        """Run on the device of the first operand."""
        key = tuple([None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in (first, *others)])
        run = self._plans.get(key)
        if run is None:
            run = self._plans[key] = self._plan(first, *others)
        if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                run(first, *others)
        else:
            run(first, *others)


def signed_words(value: int) -> tuple[int, int]:
    """The low and the high 32 bits as signed integers, so that a kernel sees one type whatever the value."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, ((value >> 32 & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000

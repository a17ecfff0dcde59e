"""What known chips can really do: which precisions have hardware behind them, not an emulation.

A precision that a chip emulates is slower than float32 there, so a plan that used it would gain nothing.  Sources: NVIDIA's
architecture whitepapers (V100, T4, A100, H100, L4/Ada) and the CUDA C++ Programming Guide, "Compute Capabilities".
"""

from __future__ import annotations

import re

import attrs

from qsync_core.ir.precision import Precision

_FLOAT32, _FLOAT16, _BFLOAT16 = Precision.FLOAT32, Precision.FLOAT16, Precision.BFLOAT16
_INT8, _FLOAT8 = Precision.INT8, Precision.FLOAT8_E4M3FN


@attrs.frozen
class Chip:
    """A device type that cluster files may name.

    Attributes:
        name: canonical name (``T4``).
        compute_capability: as CUDA counts it; empty for a CPU.
        precisions: formats whose products run in hardware.
        emulated: formats that software offers on it all the same.
    """

    name: str
    compute_capability: str
    precisions: frozenset[Precision]
    emulated: frozenset[Precision] = frozenset()

    @property
    def sixteen_bit(self) -> Precision:
        """The 16-bit format for gradients: bfloat16 where the chip has it (no loss scaling), else float16."""
        return _BFLOAT16 if _BFLOAT16 in self.precisions else _FLOAT16


_VOLTA = frozenset({_FLOAT32, _FLOAT16})
_TURING = _VOLTA | {_INT8}
_AMPERE = _TURING | {_BFLOAT16}
_ADA = _AMPERE | {_FLOAT8}
_BEFORE_AMPERE_EMULATED = frozenset({_BFLOAT16})

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("P100", "6.0", _VOLTA, _BEFORE_AMPERE_EMULATED),
        Chip("V100", "7.0", _VOLTA, _BEFORE_AMPERE_EMULATED),
        Chip("T4", "7.5", _TURING, _BEFORE_AMPERE_EMULATED),
        Chip("A100", "8.0", _AMPERE),
        Chip("A30", "8.0", _AMPERE),
        Chip("A10", "8.6", _AMPERE),
        Chip("A40", "8.6", _AMPERE),
        Chip("L4", "8.9", _ADA),
        Chip("L40", "8.9", _ADA),
        Chip("H100", "9.0", _ADA),
        Chip("H200", "9.0", _ADA),
        Chip("B200", "10.0", _ADA),
    )
}
"""Known chips by name.  int8 means int8 tensor-core products: V100 has only the slower DP4A instruction and is left out."""


def find_chip(device: str) -> Chip | None:
    """The known chip that a device name means: ``T4``, ``Tesla T4``, ``NVIDIA A100-SXM4-80GB``; None for any other device."""
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    return next((chip for name, chip in CHIPS.items() if name in words), None)


def precision_problem(device: str, precision: Precision) -> str | None:
    """Why a device cannot run a precision, as the end of a sentence; None where it can or the device is not a known chip."""
    chip = find_chip(device)
    if chip is None or precision in chip.precisions:
        return None
    has = ", ".join(p for p in Precision if p in chip.precisions)
    if precision in chip.emulated:
        return f"{chip.name} has no {precision} hardware and its emulation is not support; it has {has}"
    return f"{chip.name} has no {precision} hardware; it has {has}"


def same_device(one: str, other: str) -> bool:
    """Whether two device names mean the same device type: equal text, or the same known chip."""
    chip = find_chip(one)
    return one == other or (chip is not None and chip is find_chip(other))

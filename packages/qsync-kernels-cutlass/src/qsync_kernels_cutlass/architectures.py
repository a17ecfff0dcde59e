"""The GPU architectures that kernels are compiled for, with the limits that decide which configurations are valid.

Limits are those of the CUDA C++ Programming Guide (technical specifications per compute capability), peaks those of the chips' data
sheets.
"""

from __future__ import annotations

import attrs

from qsync_core.errors import BackendError


@attrs.frozen
class Architecture:
    """What one compilation target offers.

    Attributes:
        name: as nvcc spells it (``sm_90a``).
        capability: lowest compute capability that runs its code.
        shared_bytes_per_block: largest dynamic shared memory of a thread block, after opting in.
        shared_bytes_per_sm: shared memory of a multiprocessor.
        registers_per_sm: 32-bit registers of a multiprocessor.
        threads_per_sm: resident threads of a multiprocessor.
        blocks_per_sm: resident thread blocks of a multiprocessor.
        async_copies: has cp.async, so that more than two stages pay.
        tma: has TMA, wgmma and clusters.
        int8_mma: has int8 tensor cores.
        float8_mma: has float8 tensor cores.
        bfloat16_mma: has bfloat16 tensor cores.
        sms: multiprocessors of the architecture's usual data-center or inference chip, for ranking where the device is not known.
        tensor_tops: dense int8 tensor core peak of that chip, in 10^12 operations a second (float16: half of it).
        bandwidth_gbs: its memory bandwidth, in 10^9 bytes a second.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    async_copies: bool
    tma: bool
    int8_mma: bool
    float8_mma: bool
    bfloat16_mma: bool
    sms: int
    tensor_tops: float
    bandwidth_gbs: float


_KIB = 1024

SM_70 = Architecture("sm_70", (7, 0), 96 * _KIB, 96 * _KIB, 65536, 2048, 32, False, False, False, False, False, 80, 125, 900)
SM_75 = Architecture("sm_75", (7, 5), 64 * _KIB, 64 * _KIB, 65536, 1024, 16, False, False, True, False, False, 40, 130, 320)
SM_80 = Architecture("sm_80", (8, 0), 163 * _KIB, 164 * _KIB, 65536, 2048, 32, True, False, True, False, True, 108, 624, 1555)
SM_86 = Architecture("sm_86", (8, 6), 99 * _KIB, 100 * _KIB, 65536, 1536, 16, True, False, True, False, True, 72, 250, 600)
SM_89 = Architecture("sm_89", (8, 9), 99 * _KIB, 100 * _KIB, 65536, 1536, 24, True, False, True, True, True, 58, 242, 300)
SM_90A = Architecture("sm_90a", (9, 0), 227 * _KIB, 228 * _KIB, 65536, 2048, 32, True, True, True, True, True, 132, 1979, 4800)

ARCHITECTURES = {found.name: found for found in (SM_70, SM_75, SM_80, SM_86, SM_89, SM_90A)}
"""Architectures by name.  Chips: V100, T4, A100, A10, L4, H200."""


def architecture(name: str) -> Architecture:
    """The architecture of a name.

    Raises:
        BackendError: when no kernels are compiled for it.
    """
    if name not in ARCHITECTURES:
        raise BackendError(f"qsync-kernels-cutlass compiles for {', '.join(ARCHITECTURES)}, not for {name!r}")
    return ARCHITECTURES[name]


def compilation_target(chip: str) -> Architecture:
    """The architecture whose code runs on a chip, by the compiler's name for that: ``sm_87`` runs the code of ``sm_86``.

    Raises:
        BackendError: when there is none.
    """
    if chip in ARCHITECTURES:
        return ARCHITECTURES[chip]
    digits = chip.removeprefix("sm_")
    return architecture_of(f"{digits[:-1]}.{digits[-1:]}") or architecture(chip)


def architecture_of(compute_capability: str) -> Architecture | None:
    """The architecture whose code runs on devices of a compute capability (``9.0``); None where there is none.

    Code of sm_80 runs on every 8.x, that of sm_86 on 8.6 and later 8.x, and so on; sm_90a runs on 9.0 only.
    """
    major, _, minor = compute_capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return None
    capability = (int(major), int(minor))
    if capability[0] == 9:
        return SM_90A if capability == (9, 0) else None
    fitting = [found for found in ARCHITECTURES.values() if found.capability[0] == capability[0] and found.capability <= capability]
    return max(fitting, key=lambda found: found.capability, default=None)

"""What known chips can really do: which precisions have hardware behind them, not an emulation, and their datasheets' figures.

A precision that a chip emulates is slower than float32 there, so a plan that used it would gain nothing.  Sources: NVIDIA's
architecture whitepapers and datasheets (Pascal to Blackwell), AMD's Instinct datasheets (CDNA 2 to 4), and the CUDA C++ Programming
Guide, "Compute Capabilities".  A chip that is not here is not guessed at: nothing is refused on it, and a plan rests on what its
profile measured alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

import attrs

from qsync_core.ir.precision import Precision

_FLOAT32, _FLOAT16, _BFLOAT16 = Precision.FLOAT32, Precision.FLOAT16, Precision.BFLOAT16
_INT8, _FLOAT8 = Precision.INT8, Precision.FLOAT8_E4M3FN


@attrs.frozen
class Chip:
    """A device type that cluster files may name.

    Attributes:
        name: canonical name (``T4``, ``RTX 3090``).
        compute_capability: as CUDA counts it; empty for AMD's.
        peak_tera: dense peak of products by format, in 10¹² operations a second, with float32 (int32) accumulation and at the boost
            clock; the formats are those whose products run in hardware.
        memory_gb: the largest memory it is sold with, in 10⁹ or 2³⁰ bytes as its maker counts; 0 where a name does not tell.
        bandwidth_gb_s: of that memory, 10⁹ bytes a second; 0 likewise.
        emulated: formats that software offers on it all the same.
    """

    name: str
    compute_capability: str
    peak_tera: Mapping[Precision, float]
    memory_gb: int = 0
    bandwidth_gb_s: int = 0
    emulated: frozenset[Precision] = frozenset()

    @property
    def precisions(self) -> frozenset[Precision]:
        """Formats whose products run in hardware."""
        return frozenset(self.peak_tera)

    @property
    def sixteen_bit(self) -> Precision:
        """The 16-bit format for gradients: bfloat16 where the chip has it (no loss scaling), else float16."""
        return _BFLOAT16 if _BFLOAT16 in self.peak_tera else _FLOAT16

    @property
    def rungs(self) -> tuple[Precision, ...]:
        """The chip's standard ladder, lowest first: int8 where it has int8 products, its 16-bit format, float32."""
        return tuple(p for p in (_INT8, self.sixteen_bit, _FLOAT32) if p in self.peak_tera)


_VOLTA = (_FLOAT32, _FLOAT16)
_TURING = (*_VOLTA, _INT8)
_AMPERE = (*_TURING, _BFLOAT16)
_ADA = (*_AMPERE, _FLOAT8)
_BY_CAPABILITY = {"6.0": _VOLTA, "7.0": _VOLTA, "7.5": _TURING, "8.0": _AMPERE, "8.6": _AMPERE} | dict.fromkeys(
    ("8.9", "9.0", "10.0", "12.0"), _ADA
)
_BEFORE_AMPERE_EMULATED = frozenset({_BFLOAT16})


def _chip(
    name: str,
    capability: str,
    memory_gb: int,
    bandwidth_gb_s: int,
    float32: float,
    sixteen: float,
    int8: float = 0,
    float8: float | None = None,
) -> Chip:
    """A chip whose two 16-bit formats are equally fast where it has both, and whose 8-bit ones are unless ``float8`` is given."""
    eight = int8 if float8 is None else float8
    speeds = {_FLOAT32: float32, _FLOAT16: sixteen, _BFLOAT16: sixteen, _INT8: int8, _FLOAT8: eight}
    formats = _BY_CAPABILITY[capability]
    emulated = frozenset() if _BFLOAT16 in formats else _BEFORE_AMPERE_EMULATED
    return Chip(name, capability, {p: speeds[p] for p in formats}, memory_gb, bandwidth_gb_s, emulated)


_DATA_CENTRE = (
    _chip("P100", "6.0", 16, 732, 10.6, 21.2),
    _chip("V100", "7.0", 32, 900, 15.7, 125),
    _chip("V100S", "7.0", 32, 1134, 16.4, 130),
    _chip("T4", "7.5", 16, 320, 8.1, 65, 130),
    _chip("A100", "8.0", 80, 2039, 19.5, 312, 624),
    _chip("A800", "8.0", 80, 2039, 19.5, 312, 624),
    _chip("A30", "8.0", 24, 933, 10.3, 165, 330),
    _chip("A2", "8.6", 16, 200, 4.5, 18, 36),
    _chip("A10", "8.6", 24, 600, 31.2, 125, 250),
    _chip("A10G", "8.6", 24, 600, 31.5, 70, 140),
    _chip("A16", "8.6", 16, 200, 4.5, 17.9, 35.9),
    _chip("A40", "8.6", 48, 696, 37.4, 149.7, 299.3),
    _chip("L4", "8.9", 24, 300, 30.3, 121, 242.5),
    _chip("L40", "8.9", 48, 864, 90.5, 181, 362),
    _chip("L40S", "8.9", 48, 864, 91.6, 362, 733),
    _chip("L20", "8.9", 48, 864, 59.8, 119.5, 239),
    _chip("H100", "9.0", 80, 3350, 67, 989, 1979),
    _chip("H100 PCIe", "9.0", 80, 2039, 51, 756, 1513),
    _chip("H100 NVL", "9.0", 94, 3938, 60, 835, 1671),
    _chip("H800", "9.0", 80, 3350, 67, 989, 1979),
    _chip("H20", "9.0", 141, 4800, 44, 148, 296),
    _chip("H200", "9.0", 141, 4800, 67, 989, 1979),
    _chip("H200 NVL", "9.0", 141, 4800, 60, 835, 1671),
    _chip("GH200", "9.0", 144, 4900, 67, 990, 1979),
    _chip("B200", "10.0", 192, 8000, 75, 2250, 4500),
    _chip("GB200", "10.0", 192, 8000, 80, 2500, 5000),
)
_WORKSTATION = (
    _chip("TITAN V", "7.0", 12, 653, 14.9, 110),
    _chip("TITAN RTX", "7.5", 24, 672, 16.3, 130.5, 261),
    _chip("Quadro RTX 4000", "7.5", 8, 416, 7.1, 57, 114),
    _chip("Quadro RTX 5000", "7.5", 16, 448, 11.2, 89.2, 178.4),
    _chip("Quadro RTX 6000", "7.5", 24, 672, 16.3, 130.5, 261),
    _chip("Quadro RTX 8000", "7.5", 48, 672, 16.3, 130.5, 261),
    _chip("RTX A2000", "8.6", 12, 288, 8, 31.9, 63.9),
    _chip("RTX A4000", "8.6", 16, 448, 19.2, 76.7, 153.4),
    _chip("RTX A4500", "8.6", 20, 640, 23.7, 94.6, 189.2),
    _chip("RTX A5000", "8.6", 24, 768, 27.8, 111.1, 222.2),
    _chip("RTX A5500", "8.6", 24, 768, 34.1, 136.4, 272.8),
    _chip("RTX A6000", "8.6", 48, 768, 38.7, 154.8, 309.7),
    _chip("RTX 2000 Ada", "8.9", 16, 224, 12, 48, 96),
    _chip("RTX 4000 Ada", "8.9", 20, 360, 26.7, 106.8, 213.6),
    _chip("RTX 4500 Ada", "8.9", 24, 432, 39.6, 158.5, 317),
    _chip("RTX 5000 Ada", "8.9", 32, 576, 65.3, 261.1, 522.1),
    _chip("RTX 6000 Ada", "8.9", 48, 960, 91.1, 364.2, 728.5),
    _chip("RTX PRO 6000 Blackwell", "12.0", 96, 1792, 125, 503.8, 1007.6),
)


def _geforce(capability: str, sixteen_over_float32: int, *cards: tuple[str, int, int, float]) -> tuple[Chip, ...]:
    """Cards of one generation, (name, GB, GB/s, float32 peak): 16-bit peaks are a multiple of float32's, 8-bit ones of those.

    GeForce cards accumulate 16-bit and float8 products in float32 at half the rate of workstation cards; integers are not slowed.
    """
    low = sixteen_over_float32
    return tuple(
        _chip(f"RTX {name}", capability, memory_gb, bandwidth_gb_s, peak, low * peak, 4 * low * peak, 2 * low * peak)
        for name, memory_gb, bandwidth_gb_s, peak in cards
    )


_GEFORCE = (
    *_geforce(
        *("7.5", 4, ("2060", 6, 336, 6.5), ("2060 SUPER", 8, 448, 7.2), ("2070", 8, 448, 7.5), ("2070 SUPER", 8, 448, 9.1)),
        *(("2080", 8, 448, 10.1), ("2080 SUPER", 8, 496, 11.2), ("2080 Ti", 11, 616, 13.4)),
    ),
    *_geforce(
        *("8.6", 2, ("3050", 8, 224, 9.1), ("3060", 12, 360, 12.7), ("3060 Ti", 8, 448, 16.2), ("3070", 8, 448, 20.3)),
        *(("3070 Ti", 8, 608, 21.7), ("3080", 12, 912, 29.8), ("3080 Ti", 12, 912, 34.1), ("3090", 24, 936, 35.6)),
        ("3090 Ti", 24, 1008, 40.0),
    ),
    *_geforce(
        *("8.9", 2, ("4060", 8, 272, 15.1), ("4060 Ti", 16, 288, 22.1), ("4070", 12, 504, 29.1), ("4070 SUPER", 12, 504, 35.5)),
        *(("4070 Ti", 12, 504, 40.1), ("4070 Ti SUPER", 16, 672, 44.1), ("4080", 16, 717, 48.7), ("4080 SUPER", 16, 736, 52.2)),
        *(("4090", 24, 1008, 82.6), ("4090 D", 24, 1008, 73.5)),
    ),
    *_geforce(
        *("12.0", 2, ("5060", 8, 448, 19.2), ("5060 Ti", 16, 448, 23.7), ("5070", 12, 672, 30.9), ("5070 Ti", 16, 896, 43.9)),
        *(("5080", 16, 960, 56.3), ("5090", 32, 1792, 104.8), ("5090 D", 32, 1792, 104.8)),
    ),
)


def _instinct(name: str, memory_gb: int, bandwidth_gb_s: int, float32: float, sixteen: float, eight: float, float8: bool) -> Chip:
    """AMD's: the MI300 series has float8 in another encoding (e4m3fnuz) than float8_e4m3fn, so it counts from the MI350 on."""
    speeds = {_FLOAT32: float32, _FLOAT16: sixteen, _BFLOAT16: sixteen, _INT8: eight} | ({_FLOAT8: eight} if float8 else {})
    return Chip(name, "", speeds, memory_gb, bandwidth_gb_s)


_INSTINCT = (
    _instinct("MI210", 64, 1638, 45.3, 181, 181, False),
    _instinct("MI250", 128, 3277, 90.5, 362.1, 362.1, False),
    _instinct("MI250X", 128, 3277, 95.7, 383, 383, False),
    _instinct("MI300A", 128, 5300, 122.6, 980.6, 1961.2, False),
    _instinct("MI300X", 192, 5300, 163.4, 1307.4, 2614.9, False),
    _instinct("MI325X", 256, 6000, 163.4, 1307.4, 2614.9, False),
    _instinct("MI350X", 288, 8000, 144.2, 2306.9, 4613.7, True),
    _instinct("MI355X", 288, 8000, 157.3, 2516.6, 5033.2, True),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (*_DATA_CENTRE, *_WORKSTATION, *_GEFORCE, *_INSTINCT)}
"""Known chips by name.  int8 means int8 tensor-core products: V100 has only the slower DP4A instruction and is left out."""

_SIZES: dict[str, dict[int, tuple[int, int]]] = {
    "P100": {12: (12, 549)},
    "V100": {16: (16, 900)},
    "A100": {40: (40, 1555)},
    "A800": {40: (40, 1555)},
    "H20": {96: (96, 4000)},
    "GH200": dict.fromkeys((96, 120, 480), (96, 4000)),  # 120 and 480 GB are the processor's memory
    "RTX A2000": {6: (6, 288)},
    "RTX 3060": {8: (8, 240)},
    "RTX 3080": {10: (10, 760)},
    "RTX 4060 Ti": {8: (8, 288)},
    "RTX 5060 Ti": {8: (8, 448)},
}
"""Smaller memories that chips are sold with, by the GB in a name: GB and GB/s, from the same sources."""
_SIZE, _BARE_SIZE = re.compile(r"\b(\d+)\s*G(?:I?B)?\b"), re.compile(r"[\s-]+(\d+)")

_BETWEEN_WORDS = r"(?:[\s_-]*\d+GB)?[\s_-]*"
"""What a maker may put between the words of a name: nothing, or the size of the memory: ``RTX3090``, ``A100 80GB PCIe``."""
_PATTERNS = [
    (re.compile(rf"(?<![A-Z0-9]){_BETWEEN_WORDS.join(map(re.escape, chip.name.upper().split()))}(?![A-Z0-9])(.*)"), chip)
    for chip in sorted(CHIPS.values(), key=lambda chip: -len(chip.name))
]
_ANOTHER_CHIP = re.compile(r"\b(LAPTOP|MOBILE|MAX-Q|TI|SUPER|D)\b")
"""Words that make a slower or faster chip of the one whose name they follow."""


def find_chip(device: str) -> Chip | None:
    """The known chip that a device name means, None for any other device.

    ``T4``, ``Tesla T4``, ``NVIDIA A100-SXM4-80GB MIG 3g.40gb``, ``NVIDIA GeForce RTX 3090`` and ``NVIDIA H100 PCIe`` are known.
    What a laptop calls ``RTX 4090 Laptop GPU`` is another chip, which is not.
    """
    for pattern, chip in _PATTERNS:
        if found := pattern.search(device.upper()):
            return None if _ANOTHER_CHIP.search(found[1]) else chip
    return None


def sized_chip(device: str) -> Chip | None:
    """The known chip that a device name means, with the memory that the name says: ``NVIDIA A100-SXM4-40GB`` has 40 GB.

    Its bandwidth is 0 where no chip of that name is known with such a memory.
    """
    chip = find_chip(device)
    if chip is None:
        return None
    text = re.sub(r"MIG\b.*", "", device.upper()).replace("_", "-")
    behind = next((found[1] for pattern, one in _PATTERNS if one is chip and (found := pattern.search(text))), "")
    size = _SIZE.search(text) or _BARE_SIZE.fullmatch(behind)
    if size is None or int(size[1]) == chip.memory_gb:
        return chip
    memory_gb, bandwidth_gb_s = _SIZES.get(chip.name, {}).get(int(size[1]), (int(size[1]), 0))
    return attrs.evolve(chip, name=f"{chip.name} {memory_gb}GB", memory_gb=memory_gb, bandwidth_gb_s=bandwidth_gb_s)


def chips_like(device: str, names: Iterable[str] = CHIPS) -> list[str]:
    """Names that a person may have meant by one that no chip has: the longest within it (A100 in A100X), else similar ones."""
    upper = {name.upper(): name for name in names}
    within = max((name for name in upper if name in device.upper()), key=len, default="")
    near = [within] if within else difflib.get_close_matches(device.upper(), upper, n=4, cutoff=0.7)
    return [upper[name] for name in near]


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
    """Whether two device names mean the same device type: equal text, or the same known chip and the same slice of it (MIG)."""
    chip = find_chip(one)
    return one == other or (chip is not None and chip is find_chip(other) and _slice(one) == _slice(other))


def _slice(device: str) -> str:
    """The part of a chip that a Multi-Instance GPU is, such as ``3G.40GB``; empty for the whole chip."""
    found = re.search(r"MIG[\s-]+(\d+g\.\d+gb)", device, re.IGNORECASE)
    return found[1].upper() if found else ""

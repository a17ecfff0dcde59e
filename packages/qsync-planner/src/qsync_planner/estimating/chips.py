"""What estimating knows of a chip beside its peaks, and where that is published (docs/absent-gpus.md#the-chips).

Peaks, memory and bandwidth are those of :data:`qsync_core.devices.CHIPS`: dense, without sparsity, summed in float32 or int32.
"""

from __future__ import annotations

import attrs

from qsync_core.devices import CHIPS, Chip, chips_like, find_chip, same_device, sized_chip
from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision


@attrs.frozen
class Datasheet:
    """A chip whose costs can be estimated.

    Attributes:
        chip: its peaks by format, memory and bandwidth.
        clock_ghz: the boost clock, at which the float32 peak is stated.
        float32_lanes: float32 multiply-adds of a multiprocessor in a cycle.
        tf32_tera: dense peak of TF32 products in 10¹² operations a second; 0 where there are none.
        watts: the board's or module's power limit.
        process_nm: the name of its process, in nanometres.
        source: where this is published.
    """

    chip: Chip
    multiprocessors: int
    clock_ghz: float
    float32_lanes: int
    tf32_tera: float
    watts: int
    process_nm: int
    source: str

    @property
    def name(self) -> str:
        """The chip's."""
        return self.chip.name

    @property
    def remark(self) -> str:
        """What an estimate for it does not rest on, as a sentence's end; empty where the rule was compared with its generation."""
        if not self.chip.compute_capability:
            return "the rule assumes NVIDIA's kernels, which do not run on it"
        return "" if self.chip.compute_capability in _COMPARED else "the rule was never compared with a chip of its generation"


_COMPARED = {"7.0", "7.5", "8.0", "8.6", "9.0"}
"""Compute capabilities of chips whose measured times the rule was held against (docs/absent-gpus.md#how-well-it-holds)."""

_TURING = "NVIDIA Turing GPU Architecture, whitepaper, 2018"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, whitepaper, 2020"
_ADA = "NVIDIA Ada GPU Architecture, whitepaper, 2022"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, whitepaper, 2025"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture, whitepaper, 2022"
_A100 = "NVIDIA A100 Tensor Core GPU Architecture, whitepaper, 2020"

_FACTS = {
    "P100": (56, 1.48, 64, 0.0, 300, 16, "NVIDIA Tesla P100, whitepaper, 2016"),
    "V100": (80, 1.53, 64, 0.0, 300, 12, "NVIDIA Tesla V100 GPU Architecture, whitepaper, 2017"),
    "T4": (40, 1.59, 64, 0.0, 70, 12, f"{_TURING}; NVIDIA T4 Tensor Core GPU, datasheet, 2019"),
    "A100": (108, 1.41, 64, 156.0, 400, 7, f"{_A100}; A100 80GB, datasheet, 2021"),
    "A30": (56, 1.44, 64, 82.0, 165, 7, "NVIDIA A30 Tensor Core GPU, datasheet, 2021"),
    "A2": (10, 1.77, 128, 9.0, 60, 8, "NVIDIA A2 Tensor Core GPU, datasheet, 2021"),
    "A10": (72, 1.695, 128, 62.5, 150, 8, "NVIDIA A10 Tensor Core GPU, datasheet, 2021"),
    "A10G": (80, 1.54, 128, 35.0, 300, 8, "NVIDIA A10G for AWS, datasheet, 2022"),
    "A40": (84, 1.74, 128, 74.8, 300, 8, f"NVIDIA A40, datasheet, 2021; {_GA102}"),
    "L4": (58, 2.04, 128, 60.0, 72, 4, f"NVIDIA L4 Tensor Core GPU, datasheet, 2023; {_ADA}"),
    "L40": (142, 2.49, 128, 90.5, 300, 4, f"NVIDIA L40, datasheet, 2022; {_ADA}"),
    "L40S": (142, 2.52, 128, 183.0, 350, 4, f"NVIDIA L40S, datasheet, 2023; {_ADA}"),
    "H100": (132, 1.98, 128, 494.7, 700, 4, _HOPPER),
    "H100 PCIe": (114, 1.755, 128, 378.0, 350, 4, _HOPPER),
    "H20": (78, 1.98, 128, 74.0, 400, 4, "NVIDIA H20, datasheet, 2023"),
    "H200": (132, 1.98, 128, 494.7, 700, 4, f"NVIDIA H200 Tensor Core GPU, datasheet, 2023; {_HOPPER}"),
    "GH200": (132, 1.98, 128, 494.7, 700, 4, f"NVIDIA GH200 Grace Hopper Superchip, datasheet, 2023; {_HOPPER}"),
    "B200": (148, 1.965, 128, 1125.0, 1000, 4, "NVIDIA Blackwell Architecture, whitepaper, 2024"),
    "TITAN V": (80, 1.455, 64, 0.0, 250, 12, "NVIDIA TITAN V, datasheet, 2017"),
    "TITAN RTX": (72, 1.77, 64, 0.0, 280, 12, _TURING),
    "Quadro RTX 6000": (72, 1.77, 64, 0.0, 260, 12, _TURING),
    "Quadro RTX 8000": (72, 1.77, 64, 0.0, 260, 12, _TURING),
    "RTX A4000": (48, 1.56, 128, 38.3, 140, 8, "NVIDIA RTX A4000, datasheet, 2021"),
    "RTX A5000": (64, 1.695, 128, 55.6, 230, 8, "NVIDIA RTX A5000, datasheet, 2021"),
    "RTX A6000": (84, 1.8, 128, 77.4, 300, 8, f"NVIDIA RTX A6000, datasheet, 2020; {_GA102}"),
    "RTX 6000 Ada": (142, 2.505, 128, 182.1, 300, 4, f"NVIDIA RTX 6000 Ada Generation, datasheet, 2022; {_ADA}"),
    "RTX PRO 6000 Blackwell": (188, 2.6, 128, 251.9, 600, 4, f"NVIDIA RTX PRO 6000 Blackwell, datasheet, 2025; {_BLACKWELL}"),
    "RTX 2060": (30, 1.68, 64, 0.0, 160, 12, _TURING),
    "RTX 2070": (36, 1.62, 64, 0.0, 175, 12, _TURING),
    "RTX 2070 SUPER": (40, 1.77, 64, 0.0, 215, 12, _TURING),
    "RTX 2080": (46, 1.71, 64, 0.0, 215, 12, _TURING),
    "RTX 2080 SUPER": (48, 1.815, 64, 0.0, 250, 12, _TURING),
    "RTX 2080 Ti": (68, 1.545, 64, 0.0, 250, 12, _TURING),
    "RTX 3050": (20, 1.777, 128, 9.1, 130, 8, _GA102),
    "RTX 3060": (28, 1.777, 128, 12.7, 170, 8, _GA102),
    "RTX 3060 Ti": (38, 1.665, 128, 16.2, 200, 8, _GA102),
    "RTX 3070": (46, 1.725, 128, 20.3, 220, 8, _GA102),
    "RTX 3070 Ti": (48, 1.77, 128, 21.7, 290, 8, _GA102),
    "RTX 3080": (68, 1.71, 128, 29.8, 320, 8, _GA102),
    "RTX 3080 Ti": (80, 1.665, 128, 34.1, 350, 8, _GA102),
    "RTX 3090": (82, 1.695, 128, 35.6, 350, 8, _GA102),
    "RTX 3090 Ti": (84, 1.86, 128, 40.0, 450, 8, _GA102),
    "RTX 4060": (24, 2.46, 128, 15.1, 115, 4, _ADA),
    "RTX 4060 Ti": (34, 2.535, 128, 22.1, 165, 4, _ADA),
    "RTX 4070": (46, 2.475, 128, 29.1, 200, 4, _ADA),
    "RTX 4070 SUPER": (56, 2.475, 128, 35.5, 220, 4, _ADA),
    "RTX 4070 Ti": (60, 2.61, 128, 40.1, 285, 4, _ADA),
    "RTX 4070 Ti SUPER": (66, 2.61, 128, 44.1, 285, 4, _ADA),
    "RTX 4080": (76, 2.505, 128, 48.7, 320, 4, _ADA),
    "RTX 4080 SUPER": (80, 2.55, 128, 52.2, 320, 4, _ADA),
    "RTX 4090": (128, 2.52, 128, 82.6, 450, 4, _ADA),
    "RTX 5060": (30, 2.497, 128, 19.2, 145, 4, _BLACKWELL),
    "RTX 5060 Ti": (36, 2.572, 128, 23.7, 180, 4, _BLACKWELL),
    "RTX 5070": (48, 2.512, 128, 30.9, 250, 4, _BLACKWELL),
    "RTX 5070 Ti": (70, 2.452, 128, 43.9, 300, 4, _BLACKWELL),
    "RTX 5080": (84, 2.617, 128, 56.3, 360, 4, _BLACKWELL),
    "RTX 5090": (170, 2.407, 128, 104.8, 575, 4, _BLACKWELL),
    "MI300X": (304, 2.1, 128, 653.7, 750, 5, "AMD Instinct MI300X, datasheet, 2023"),
}
DATASHEETS = {name: Datasheet(CHIPS[name], *facts) for name, facts in _FACTS.items()}
"""Chips whose costs can be estimated, by name.

H100, H200 and B200 are the SXM modules, P100 and V100 too; of a GH200's power only the 700 W of its GPU count.  An A10G's clock is
the one at which its float32 peak is stated; its tensor cores' is 1.71 GHz.
"""


def datasheet(device: str) -> Datasheet:
    """The chip that a device name means, with the memory that it says.

    Raises:
        PlanError: for a chip that is not in the table, a slice of one, or one with a memory that it is not sold with; names those
            of a similar name, or all.
    """
    chip = find_chip(device)
    found = DATASHEETS.get(chip.name) if chip is not None else None
    if found is None:
        near = chips_like(device, DATASHEETS)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise PlanError(f"there is no datasheet of {device!r} to estimate with; {meant}estimates know {', '.join(DATASHEETS)}")
    if not same_device(device, found.name):
        raise PlanError(
            f"{device!r} is a slice of a chip, whose share of memory and multiprocessors no datasheet gives; estimates know whole "
            f"chips, {found.name} among them"
        )
    sized = sized_chip(device)
    assert sized is not None
    if not sized.bandwidth_gb_s:
        raise PlanError(
            f"{device!r} names a memory of {sized.memory_gb} GB, with which no {found.name} is known; without a size, {found.name} "
            f"has {found.chip.memory_gb} GB"
        )
    return attrs.evolve(found, chip=sized)


@attrs.frozen
class Reached:
    """What products reach of a chip's peak: they are held by its power, or by a share that no chip exceeds.

    Fitted to six chips of five generations (docs/decisions/estimates-across-generations.md).

    Attributes:
        joules: energy of an operation on 16-bit operands, in 10⁻¹² J for each nanometre in the name of the process.  Operands of
            other sizes take in proportion.
        float32_joules: of a float32 operation without tensor cores.
        tensor, float32: the largest share of the peak, on tensor cores and without.
    """

    joules: float = 0.263
    float32_joules: float = 1.14
    tensor: float = 1.04
    float32: float = 0.93


@attrs.frozen
class Place:
    """A chip, or a share of its multiprocessors.

    Memory keeps its whole bandwidth on a share until the multiprocessors that are left cannot ask for it any more.
    """

    sheet: Datasheet
    share: float
    reached: Reached = Reached()

    @property
    def multiprocessors(self) -> float:
        """The multiprocessors of the share."""
        return self.sheet.multiprocessors * self.share

    @property
    def bytes_per_ns(self) -> float:
        """What kernels read and write at most."""
        asked = self.multiprocessors * self.sheet.clock_ghz * BYTES_PER_CYCLE
        return min(self.sheet.chip.bandwidth_gb_s * REACHED_BANDWIDTH, asked)

    def operations_per_ns(self, precision: Precision, tf32: bool) -> float:
        """Estimate the speed of well-shaped products in a format; ``tf32`` lets float32 run on tensor cores where there are any.

        Shares of one chip are compared with it.
        """
        peak, _, _ = self._products(precision, tf32)
        return 1e3 * peak * self.share * REACHED_PEAK

    def sustained_per_ns(self, precision: Precision, tf32: bool, tiles: float = 0.0) -> float:
        """Estimate the speed of products in a format while the chip's power lasts; chips are compared with it.

        Fewer ``tiles`` (0: any number) than multiprocessors leave the others idle, and those at work have the power of all.
        """
        peak, most, joules = self._products(precision, tf32)
        at_work = min(self.share, tiles / self.sheet.multiprocessors) if tiles else self.share
        return 1e3 * min(most * peak * at_work, self.sheet.watts / (joules * self.sheet.process_nm))

    def _products(self, precision: Precision, tf32: bool) -> tuple[float, float, float]:
        """The peak, the largest share of it, and the energy of an operation."""
        reached, sheet = self.reached, self.sheet
        if precision is not Precision.FLOAT32:
            return sheet.chip.peak_tera[precision], reached.tensor, reached.joules * precision.nbytes / 2
        if tf32 and sheet.tf32_tera:
            return sheet.tf32_tera, reached.tensor, reached.joules * 2
        return sheet.chip.peak_tera[precision], reached.float32, reached.float32_joules


REACHED_BANDWIDTH = 0.9
"""Share of the datasheet's bandwidth that long elementwise kernels reach: 0.86 to 0.90 on H200."""
REACHED_PEAK = 0.6
"""Share of the peak that well-shaped products reach: on H200 0.55 to 0.70 in float32 and bfloat16."""
BYTES_PER_CYCLE = 36
"""What a multiprocessor reads and writes per cycle at most.  Half of an H200 still takes all of its bandwidth with float32 kernels
(at least 33 bytes), and four fifths with bfloat16 ones (25); the second-level cache can deliver 64."""

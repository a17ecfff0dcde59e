"""What estimating knows of a chip beside its peaks, and where that is published (docs/absent-gpus.md#the-chips).

Peaks, memory and bandwidth are those of :data:`qsync_core.devices.CHIPS`: dense, without sparsity, summed in float32 or int32.
"""

from __future__ import annotations

import attrs

from qsync_core.devices import CHIPS, Chip, find_chip, same_device
from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision


@attrs.frozen
class Datasheet:
    """A chip whose costs can be estimated.

    Attributes:
        chip: its peaks by format, memory and bandwidth.
        clock_ghz: the boost clock, at which the peaks are stated.
        float32_lanes: float32 multiply-adds of a multiprocessor in a cycle.
        tf32_tera: dense peak of TF32 products in 10¹² operations a second; 0 where there are none.
        source: where this is published.
    """

    chip: Chip
    multiprocessors: int
    clock_ghz: float
    float32_lanes: int
    tf32_tera: float
    source: str

    @property
    def name(self) -> str:
        """The chip's."""
        return self.chip.name


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture, whitepaper, 2022"
_FACTS = {
    "V100": (80, 1.53, 64, 0.0, "NVIDIA Tesla V100 GPU Architecture, whitepaper, 2017"),
    "T4": (40, 1.59, 64, 0.0, "NVIDIA Turing GPU Architecture, whitepaper, 2018; NVIDIA T4 Tensor Core GPU, datasheet, 2019"),
    "A100": (108, 1.41, 64, 156.0, "NVIDIA A100 Tensor Core GPU Architecture, whitepaper, 2020; A100 80GB, datasheet, 2021"),
    "A10": (72, 1.695, 128, 62.5, "NVIDIA A10 Tensor Core GPU, datasheet, 2021"),
    "L4": (58, 2.04, 128, 60.0, "NVIDIA L4 Tensor Core GPU, datasheet, 2023; NVIDIA Ada GPU Architecture, whitepaper, 2022"),
    "L40S": (142, 2.52, 128, 183.0, "NVIDIA L40S, datasheet, 2023; NVIDIA Ada GPU Architecture, whitepaper, 2022"),
    "H100": (132, 1.98, 128, 494.7, _HOPPER),
    "H200": (132, 1.98, 128, 494.7, f"NVIDIA H200 Tensor Core GPU, datasheet, 2023; {_HOPPER}"),
    "RTX 3090": (82, 1.695, 128, 35.6, "NVIDIA Ampere GA102 GPU Architecture, whitepaper, 2020"),
    "RTX 4090": (128, 2.52, 128, 82.6, "NVIDIA Ada GPU Architecture, whitepaper, 2022"),
}
DATASHEETS = {name: Datasheet(CHIPS[name], *facts) for name, facts in _FACTS.items()}
"""Chips whose costs can be estimated, by name.  H100 and H200 are the SXM modules."""


def datasheet(device: str) -> Datasheet:
    """The chip that a device name means.

    Raises:
        PlanError: for a chip that is not in the table, or a slice of one; names those that are.
    """
    known = f"estimates know {', '.join(DATASHEETS)}"
    chip = find_chip(device)
    found = DATASHEETS.get(chip.name) if chip is not None else None
    if found is None:
        raise PlanError(f"there is no datasheet of {device!r} to estimate with; {known}")
    if not same_device(device, found.name):
        raise PlanError(f"{device!r} is a slice of a chip, whose share of memory and multiprocessors no datasheet gives; {known}")
    return found


@attrs.frozen
class Place:
    """A chip, or a share of its multiprocessors.

    Memory keeps its whole bandwidth on a share until the multiprocessors that are left cannot ask for it any more.
    """

    sheet: Datasheet
    share: float

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
        """Estimate the speed of well-shaped products in a format; ``tf32`` lets float32 run on tensor cores where there are any."""
        peak = self.sheet.chip.peak_tera[precision]
        if tf32 and precision is Precision.FLOAT32 and self.sheet.tf32_tera:
            peak = self.sheet.tf32_tera
        return 1e3 * peak * self.share * REACHED_PEAK


REACHED_BANDWIDTH = 0.9
"""Share of the datasheet's bandwidth that long elementwise kernels reach: 0.86 to 0.90 on H200."""
REACHED_PEAK = 0.6
"""Share of the peak that well-shaped products reach: on H200 0.55 to 0.70 in float32 and bfloat16."""
BYTES_PER_CYCLE = 36
"""What a multiprocessor reads and writes per cycle at most.  Half of an H200 still takes all of its bandwidth with float32 kernels
(at least 33 bytes), and four fifths with bfloat16 ones (25); the second-level cache can deliver 64."""

"""How long a drawn step takes on a chip: each kernel as on an H200, which was measured, then scaled (docs/fits.md#how)."""

from __future__ import annotations

import attrs

from qsync_planner.estimating.chips import DATASHEETS, Datasheet, Place
from qsync_planner.estimating.scaling import LAUNCH_NS, modelled_ns, scaled_ns
from qsync_planner.estimating.work import Work
from qsync_torch.fits.drawn_step import DrawnStep, Kernel

_TIMES_THE_BOUND: dict[str, tuple[float, float]] = {
    "mm": (1.5, 1.4),
    "addmm": (1.5, 1.4),
    "bmm": (1.5, 1.4),
    "baddbmm": (1.5, 1.4),
    "convolution": (1.2, 1.4),
    "convolution_backward": (1.2, 1.7),
    "native_batch_norm": (8.8, 2.6),
    "native_batch_norm_backward": (9.0, 3.8),
    "native_layer_norm": (3.2, 1.9),
    "native_layer_norm_backward": (4.7, 2.8),
    "max_pool2d_with_indices": (4.4, 2.2),
    "max_pool2d_with_indices_backward": (11.0, 6.0),
    "native_dropout": (1.7, 1.5),
    "gelu": (1.4, 1.0),
    "gelu_backward": (1.3, 1.0),
    "_scaled_dot_product_efficient_attention": (6.1, 3.2),
    "_scaled_dot_product_efficient_attention_backward": (5.6, 3.4),
    "_scaled_dot_product_flash_attention": (2.0, 2.0),
    "_scaled_dot_product_flash_attention_backward": (2.0, 2.0),
}
"""How many times its bound a kernel takes on 16-bit and on float32 operands: sums over ResNet50, VGG16-BN and BERT-base as QSync
profiled them on H100 and H200.  Flash attention, which they do not have, does 335 TFLOP/s of the 660 that an H100's power lasts for
(Dao, FlashAttention-2, 2023)."""
_MEASURED = Place(DATASHEETS["H200"], 1.0)
DISPATCH_NS = 40_000
"""What a CPU takes to start one of PyTorch's operators and its backward: 36 to 44 µs on a Xeon, in float32 and without a plan."""


@attrs.frozen
class Pace:
    """A step's time.

    Attributes:
        device_ns: of the GPU's kernels.
        dispatch_ns: of the CPU, which starts them.
    """

    device_ns: float
    dispatch_ns: float

    @property
    def step_ns(self) -> float:
        """The longer of the two, which overlap."""
        return max(self.device_ns, self.dispatch_ns)


def pace(step: DrawnStep, sheet: Datasheet, *, tf32: tuple[bool, bool]) -> Pace:
    """Estimate a drawn step's time on a whole chip.

    Args:
        tf32: whether convolutions, and linear layers, may run in TF32.
    """
    place, (convolutions, linears) = Place(sheet, 1.0), tf32
    device = sum(
        count * _kernel_ns(kernel, place, convolutions if kernel.name.startswith("convolution") else linears)
        for kernel, count in step.of_step
    )
    return Pace(device, DISPATCH_NS * step.starts)


def _kernel_ns(kernel: Kernel, place: Place, tf32: bool) -> float:
    on_tensor_cores, otherwise = _TIMES_THE_BOUND.get(kernel.name, (1.0, 1.0))
    times = otherwise if kernel.wide and not (tf32 and kernel.work.products) else on_tensor_cores
    work: Work = kernel.work
    transposing = work.transposed / _MEASURED.bytes_per_ns
    measured = LAUNCH_NS + times * (modelled_ns(work, _MEASURED, tf32=tf32) - LAUNCH_NS) + transposing
    return float(scaled_ns(round(measured), work, _MEASURED, place, tf32=tf32))

"""Which convolutions' geometries the kernels do not take, and why; from the request alone, without torch."""

from __future__ import annotations

from qsync_core.kernels.backend import KernelRequest, Op
from qsync_kernels_cutlass.problem import Geometry

CHANNEL_ALIGNMENT = 16
"""int8 channels that tensor cores and TMA take at a time: 16 bytes."""


def geometry_reason(geometry: Geometry, taps: tuple[int, ...]) -> str | None:
    """Why a geometry is no convolution's at all, as half a sentence; None where it is one's.

    Args:
        geometry: stride, padding, dilation and groups.
        taps: rows and columns of a filter.
    """
    for name, values, least in (
        ("stride", geometry.stride, 1),
        ("dilation", geometry.dilation, 1),
        ("padding", geometry.padding, 0),
        ("groups", (geometry.groups,), 1),
    ):
        if min(values) < least:
            return f"a convolution's {name} is {least} or more, not {'x'.join(map(str, values))}"
    return None if all(taps) else f"a filter has taps, not {'x'.join(map(str, taps))}"


def group_reasons(request: KernelRequest) -> list[str]:
    """Why the groups of an int8 convolution can not run, each reason half a sentence; empty means they can.

    A group is a convolution of its own on a slice of the channels, and slices start at multiples of 16 bytes.
    """
    groups = Geometry.of(request.attributes).groups
    if groups == 1:
        return []
    out_c, group_c = request.shapes[1][:2]
    of_a_group = out_c // groups
    if group_c % CHANNEL_ALIGNMENT == 0 and of_a_group % CHANNEL_ALIGNMENT == 0:
        return []
    kind = "a depthwise convolution" if group_c == 1 else f"a group of {group_c} input and {of_a_group} output channels"
    return [f"{kind} does not fill tensor cores, which take multiples of {CHANNEL_ALIGNMENT} channels (backend aten does it)"]


def grad_input_reasons(request: KernelRequest) -> list[str]:
    """Why the int8 gradient of the input is not a forward convolution; empty means it is, or is not what is asked for."""
    if request.op != Op.CONV2D_GRAD_INPUT:
        return []
    geometry = Geometry.of(request.attributes)
    found = []
    if geometry.stride != (1, 1):
        stride = "x".join(map(str, geometry.stride))
        found.append(f"the int8 gradient of the input is a forward convolution at stride 1 only, not at stride {stride}")
    for axis, taps in enumerate(request.shapes[1][2:]):
        most = geometry.dilation[axis] * (taps - 1)
        if geometry.padding[axis] > most:
            found.append(
                f"padding by {geometry.padding[axis]} is beyond the filter's reach of {most}: the gradient's would be negative"
            )
    return found

"""Whether the operands of a product fit each other: each misfit a sentence, all of them in one error.

A kernel reads as many elements as its shapes say, and scales and bias as if they were dense: what does not fit would be read or
written beyond its end, and what is strided would be read between its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from qsync_core.geometry import Geometry

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def rank_problems(ndim: int, **operands: Any) -> Iterator[str]:
    """What must have so many dimensions and has others; the other checks index shapes, and come after this one."""
    for name, x in operands.items():
        if not isinstance(x, torch.Tensor) or x.ndim != ndim:
            yield f"{name} must be a tensor of {ndim} dimensions, got {_shape(x)}"


def device_problems(*operands: Any) -> Iterator[str]:
    """Say which operands are on other devices."""
    devices = dict.fromkeys(str(x.device) for x in operands if isinstance(x, torch.Tensor))
    if len(devices) > 1:
        yield f"the operands lie on different devices, {', '.join(devices)}"


def format_problems(left: torch.Tensor, right: torch.Tensor, dtypes: tuple[torch.dtype, ...], second: str) -> Iterator[str]:
    """Operands in formats that are not multiplied with each other."""
    if left.dtype not in dtypes:
        yield f"the first operand must be {' or '.join(map(str, dtypes))}, got {left.dtype}"
    if right.dtype not in EIGHT_BITS or (left.dtype in EIGHT_BITS and (left.dtype is torch.int8) != (right.dtype is torch.int8)):
        yield f"the {second} must be 8-bit of the first one's kind, got {right.dtype} beside {left.dtype}"


def matrix_problems(out: torch.Tensor, shape: tuple[int, int]) -> Iterator[str]:
    """A result of another shape or format, or whose rows are not contiguous or overlap."""
    rows, columns = out.shape
    is_laid_out = not out.numel() or ((columns == 1 or out.stride(1) == 1) and (rows == 1 or out.stride(0) >= columns))
    if tuple(out.shape) != shape or out.dtype not in FLOATS or not is_laid_out:
        yield (
            f"out must be float32, float16 or bfloat16 of shape {shape} with contiguous rows, got {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )


def scale_problems(name: str, scale: Any, rows: int) -> Iterator[str]:
    """Scales that are not one, or one for each row, in float32."""
    if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32 or scale.numel() not in (1, rows):
        counts = "1" if rows == 1 else f"1 or {rows}"
        yield f"{name} must be {counts} float32, got {_shape(scale)}"


def column_problems(column_scale: Any, columns: int) -> Iterator[str]:
    """Factors of columns that are not one for each, in float32."""
    if column_scale is not None and (column_scale.dtype is not torch.float32 or tuple(column_scale.shape) != (columns,)):
        yield f"column_scale must be None or float32 of shape ({columns},), got {_shape(column_scale)}"


def bias_problems(bias: Any, outputs: int) -> Iterator[str]:
    """A bias that is not a float vector of one number for each output."""
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.dtype not in FLOATS or tuple(bias.shape) != (outputs,)):
        yield f"bias must be None or float32, float16 or bfloat16 of shape ({outputs},), got {_shape(bias)}"


def convolution_problems(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, geometry: Geometry) -> Iterator[str]:
    """Say where image (B, C, H, W), filters (O, C / groups, KH, KW) and result (B, O, OH, OW) are not those of one convolution."""
    outputs, group_channels, *kernel = w.shape
    groups = geometry.groups
    if x.shape[1] != group_channels * groups or outputs % groups:
        of_groups = f" in {groups} groups" if groups != 1 else ""
        yield f"filters of shape {tuple(w.shape)}{of_groups} do not fit an image of shape {tuple(x.shape)}"
        return
    sides = geometry.output_size(x.shape[2:], kernel)
    if min(*kernel, *sides) < 1:
        yield f"filters of shape {tuple(w.shape)} are larger than the padded image of shape {tuple(x.shape)}"
        return
    expected = (x.shape[0], outputs, *sides)
    if tuple(y.shape) != expected:
        yield (
            f"an image of shape {tuple(x.shape)} and filters of shape {tuple(w.shape)} belong to a result of shape {expected}, "
            f"not {tuple(y.shape)}"
        )


def image_problems(out: torch.Tensor) -> Iterator[str]:
    """A result that is in no float format or not channels-last."""
    if out.dtype not in FLOATS or not out.permute(0, 2, 3, 1).is_contiguous():
        yield f"out must be float32, float16 or bfloat16 and channels-last, got {out.dtype} with strides {out.stride()}"


def on_dense(run: Callable[..., None], operands: tuple[Any, ...], positions: tuple[int, ...]) -> Callable[..., None]:
    """What runs operands like these: ``run`` itself, or ``run`` on copies of those vectors at ``positions`` that are strided."""
    present = (i for i in positions if i < len(operands) and operands[i] is not None)
    strided = frozenset(i for i in present if not operands[i].is_contiguous())
    if not strided:
        return run

    def run_on_copies(*given: Any) -> None:
        run(*[x.contiguous() if i in strided else x for i, x in enumerate(given)])

    return run_on_copies


def _shape(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"

"""What convolutions have in common, of images with any number of dimensions, and their transposes.

Shapes: x (B, C, …), weight (O, C / groups, …), bias (O,), y (B, O, …).  A transposed convolution spreads its input by the stride;
PyTorch stores its weight as (C, O / groups, …), and operators take it with output channels first (:func:`other_layout`), as all
weights.  A channels-last activation gives a channels-last output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.geometry import Geometry, sizes_of
from qsync_core.kinds import Kind
from qsync_torch.kinds.kind import Operands, OperatorKind, Settings, Spelling, TracedCall

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout in which a pixel's channels lie together, by the dimensions of a batch."""

_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def convolution(row: Kind) -> OperatorKind:
    """The kind of a convolution, from what core's table says of it.

    PyTorch's function has the kind's name, and the module whose forward calls it is named alike: ``ConvTranspose2d`` of
    ``conv_transpose2d``.
    """
    function = getattr(torch, row.name)
    module = getattr(nn, "".join(map(str.capitalize, row.name.split("_"))))
    settings = _TRANSPOSED if row.transposed else _SETTINGS

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: torch.Tensor) -> tuple[Any, Any, Settings]:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        given = {**settings, **kwargs} | dict(zip(settings, args[3:], strict=False))
        return args[0] if args else kwargs["input"], bias, tuple(given[name] for name in settings)

    return OperatorKind(
        row=row,
        function=function,
        module=module,
        methods=("forward",) if row.transposed else ("forward", "_conv_forward"),
        settings=settings,
        spellings={function: Spelling(1, "weight", read)},
        aten={row.name: Operands()},
        prepare=functools.partial(_prepare, row, function, tuple(settings)),
        of_module=_of_transposed_module if row.transposed else _of_module,
        describe=functools.partial(_describe, row),
    )


def other_layout(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """A transposed convolution's weight with output channels first, from how PyTorch stores it, or the other way round.

    It is a view where there is one group.
    """
    if groups == 1:
        return weight.transpose(0, 1)
    outer, inner, *kernel = weight.shape
    return weight.reshape(groups, outer // groups, inner, *kernel).transpose(1, 2).reshape(groups * inner, outer // groups, *kernel)


def _prepare(
    row: Kind,
    function: Callable[..., torch.Tensor],
    names: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    settings: Settings,
) -> tuple[torch.Tensor, Geometry]:
    """The arguments of a call as a geometry, and ``x``, padded where "same" is wider on one side (even kernels).

    Raises:
        RuntimeError: for a padding that PyTorch does not take, with its words.
    """
    given = dict(zip(names, settings, strict=True))
    count, padding = row.dimensions, given["padding"]
    stride, dilation = (sizes_of(given[name], count) for name in ("stride", "dilation"))
    if isinstance(padding, str):
        if padding != "valid" and (padding != "same" or max(stride) > 1):
            function(*(torch.empty(operand.shape, device="cpu") for operand in (x, weight)), None, *settings)
        before, behind = _padding(padding, dilation, weight.shape[2:])
        if before != behind:
            x = F.pad(x, _sides(before, behind))
            before = (0,) * count
        return x, Geometry(stride, before, dilation, given["groups"])
    extra = sizes_of(given["output_padding"], count) if row.transposed else ()
    return x, Geometry(stride, sizes_of(padding, count), dilation, given["groups"], row.transposed, extra)


def _padding(padding: str, dilation: tuple[int, ...], kernel: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows and columns before and behind an image that "same" or "valid" stands for."""
    total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return tuple(amount // 2 for amount in total), tuple(amount - amount // 2 for amount in total)


def _sides(before: Sequence[int], behind: Sequence[int]) -> list[int]:
    """Padding as ``F.pad`` takes it: of the last dimension first."""
    return [side for sides in zip(reversed(before), reversed(behind), strict=True) for side in sides]


def _of_module(module: Any, input: torch.Tensor) -> tuple[torch.Tensor, Settings]:
    padding = module.padding
    if module.padding_mode != "zeros":  # since the plan was applied
        named = isinstance(padding, str)
        before, behind = _padding(padding, module.dilation, module.kernel_size) if named else (padding, padding)
        input, padding = F.pad(input, _sides(before, behind), mode=module.padding_mode), 0
    return input, (module.stride, padding, module.dilation, module.groups)


def _of_transposed_module(module: Any, input: torch.Tensor, output_size: Any = None) -> tuple[torch.Tensor, Settings]:
    extra = module.output_padding
    if output_size is not None:
        count = len(module.kernel_size)
        geometry = Geometry(module.stride, module.padding, module.dilation, transposed=True)
        least = geometry.output_size(input.shape[-count:], module.kernel_size)
        extra = tuple(wanted - size for wanted, size in zip(tuple(output_size)[-count:], least, strict=True))
    return input, (module.stride, module.padding, extra, module.groups, module.dilation)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _describe(row: Kind, call: TracedCall) -> tuple[dict[str, str], str]:
    arguments, count, reason = call.arguments, row.dimensions, ""
    padding, dilation = arguments["padding"], sizes_of(arguments["dilation"], count)
    mode = getattr(call.module, "padding_mode", "zeros") if isinstance(call.module, _CONVOLUTIONS) else "zeros"
    if isinstance(padding, str):
        padding, behind = _padding(padding, dilation, call.weight.shape[2:])
        if padding != behind:
            reason = "its padding 'same' is wider on one side; only symmetric padding is supported"
    if call.x.dim() != count + 2:
        reason = "its input has no batch dimension"
    if mode != "zeros":
        reason = f"its padding_mode is {mode!r}; only 'zeros' is supported"
    extra = sizes_of(arguments["output_padding"], count) if row.transposed else ()
    stride = sizes_of(arguments["stride"], count)
    geometry = Geometry(stride, sizes_of(padding, count), dilation, int(arguments["groups"]), row.transposed, extra)
    attributes = geometry.attributes
    last = CHANNELS_LAST.get(call.x.dim())
    if last is not None and not call.x.is_contiguous() and call.x.is_contiguous(memory_format=last):
        attributes["memory_format"] = "channels_last"
    return attributes, reason

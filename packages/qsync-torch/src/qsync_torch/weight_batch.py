"""The 8-bit copies of a model's weights, made together at the start of a forward in a few launches.

A model has tens or hundreds of weights, most of them small: one by one, launching takes longer than rounding.  Where a backend
offers ``quantize_many``, all weights that are quantized in the same way are given to it at once.  The bits are those of quantizing
each alone, so that gradient checkpointing, which quantizes weights again one by one, sees the same values.

Copies that are kept for backward are alive from the beginning of the forward instead of from their operator on: the highest sum,
reached when the forward ends, is the same.  A copy that no operator took is dropped with the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from qsync_core.backend import Op
from qsync_torch.binding import parse_binding, request_for
from qsync_torch.kernel_selection import reasons_against
from qsync_torch.operators.operands import Operand
from qsync_torch.quantize_ops import quantize_many

if TYPE_CHECKING:
    from qsync_torch.lowered_call import LoweredCall

DEVICE_KINDS = frozenset({"cuda"})
"""Where launching costs more than small kernels; a CPU would only have its caches emptied."""


class PreparedWeight:
    """A copy that waits for its operator, and what it was made of."""

    __slots__ = ("address", "operand", "source", "version")

    def __init__(self, source: torch.Tensor, operand: Operand) -> None:
        self.source, self.operand = source, operand
        self.version, self.address = source._version, source.data_ptr()

    def of(self, weight: torch.Tensor) -> Operand | None:
        """The copy, if the weight is still what it was."""
        same = weight is self.source and weight._version == self.version and weight.data_ptr() == self.address
        return self.operand if same else None


class WeightBatch:
    """The quantized modules of an applied model."""

    def __init__(self, members: Sequence[tuple[LoweredCall, nn.Module]]) -> None:
        self._members = [(call, module) for call, module in members if call.variant.compute.needs_scale]
        self._offered: dict[tuple[object, ...], bool] = {}

    def prepare(self) -> None:
        """Quantize the weights of this step."""
        if not self._members or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        groups: dict[tuple[str, torch.device], list[tuple[LoweredCall, torch.Tensor]]] = {}
        for call, module in self._members:
            weight = module.weight
            if weight.device.type in DEVICE_KINDS:
                groups.setdefault((call.weight_text, weight.device), []).append((call, weight))
        for (text, device), members in groups.items():
            if len(members) > 1 and self._is_offered(text, tuple(tuple(weight.shape) for _, weight in members), device):
                self._quantize(text, members)

    def _is_offered(self, text: str, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> bool:
        key = (text, shapes, device)
        if key not in self._offered:
            binding = parse_binding(text)
            request = request_for(Op.QUANTIZE_MANY, binding, shapes, device)
            self._offered[key] = not reasons_against(request, binding.backend, binding.config)
        return self._offered[key]

    @staticmethod
    def _quantize(text: str, members: Sequence[tuple[LoweredCall, torch.Tensor]]) -> None:
        offset = members[0][0].seeds.offset
        qs, scales = quantize_many([weight.detach() for _, weight in members], text, [call.w_seed for call, _ in members], offset)
        for (call, weight), q, scale in zip(members, qs, scales, strict=True):
            call.prepared_weight = PreparedWeight(weight, Operand(q, scale))

    def release(self) -> None:
        """The forward is over: what nobody took goes."""
        for call, _ in self._members:
            call.prepared_weight = None

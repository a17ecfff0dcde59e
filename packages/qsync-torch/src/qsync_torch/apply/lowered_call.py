"""One operator of an applied plan: its binding, its random numbers, and the calls that replace PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from qsync_core.errors import NumericsError
from qsync_core.geometry import IntPair, Pair, pair
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.apply.step_counter import StepCounter
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.kernels.binding import parse_binding, request_for
from qsync_torch.kernels.quantize import quantize_many
from qsync_torch.kernels.selection import reasons_against
from qsync_torch.operators.bindings import OperatorBinding
from qsync_torch.operators.cast_cache import CastCache
from qsync_torch.operators.conv2d import conv2d_binding, conv2d_padded, resolve_padding
from qsync_torch.operators.linear import linear_binding, linear_bound
from qsync_torch.operators.operands import Operand, Seeds

if TYPE_CHECKING:
    from qsync_torch.apply.lowered_call import LoweredCall

_NO_SEEDS = Seeds()


class LoweredCall:
    """An operator as a plan wants it.

    Calls that share a module share a variant and, within a step, the stream of their random numbers: gradient checkpointing runs
    calls again in another order, and they must round as they did before.
    """

    def __init__(
        self, op_id: OpId, variant: Variant, backend: str, config: str, seed: int, steps: StepCounter, cache: CastCache
    ) -> None:
        self.op_id, self.variant, self.backend, self.config = op_id, variant, backend, config
        self._x_seed = stream_key(seed, *op_id.fqn.encode(), 0)
        self.w_seed = stream_key(seed, *op_id.fqn.encode(), 1)
        self._grad_seed = stream_key(seed, *op_id.fqn.encode(), 2)
        self._steps, self._cache = steps, cache
        self._linear = linear_binding(variant, backend, config)
        self.weight_text = self._linear.w_text
        self.prepared_weight: PreparedWeight | None = None
        self._prepared_geometry: tuple[object, ...] = ()
        self._prepared_convolution: OperatorBinding = self._linear
        self._convolutions: dict[tuple[object, ...], OperatorBinding] = {}

    @property
    def seeds(self) -> Seeds:
        """Which random numbers this step's calls take; float formats take none."""
        if not self._linear.is_quantized:
            return _NO_SEEDS
        return Seeds(self._x_seed, self.w_seed, self._steps.offset, self._grad_seed)

    def _weight_copy(self, weight: torch.Tensor) -> Operand | None:
        """The copy made at the start of the forward, once; later calls of the same module make their own, of the same bits."""
        prepared, self.prepared_weight = self.prepared_weight, None
        return None if prepared is None else prepared.of(weight)

    def _named(self, error: NumericsError) -> NumericsError:
        return NumericsError(f"operator {self.op_id}: {error}")

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In place of ``F.linear``."""
        if torch.compiler.is_compiling():
            return linear_bound(input, weight, bias, self._linear, self.seeds, self._cache)
        try:
            # What happens inside is nobody's to intercept; each torch call would first ask the modes that are active.
            with torch._C.DisableTorchFunction():
                return linear_bound(input, weight, bias, self._linear, self.seeds, self._cache, self._weight_copy(weight))
        except NumericsError as error:
            raise self._named(error) from None

    def prepare_conv2d(self, stride: Pair, padding: Pair | str, dilation: Pair, groups: int) -> None:
        """Work out the binding of a geometry beforehand, which ``torch.compile`` can not follow."""
        if not isinstance(padding, str):
            self._prepared_geometry = (stride, padding, dilation, groups)
            self._prepared_convolution = self._convolution(pair(stride), pair(padding), pair(dilation), groups)

    def _convolution(self, stride: IntPair, padding: IntPair, dilation: IntPair, groups: int) -> OperatorBinding:
        key = (stride, padding, dilation, groups)
        binding = self._convolutions.get(key)
        if binding is None:
            binding = conv2d_binding(self.variant, stride, padding, dilation, groups, self.backend, self.config)
            self._convolutions[key] = binding
        return binding

    def conv2d(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """In place of ``F.conv2d``."""
        if torch.compiler.is_compiling():
            return self._conv2d(input, weight, bias, stride, padding, dilation, groups, None)
        try:
            with torch._C.DisableTorchFunction():
                return self._conv2d(input, weight, bias, stride, padding, dilation, groups, self._weight_copy(weight))
        except NumericsError as error:
            raise self._named(error) from None

    def _conv2d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Pair,
        padding: Pair | str,
        dilation: Pair,
        groups: int,
        copy: Operand | None,
    ) -> torch.Tensor:
        geometry = (stride, padding, dilation, groups)
        if geometry == self._prepared_geometry:
            binding = self._prepared_convolution
        else:
            spread = pair(dilation)
            x, sides = resolve_padding(x, weight, padding, spread)
            binding = self._convolution(pair(stride), sides, spread, groups)
        return conv2d_padded(x, weight, bias, binding, self.seeds, self._cache, copy)


# ---- merged from qsync_torch.apply.lowered_call
# The 8-bit copies of a model's weights, made together at the start of a forward in a few launches.
#
# A model has tens or hundreds of weights, most of them small: one by one, launching takes longer than rounding.  Where a backend
# offers ``quantize_many``, all weights that are quantized in the same way are given to it at once.  The bits are those of
# quantizing
# each alone, so that gradient checkpointing, which quantizes weights again one by one, sees the same values.
#
# Copies that are kept for backward are alive from the beginning of the forward instead of from their operator on: the highest sum,
# reached when the forward ends, is the same.  A copy that no operator took is dropped with the forward.

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

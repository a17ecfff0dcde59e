"""One operator of an applied plan: its binding, its random numbers, and the calls that replace PyTorch's."""

from __future__ import annotations

import torch

from qsync_core.errors import NumericsError
from qsync_core.op_id import OpId
from qsync_core.variant import Variant
from qsync_torch.cast_cache import CastCache
from qsync_torch.operators.conv2d import IntPair, Pair, conv2d_binding, conv2d_padded, pair, resolve_padding
from qsync_torch.operators.linear import linear_binding, linear_bound
from qsync_torch.operators.operands import Operand, Seeds
from qsync_torch.operators.operator_binding import OperatorBinding
from qsync_torch.random_bits import stream_key
from qsync_torch.step_counter import StepCounter
from qsync_torch.weight_batch import PreparedWeight

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

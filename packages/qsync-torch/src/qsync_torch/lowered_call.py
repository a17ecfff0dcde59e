"""One operator of an applied plan: its binding, its random numbers, and the calls that replace PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from qsync_core.errors import NumericsError
from qsync_core.op_id import OpId
from qsync_core.variant import Variant
from qsync_torch.cast_cache import CastCache
from qsync_torch.operators.conv2d import Pair, conv2d
from qsync_torch.operators.linear import linear_binding, linear_bound
from qsync_torch.operators.operands import Seeds
from qsync_torch.random_bits import stream_key

STEP_STRIDE = 1 << 32
"""Offset between two steps: a kernel may count its random numbers up from the offset, one per element."""


class StepCounter:
    """How many forwards an applied model has run; which random numbers a step takes follows from it."""

    def __init__(self) -> None:
        self.step = 0

    @property
    def offset(self) -> int:
        """Offset of this step's random numbers."""
        return self.step * STEP_STRIDE


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
        self._w_seed = stream_key(seed, *op_id.fqn.encode(), 1)
        self._steps, self._cache = steps, cache

    def _seeds(self) -> Seeds:
        return Seeds(self._x_seed, self._w_seed, self._steps.offset)

    def _named(self, error: NumericsError) -> NumericsError:
        return NumericsError(f"operator {self.op_id}: {error}")

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In place of ``F.linear``."""
        binding = linear_binding(self.variant, self.backend, self.config)
        try:
            return linear_bound(input, weight, bias, binding, self._seeds(), self._cache)
        except NumericsError as error:
            raise self._named(error) from None

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
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        try:
            return conv2d(
                input,
                weight,
                bias,
                self.variant,
                **options,
                backend=self.backend,
                config=self.config,
                seed=self._seeds(),
                cache=self._cache,
            )
        except NumericsError as error:
            raise self._named(error) from None

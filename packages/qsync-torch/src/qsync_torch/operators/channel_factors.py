"""One factor for each input channel of an operator (docs/design/precision-semantics.md#channel-factors).

With factors c[k], x / c and w · c have the product of x and w, and where c = √(max |x[:, k]| / max |w[:, k]|) a channel of large
activations takes no more of a row's scale than its weights ask for.  They are powers of two, so that nothing is rounded by them,
and of the last step: what a step computes does not depend on the order of its micro-batches, and a piece of a forward that runs
again sees what it saw before.  They begin as 1, and differ from rank to rank, which averages gradients of the operands as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from qsync_core.errors import PlanError

LARGEST_EXPONENT = 15
"""Factors are within 2**±15: a float16 copy of what autograd keeps, as hooks may make, holds these."""


class Factor(NamedTuple):
    """The state of one operator, a number for each of its input channels.

    Attributes:
        values: c in this step.
        x_largest, w_largest: the largest magnitudes of activation and weight in this step so far.
    """

    values: torch.Tensor
    x_largest: torch.Tensor
    w_largest: torch.Tensor

    def note(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Look at the operands of a call, as they are."""
        for largest, now in ((self.x_largest, x), (self.w_largest, weight)):
            largest.copy_(torch.maximum(largest, largest_by_column(now)))


def largest_by_column(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each channel, the last dimension, in float32; 0 where there are no rows."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[-1], dtype=torch.float32)
    found: torch.Tensor = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]), math.inf, dim=0, dtype=torch.float32)
    return found


def next_factors(values: torch.Tensor, x_largest: torch.Tensor, w_largest: torch.Tensor) -> torch.Tensor:
    """The factors of the step after one with these; a channel that saw nothing, or what is not finite, keeps its own."""
    ratio = x_largest / w_largest
    # ratio = m · 2**e with m in [1/2, 1): its root is within √2 of 2**⌊e/2⌋, whose bits are these.
    exponent = (torch.frexp(ratio).exponent >> 1).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    found = ((exponent + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where((ratio > 0) & torch.isfinite(ratio), found, values)


class ChannelFactors:
    """The factors of all operators of a plan in force, on the devices on which they run."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, dict[str, Factor]] = {}
        self._loaded: dict[str, str] = {}

    def of(self, op_id: str, width: int, device: torch.device) -> Factor:
        """The factors of an operator with so many input channels.

        The operator is named by its text: a compiler that reads this hashes the key, and PyTorch 2.11's can hash no class of ours.
        """
        found = self._factors.get(device, {}).get(op_id)
        return self._begin(op_id, width, device) if found is None else found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, op_id: str, width: int, device: torch.device) -> Factor:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # whose replays would begin anew each time
            raise PlanError("the first step under a plan is captured in a CUDA graph: run a step before one is captured")
        with torch.inference_mode(False):
            values = torch.ones(width, dtype=torch.float32, device=device)
            if (loaded := self._loaded.get(op_id)) is not None and len(loaded) == 2 * width:
                values.copy_(_from_text(loaded))
            found = Factor(
                values,
                torch.zeros(width, dtype=torch.float32, device=device),
                torch.zeros(width, dtype=torch.float32, device=device),
            )
        self._factors.setdefault(device, {})[op_id] = found
        return found

    def advance(self) -> None:
        """Take this step's magnitudes for the next one's factors, in as many launches for many operators as for one."""
        with torch.no_grad():
            for of_device in self._factors.values():
                factors = list(of_device.values())
                widths = [factor.values.numel() for factor in factors]
                flat = [torch.cat([factor[part] for factor in factors]) for part in range(3)]
                found = (next_factors(*flat), torch.zeros_like(flat[1]), torch.zeros_like(flat[2]))
                for part, of_all in enumerate(found):
                    torch.split_with_sizes_copy(of_all, widths, out=[factor[part] for factor in factors])

    def state(self) -> dict[str, str]:
        """The exponents of all factors by operator, two hexadecimal digits each.  Reading them waits for a GPU."""
        return {op_id: _as_text(factor.values) for of in self._factors.values() for op_id, factor in of.items()}

    def load(self, state: Mapping[str, str]) -> None:
        """Go on with the factors of a checkpoint; operators of which it has none, or of another width, begin with 1.

        Args:
            state: texts of which :func:`is_text` is true.
        """
        self._loaded = dict(state)
        for of_device in self._factors.values():
            for op_id, factor in of_device.items():
                text = state.get(op_id, "")
                factor.values.copy_(
                    _from_text(text) if len(text) == 2 * factor.values.numel() else torch.ones((), dtype=torch.float32)
                )
                factor.x_largest.zero_()
                factor.w_largest.zero_()


def is_text(value: object) -> bool:
    """Whether it is what :meth:`ChannelFactors.state` says of an operator."""
    try:
        return isinstance(value, str) and all(abs(byte - 128) <= LARGEST_EXPONENT for byte in bytes.fromhex(value))
    except ValueError:
        return False


def _as_text(values: torch.Tensor) -> str:
    exponents = torch.frexp(values.cpu()).exponent - 1
    return bytes((exponents + 128).tolist()).hex()


def _from_text(text: str) -> torch.Tensor:
    exponents = torch.tensor(list(bytes.fromhex(text)), dtype=torch.float32) - 128
    return torch.exp2(exponents)

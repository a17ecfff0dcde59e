"""Which copies of an operator's incoming gradient a variant rounds, and what noise on each of them does (DESIGN 5, 6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from qsync_torch.observing.element_variance import cast_scale
from qsync_torch.observing.noise_response import Site
from qsync_torch.observing.rounding_noise import Cast, GradientCopies


def lowered_copies(
    site: Site, copies: GradientCopies, grad: torch.Tensor, h: torch.Tensor, direction: Mapping[torch.Tensor, torch.Tensor]
) -> Iterator[tuple[Cast, torch.Tensor, torch.Tensor]]:
    """The copies that products read in a lower format: the cast, what is cast, and the response to noise on that.

    Args:
        site: the call; copies: of the variant.
        grad: the gradient of the call's output.
        h: the response of all weight gradients, along a direction u, to noise on ``grad`` wherever it is read.
        direction: u, a tensor per trainable parameter.
    """
    floating = [cast for cast in (copies.to_weight, copies.to_input) if cast is None or not cast.precision.needs_scale]
    if copies.shared and floating:
        if (cast := copies.to_weight or copies.to_input) is not None:
            yield cast, grad, h
        return
    # ⟨g, u⟩ depends on the copy for the weight's gradient by ⟨grad_outputᵀ·x, u⟩ alone and on that for the bias's by ⟨grad, u⟩;
    # the rest goes through the input's.  A bias's gradient is the sum of a float copy if there is one, else of the gradient itself.
    of_bias = None if site.bias_parameter is None else direction.get(site.bias_parameter)
    by_bias = torch.zeros_like(h) if of_bias is None else _by_output_channel(site, of_bias)
    if copies.shared:
        assert copies.to_input is not None
        yield copies.to_input, *_multiplied(site, copies, grad, h - by_bias)
        return
    of_weight = direction.get(site.parameter)
    by_weight = torch.zeros_like(h) if of_weight is None else site.geometry.product(site.x, of_weight, None)
    by_input = h - by_weight - by_bias
    if copies.to_weight in floating:
        by_weight = by_weight + by_bias
    else:
        by_input = by_input + by_bias
    if copies.to_weight is not None:
        yield copies.to_weight, grad, by_weight
    if copies.to_input is not None:
        yield copies.to_input, *_multiplied(site, copies, grad, by_input)


def _multiplied(site: Site, copies: GradientCopies, grad: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is cast for the input's gradient, and the response to noise on that."""
    if copies.multiplied is None or 0 in site.operator.no_grad_inputs:
        return grad, h
    scale = cast_scale(site.weight, copies.multiplied.precision, copies.multiplied.granularity).flatten()
    factor = _by_output_channel(site, scale)
    return grad * factor, h / factor


def _by_output_channel(site: Site, values: torch.Tensor) -> torch.Tensor:
    """A number per output channel, to be broadcast to the output."""
    return values.view(-1, 1, 1) if site.weight.dim() == 4 else values

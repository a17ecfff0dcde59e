"""Chains in compiled graphs: producers with their gradients, ``torch.ops.qsync.batch_norm_chain`` and its like.

A chain's result is read as its 8-bit copy, as a float tensor, or as both.  Autograd carries the gradient to the float result, so
that there is one either way; where nothing reads it, it is one element that counts for all (strides of 0).  Each operator gives the
float result; then, where one is written, the copy, its scale and its stream; then, of a batch norm with a float result, its largest
magnitude.

What is kept for backward is the input, or its 8-bit copy, statistics and bits: never the result.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from qsync_core.ir.chain import Producer
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.kernels.binding import BOUND
from qsync_torch.kernels.library_ops import is_channels_last, rows
from qsync_torch.kernels.producers import Produced, ProducerBinding
from qsync_torch.operators.autograd import apply_of, first_derivative
from qsync_torch.operators.casts import KEPT, KEPT_FACTOR

_OPS = torch.ops.qsync
Streams = tuple[int, torch.Tensor]
"""The seed of a chain's copy, and the offset of its input."""


def _of_float_result(backward: Any) -> Any:
    """A backward function of the float result's gradient alone: the other results have none.

    Gradients are computed in the formats of the binding, also where the script calls ``backward()`` under autocast.
    """
    once = first_derivative(backward, lambda ctx: f"the {ctx.binding.producer} of a fused chain")

    @functools.wraps(backward)
    def call(ctx: Any, grad: torch.Tensor, *others: Any) -> Any:
        with torch.autocast(grad.device.type, enabled=False):
            return once(ctx, grad)

    return call


def _arguments(binding: ProducerBinding, streams: Streams, keep: bool) -> tuple[Any, ...]:
    """The last arguments of every producer; what is kept in 8 bit has a seed of its own."""
    seed, offset = streams
    return binding.key, keep, seed, stream_key(seed, KEPT), offset


def _results(ctx: Any, p: Produced, x: torch.Tensor, binding: ProducerBinding) -> tuple[torch.Tensor, ...]:
    """The float result, or what stands for it, and then what has no gradient."""
    out = p.out
    if out is None:
        out = torch.empty_strided(x.shape, (0,) * x.ndim, dtype=binding.output, device=x.device)
    of_images = (p.mean, p.spread) if binding.producer is Producer.BATCH_NORM else ()
    rest = tuple(tensor for tensor in (p.q, p.scale, p.stream, p.absmax, *of_images) if tensor is not None)
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)
    return (out, *rest)


class BatchNormChain(torch.autograd.Function):
    """A batch norm of channels-last images: the float result, the copy with its scale, absmax, mean and biased variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        residual_absmax: torch.Tensor | None,
        eps: float,
        binding: ProducerBinding,
        streams: Streams,
    ) -> tuple[torch.Tensor, ...]:
        """Normalize, add, ReLU, round."""
        keep = any(ctx.needs_input_grad)
        arguments = _arguments(binding, streams, keep)
        p = binding.named(_OPS.batch_norm_output(x, weight, bias, eps, residual, residual_absmax, *arguments), keep)
        ctx.save_for_backward(p.read_backward(x), p.kept_scale, p.mean, p.spread, weight, bias, p.open)
        ctx.eps, ctx.binding, ctx.dtypes = eps, binding, (x.dtype, None if residual is None else residual.dtype)
        return _results(ctx, p, x, binding)

    @staticmethod
    @_of_float_result
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of input, weight, bias and residual."""
        x, x_scale, mean, var, weight, bias, is_open = ctx.saved_tensors
        need_x, need_w, need_b, need_r = ctx.needs_input_grad[:4]
        dense, wanted = grad.contiguous(memory_format=torch.channels_last), [need_x, need_r, need_w, need_b]
        found = iter(
            _OPS.batch_norm_grad_input(dense, x, x_scale, mean, var, weight, bias, ctx.eps, is_open, ctx.binding.key, wanted)
        )
        grad_x, grad_r, grad_w, grad_b = (next(found) if is_wanted else None for is_wanted in wanted)
        return _as(grad_x, ctx.dtypes[0]), grad_w, grad_b, _as(grad_r, ctx.dtypes[1]), None, None, None, None


class RowNormChain(torch.autograd.Function):
    """A layer norm or RMS norm of matrices: the float result, and the copy with its scales."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
        binding: ProducerBinding,
        streams: Streams,
    ) -> tuple[torch.Tensor, ...]:
        """Add, normalize, round."""
        keep = any(ctx.needs_input_grad)
        arguments = (eps, residual, *_arguments(binding, streams, keep))
        if binding.producer is Producer.RMS_NORM:
            p = binding.named(_OPS.rms_norm_output(x, weight, *arguments), keep)
            statistics = [p.spread]
        else:
            p = binding.named(_OPS.layer_norm_output(x, weight, bias, *arguments), keep)
            statistics = [p.mean, p.spread]
        ctx.save_for_backward(p.read_backward(x), p.kept_scale, *statistics, weight)
        ctx.binding, ctx.dtypes = binding, (x.dtype, None if residual is None else residual.dtype)
        return _results(ctx, p, x, binding)

    @staticmethod
    @_of_float_result
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of input, weight, bias and residual; input and residual share theirs."""
        run = _OPS.rms_norm_grad_input if ctx.binding.producer is Producer.RMS_NORM else _OPS.layer_norm_grad_input
        need_x, need_w, need_b, need_r = ctx.needs_input_grad[:4]
        wanted = [need_x or need_r, False, need_w, need_b]
        found = iter(run(grad.contiguous(), *ctx.saved_tensors, ctx.binding.key, wanted))
        grad_s, _, grad_w, grad_b = (next(found) if is_wanted else None for is_wanted in wanted)
        grad_x, grad_r = (_as(grad_s, dtype) if need else None for need, dtype in zip((need_x, need_r), ctx.dtypes, strict=True))
        return grad_x, grad_w, grad_b, grad_r, None, None, None


class ActivationChain(torch.autograd.Function):
    """An activation of matrices: the float result, and the copy with its scales."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, binding: ProducerBinding, streams: Streams) -> tuple[torch.Tensor, ...]:
        """The function of every element, rounded."""
        keep = ctx.needs_input_grad[0]
        p = binding.named(_OPS.activation_output(x, *_arguments(binding, streams, keep)), keep)
        ctx.save_for_backward(p.read_backward(x), p.kept_scale)
        ctx.binding, ctx.dtype = binding, x.dtype
        return _results(ctx, p, x, binding)

    @staticmethod
    @_of_float_result
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the input."""
        x, x_scale = ctx.saved_tensors
        return _as(_OPS.activation_grad_input(grad.contiguous(), x, x_scale, ctx.binding.key), ctx.dtype), None, None


class GluChain(torch.autograd.Function):
    """An activation of matrices times a second one: the float result, and the copy with its scales."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: torch.Tensor, binding: ProducerBinding, streams: Streams
    ) -> tuple[torch.Tensor, ...]:
        """The product of every element, rounded."""
        keep, (seed, offset) = any(ctx.needs_input_grad), streams
        seeds = seed, stream_key(seed, KEPT), stream_key(seed, KEPT_FACTOR)
        p = binding.named(_OPS.glu_output(x, factor, binding.key, keep, *seeds, offset), keep)
        kept = (x, None, factor, None) if p.kept is None else (p.kept, p.kept_scale, p.factor, p.factor_scale)
        ctx.save_for_backward(*kept)
        ctx.binding, ctx.dtypes = binding, (x.dtype, factor.dtype)
        return _results(ctx, p, x, binding)

    @staticmethod
    @_of_float_result
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of input and factor."""
        both = _OPS.glu_grad_input(grad.contiguous(), *ctx.saved_tensors, ctx.binding.key)
        needs = ctx.needs_input_grad[:2]
        grad_x, grad_factor = (_as(g, dtype) if need else None for g, dtype, need in zip(both, ctx.dtypes, needs, strict=True))
        return grad_x, grad_factor, None, None


def _as(grad: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return grad if grad is None or dtype is None or grad.dtype is dtype else grad.to(dtype)


def _binding(key: str) -> ProducerBinding:
    return cast(ProducerBinding, BOUND[key])


def _as_images(results: list[torch.Tensor], x: torch.Tensor, binding: ProducerBinding) -> list[torch.Tensor]:
    """Result and copy in the layout that the operators of the chain would give: that of their input."""
    if is_channels_last(x):
        return results
    whole = 2 if binding.writes_copy else 1
    if not binding.chain.float_result:  # nothing lies in memory whose layout could matter
        return [results[0], *(tensor.contiguous() for tensor in results[1:whole]), *results[whole:]]
    return [*(tensor.contiguous() for tensor in results[:whole]), *results[whole:]]


def absmax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of images, as a vector of one element."""
    in_memory = x.detach().permute(0, 2, 3, 1)  # a compiler reduces in the order of the dimensions, and reads in that order too
    return cast(torch.Tensor, torch.linalg.vector_norm(in_memory, torch.inf, dtype=torch.float32)).view(1)


def _batch_norm_chain(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    residual: torch.Tensor | None,
    residual_absmax: torch.Tensor | None,
    key: str,
    seed: int,
    offset: torch.Tensor,
) -> list[torch.Tensor]:
    binding = _binding(key)
    if residual is not None and residual_absmax is None:
        residual_absmax = absmax_of(residual)
    images, added = (None if t is None else t.contiguous(memory_format=torch.channels_last) for t in (x, residual))
    streams = seed, offset
    *results, mean, var = apply_of(BatchNormChain)(images, weight, bias, added, residual_absmax, eps, binding, streams)
    if running_mean is not None and running_var is not None:
        positions = x.numel() // x.shape[1]
        with torch.no_grad():
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(var * (positions / (positions - 1)), momentum)
    return _as_images(results, x, binding)


def _layer_norm_chain(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    key: str,
    seed: int,
    offset: torch.Tensor,
) -> list[torch.Tensor]:
    matrix, added = (None if t is None else rows(t).contiguous() for t in (x, residual))
    results = apply_of(RowNormChain)(matrix, weight, bias, added, eps, _binding(key), (seed, offset))
    return [*(tensor.view(x.shape) for tensor in results[:2]), *results[2:]]


def _rms_norm_chain(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    key: str,
    seed: int,
    offset: torch.Tensor,
) -> list[torch.Tensor]:
    return _layer_norm_chain(x, weight, None, eps, residual, key, seed, offset)


def _activation_chain(x: torch.Tensor, images: bool, key: str, seed: int, offset: torch.Tensor) -> list[torch.Tensor]:
    binding = _binding(key)
    if not images:
        results = apply_of(ActivationChain)(rows(x).contiguous(), binding, (seed, offset))
        return [*(tensor.view(x.shape) for tensor in results[:2]), *results[2:]]
    by_position = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    results = apply_of(ActivationChain)(rows(by_position), binding, (seed, offset))
    back = [tensor.view(by_position.shape).permute(0, 3, 1, 2) for tensor in results[:2]]
    return _as_images([*back, *results[2:]], x, binding)


def _glu_chain(x: torch.Tensor, factor: torch.Tensor, key: str, seed: int, offset: torch.Tensor) -> list[torch.Tensor]:
    results = apply_of(GluChain)(rows(x).contiguous(), rows(factor).contiguous(), _binding(key), (seed, offset))
    return [*(tensor.view(x.shape) for tensor in results[:2]), *results[2:]]


_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
for _run, _mutated in (
    (_batch_norm_chain, ("running_mean", "running_var")),
    *((run, ()) for run in (_layer_norm_chain, _rms_norm_chain, _activation_chain, _glu_chain)),
):
    _name = _run.__name__.lstrip("_")
    _LIBRARY.define(_name + torch.library.infer_schema(_run, mutates_args=_mutated))
    _LIBRARY.impl(_name, _run, "CompositeImplicitAutograd")

CHAINS: dict[Producer, Any] = {
    Producer.BATCH_NORM: _OPS.batch_norm_chain.default,
    Producer.LAYER_NORM: _OPS.layer_norm_chain.default,
    Producer.RMS_NORM: _OPS.rms_norm_chain.default,
    Producer.ACTIVATION: _OPS.activation_chain.default,
    Producer.GLU: _OPS.glu_chain.default,
}
"""What stands in a graph for a chain."""

"""Linear and convolution calls of ``apply_`` on random operands that are already cast, so that casts are timed on their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from qsync_core.ir.dag import Operator
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.kernels.binding import OperatorBinding, operator_binding
from qsync_torch.operators.casts import Gradient, Saved, Seeds, cast_gradient, cast_input, cast_weight
from qsync_torch.operators.conv2d import QuantizedConv2d, conv2d_backward, conv2d_product
from qsync_torch.operators.linear import QuantizedLinear, linear_backward, linear_product
from qsync_torch.profiling.replay_call import Armed, Prepared


def prepare_adjustable(
    operator: Operator, variant: Variant, layouts: Mapping[str, torch.Tensor], device: torch.device, choice: KernelChoice
) -> Prepared:
    """Random operands for an adjustable operator in a variant.

    Forward starts from operands in the compute format; backward from a gradient in the gradient format, and leaves the weight's
    gradient in float32 (:class:`~qsync_core.ir.profile.OpCost`).

    Args:
        operator: a linear or conv2d operator.
        variant: how it runs.
        layouts: the model's parameters by FQN, for their memory layouts.
        device: where.
        choice: whose kernels.
    """
    geometry = operator.geometry if operator.kind == "conv2d" else None
    binding = operator_binding(variant, choice, geometry)
    x = torch.randn(operator.input_shapes[0], device=device)
    if operator.attributes.get("memory_format") == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    weight = torch.empty_like(layouts[operator.parameters[0]], device=device).normal_().requires_grad_()
    bias = None
    if len(operator.parameters) > 1:
        bias = torch.randn(weight.shape[0], device=device, requires_grad=True)
    x_needs_gradient = 0 not in operator.no_grad_inputs
    if variant.compute.needs_scale:
        return _prepare_quantized(operator, binding, x, weight, bias, x_needs_gradient)
    return _prepare_float(operator, binding, x, weight, bias, x_needs_gradient)


def _prepare_float(
    operator: Operator,
    binding: OperatorBinding,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_needs_gradient: bool,
) -> Prepared:
    product: Callable[..., torch.Tensor] = linear_product if operator.kind == "linear" else conv2d_product
    dtype = binding.x_dtype
    x = x.to(dtype).requires_grad_(x_needs_gradient)
    trained = [tensor for tensor in (weight, bias) if tensor is not None]
    wanted = (x, *trained) if x_needs_gradient else tuple(trained)

    def arm() -> Armed:
        # The weight's cast is made here, with its autograd node: its backward brings the gradient to float32.
        cast = weight.to(dtype)
        return Armed(partial(product, x, None, cast, None, bias, binding), wanted)

    return Prepared(arm, (x,), tuple(trained))


def _prepare_quantized(
    operator: Operator,
    binding: OperatorBinding,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_needs_gradient: bool,
) -> Prepared:
    q_x, q_w = cast_input(x, binding, Seeds()), cast_weight(weight, binding, Seeds())
    # Only a place where the gradient goes: neither read nor saved.  An 8-bit product writes the activation's format itself.
    x_dtype = binding.output if binding.grad_input_quantized else binding.grad_input
    place = torch.zeros((), device=x.device, dtype=x_dtype).expand(x.shape).requires_grad_(x_needs_gradient)
    needs = (x_needs_gradient, True, bias is not None)
    is_linear = operator.kind == "linear"
    function, products = (QuantizedLinear, linear_backward) if is_linear else (QuantizedConv2d, conv2d_backward)
    kept_x = q_x.values if q_x.transposed is None else q_x.transposed.t()
    saved = Saved(kept_x, q_x.scale, q_w.values, q_w.scale, x.shape, x_dtype)
    forward = partial(function.apply, place, weight, bias, *q_x, q_w.values, q_w.scale, binding, 0, 0)
    trained = tuple(tensor for tensor in (weight, bias) if tensor is not None)
    if not (binding.grad_input_quantized and x_needs_gradient) and not binding.grad_weight_quantized:
        armed = Armed(forward, (weight,), lambda grad: products(Gradient(grad, grad), saved, binding, needs))
        return Prepared(lambda: armed, (kept_x,), trained, binding.grad_float)
    # The casts of the gradient are timed on their own, so the copies are made here.
    incoming = torch.randn(operator.output_shape, device=x.device, dtype=binding.output)
    if not is_linear and x.is_contiguous(memory_format=torch.channels_last):
        incoming = incoming.to(memory_format=torch.channels_last)
    gradient = cast_gradient(incoming, q_w.scale, binding, needs, 0, 0)
    armed = Armed(forward, (weight,), lambda grad: products(gradient, saved, binding, needs))
    return Prepared(lambda: armed, (kept_x,), trained)

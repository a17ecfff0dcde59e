"""Benchmark cases: one operator's call on random operands, in any variant or precision that it can run in.

Operands are already cast, so that casts are timed on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.ir.dag import Operator
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.aten.stored_weights import quantize_weight
from qsync_torch.distributed.alone import Alone
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.job import Batch, Job
from qsync_torch.kernels.binding import OperatorBinding, operator_binding
from qsync_torch.kinds.convolution import CHANNELS_LAST
from qsync_torch.kinds.products import operand_of
from qsync_torch.operators.autograd import Saved
from qsync_torch.operators.casts import GRAD, Gradient, Grads, Seeds, W, cast_gradient, cast_input, cast_weight
from qsync_torch.operators.products import QuantizedProduct, backward_products, forward_product
from qsync_torch.operators.stored import run_stored
from qsync_torch.torch_internals import pytree
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tracing.running_loss import map_tensors, outputs_of


@attrs.frozen(eq=False)
class ReadyCall:
    """A forward call that is ready to run once, and its backward.

    Attributes:
        wanted: where the gradients of its backward are wanted.
        backward: takes the output's gradient and runs the backward without autograd; None for autograd's own.
    """

    run: Callable[[], Any]
    wanted: tuple[torch.Tensor, ...]
    backward: Callable[[torch.Tensor], Any] | None = None

    def backward_thunk(self, result: Any, gradients: Sequence[torch.Tensor]) -> Callable[[], Any] | None:
        """A call of the backward for one forward's result; None where there is nothing to differentiate."""
        sources = differentiable_outputs(result)
        if not sources or not self.wanted:
            return None
        if self.backward is not None:
            return partial(self.backward, gradients[0])
        return partial(torch.autograd.grad, sources, self.wanted, gradients, allow_unused=True)


@attrs.frozen(eq=False)
class BenchmarkCase:
    """Operands of one call and how to run it.

    Attributes:
        make_ready: makes the forward call ready; what happens here is not timed.
        activations, parameters: tensors, for telling what autograd keeps.
        gradient_dtype: format in which the output's gradient arrives; None for the output's own.
        gradient_layout: how it lies in memory.
        with_casts: the same call with casts that it makes and forgets, for what memory it takes; None where there are none.
    """

    make_ready: Callable[[], ReadyCall]
    activations: tuple[torch.Tensor, ...]
    parameters: tuple[torch.Tensor, ...]
    gradient_dtype: torch.dtype | None = None
    gradient_layout: torch.memory_format = torch.preserve_format
    with_casts: BenchmarkCase | None = None


def differentiable_outputs(result: Any) -> list[torch.Tensor]:
    """The outputs of a call through which gradients flow back."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def make_case(
    operator: Operator,
    variant: Variant,
    layouts: Mapping[str, torch.Tensor],
    device: torch.device,
    choice: KernelChoice,
    base: Precision = Precision.FLOAT32,
) -> BenchmarkCase:
    """Fresh random operands for an operator: an adjustable one as ``apply_`` runs it, any other by its recorded call.

    Args:
        operator: of a traced graph.
        variant: how it runs; of an operator that is not adjustable, only the format of its activations.
        layouts: the model's parameters by FQN, for their memory layouts.
        choice: whose kernels run an adjustable operator.
        base: of the graph; under AMP any other is called as the model calls it, for the caller to run under autocast.
    """
    if operator.is_adjustable:
        return adjustable_case(operator, variant, layouts, device, choice)
    return replayed_case(operator, device, variant.compute, base)


def adjustable_case(
    operator: Operator, variant: Variant, layouts: Mapping[str, torch.Tensor], device: torch.device, choice: KernelChoice
) -> BenchmarkCase:
    """An operator of a kind in a variant.

    Forward starts from operands in the compute format; backward from a gradient in the gradient format, and leaves the weight's
    gradient in float32 (:class:`~qsync_core.ir.profile.OpCost`).
    """
    geometry = operator.geometry if operator.is_convolution else None
    binding = operator_binding(variant, choice, geometry)
    x = torch.randn(operator.input_shapes[0], dtype=torch.float32, device=device)
    if operator.input_stride:
        x = torch.empty_strided(operator.input_shapes[0], operator.input_stride, device=device).normal_()
    if operator.attributes.get("memory_format") == "channels_last":
        x = x.to(memory_format=CHANNELS_LAST[x.dim()])
    first = layouts[operator.parameters[0]] if operator.parameters else torch.empty(0)
    is_computed = tuple(first.shape) != operator.parameter_shape  # weight_norm: the weight is none of the parameters that it reads
    parameter = (
        torch.empty(operator.parameter_shape, dtype=torch.float32, device=device)
        if is_computed
        else torch.empty_like(first, device=device)
    ).normal_()
    parameter.requires_grad_(not operator.frozen)
    bias = None
    if len(operator.parameters) > (not is_computed):
        bias = torch.randn(operator.weight_shape[0], dtype=torch.float32, device=device, requires_grad=True)
    x_needs_gradient = 0 not in operator.no_grad_inputs
    if variant.compute.needs_scale:
        return _quantized_case(operator, binding, x, parameter, bias, x_needs_gradient)
    return _float_case(operator, binding, x, parameter, bias, x_needs_gradient)


def _float_case(
    operator: Operator,
    binding: OperatorBinding,
    x: torch.Tensor,
    parameter: torch.Tensor,
    bias: torch.Tensor | None,
    x_needs_gradient: bool,
) -> BenchmarkCase:
    dtype = binding.x_dtype
    x = x.to(dtype).requires_grad_(x_needs_gradient)
    own = [tensor for tensor in (parameter, bias) if tensor is not None]
    wanted = tuple(tensor for tensor in (x, *own) if tensor.requires_grad)

    def make_ready() -> ReadyCall:
        # The weight's cast is made here, with its autograd node: its backward brings the gradient to float32.
        cast = _weight_of(operator, parameter).to(dtype)
        return ReadyCall(partial(forward_product, x, None, cast, None, bias, binding), wanted)

    with_casts = _stored_case(operator, binding, x, parameter, bias) if binding.variant.storage.is_quantized else None
    return BenchmarkCase(make_ready, (x,), tuple(own), with_casts=with_casts)


def _stored_case(
    operator: Operator, binding: OperatorBinding, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> BenchmarkCase:
    """A product that dequantizes its weight in each pass."""
    storage, shape = binding.variant.storage, operator.weight_shape
    stored = quantize_weight(weight, storage)
    ready = ReadyCall(
        partial(run_stored, x, stored, storage, shape, bias, binding, Seeds()),
        tuple(tensor for tensor in (x, bias) if tensor is not None and tensor.requires_grad),
    )
    own = [tensor for tensor in (*stored, bias) if tensor is not None]
    return BenchmarkCase(lambda: ready, (x,), tuple(own))


def _weight_of(operator: Operator, parameter: torch.Tensor) -> torch.Tensor:
    """The weight that an operator reads, output channels first, of what the model stores."""
    return parameter.t() if operator.is_transposed else operand_of(parameter, operator.geometry)


def _quantized_case(
    operator: Operator,
    binding: OperatorBinding,
    x: torch.Tensor,
    parameter: torch.Tensor,
    bias: torch.Tensor | None,
    x_needs_gradient: bool,
) -> BenchmarkCase:
    weight = _weight_of(operator, parameter)
    with torch.no_grad():
        one = torch.ones(x.shape[-1], dtype=torch.float32, device=x.device) if binding.factored else None
        q_x = cast_input(x, binding, Seeds(), inverse=one)
        q_w = cast_weight(weight, binding, W, q_x.stream, factor=one)
    # Only a place where the gradient goes: neither read nor saved.  An 8-bit product writes the activation's format itself.
    x_dtype = binding.output if binding.grad_input_quantized else binding.grad_input
    place = torch.zeros((), device=x.device, dtype=x_dtype).expand(x.shape).requires_grad_(x_needs_gradient)
    needs = (x_needs_gradient, not operator.frozen, bias is not None)
    kept_x, kept_x_scale = q_x.kept
    stored = (q_w.values, q_w.scale) if binding.variant.reads_stored else ()  # no copies of the operator's own
    saved = Saved(kept_x, kept_x_scale, q_w.values, q_w.scale, x.shape, x_dtype, one)
    apply = partial(QuantizedProduct.apply, place, weight, bias, binding, Seeds(), True, None, q_w, q_x, one)

    def forward() -> Any:
        if operator.is_transposed:  # quantization reads a copy in the order of the rows
            weight.detach().contiguous()
        return apply()

    def backward(gradient: Gradient) -> Grads:
        found = backward_products(gradient, saved, binding, needs)
        if operator.is_transposed and found[1] is not None:  # gradients have the layout of their parameters
            found[1].t().contiguous()
        return found

    own = tuple(tensor for tensor in (parameter, bias, *stored) if tensor is not None)
    wanted = tuple(tensor for tensor in (place, parameter, bias) if tensor is not None and tensor.requires_grad)
    if not (binding.grad_input_quantized and x_needs_gradient) and not binding.grad_weight_quantized:
        call = ReadyCall(forward, wanted, lambda grad: backward(Gradient(grad, grad)))
        return BenchmarkCase(lambda: call, (kept_x,), own, binding.grad_float)
    # The casts of the gradient are timed on their own, so the copies are made here.
    incoming = torch.randn(operator.output_shape, device=x.device, dtype=binding.output)
    last = CHANNELS_LAST.get(x.dim())
    if operator.is_convolution and last is not None and x.is_contiguous(memory_format=last):
        incoming = incoming.to(memory_format=last)
    gradient = cast_gradient(incoming, q_x.scale, q_w.scale, binding, needs, GRAD, q_x.stream)
    call = ReadyCall(forward, wanted, lambda grad: backward(gradient))
    return BenchmarkCase(lambda: call, (kept_x,), own)


def replayed_case(
    operator: Operator, device: torch.device, precision: Precision, base: Precision = Precision.FLOAT32
) -> BenchmarkCase:
    """An operator's recorded call (:class:`~qsync_torch.tracing.aten_call.AtenCall`), its activations in a float format."""
    call = AtenCall.of(operator)
    assert call is not None, f"{operator.op_id} carries no call"
    inputs = call.make_inputs([TORCH_DTYPE[precision]] * len(operator.inputs), device)
    parameters = call.make_parameters(device)
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(index not in operator.no_grad_inputs)
    for tensor in parameters:
        tensor.requires_grad_()
    wanted = tuple(tensor for tensor in (*inputs, *parameters) if tensor.requires_grad)
    bound = call.bind(inputs, parameters, device, as_apply_runs_it=base is Precision.FLOAT32)
    ready = ReadyCall(bound, wanted)
    return BenchmarkCase(lambda: ready, tuple(inputs), (*parameters, *_buffers(bound, {id(t) for t in (*inputs, *parameters)})))


def loss_case(job: Job, operator: Operator, model: torch.nn.Module, batch: Batch, alone: Alone | None = None) -> BenchmarkCase:
    """A loss that was run where it was traced (:mod:`~qsync_torch.tracing.running_loss`), on the model's outputs in float32.

    Args:
        job: whose loss; operator: that stands for it.
        alone: answers what the loss asks other ranks; None where it asks nothing.
    """
    given: list[torch.Tensor] = []

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        given.append(wide.detach().clone().requires_grad_().clone())  # a loss may write into it, which no leaf permits
        return given[-1]

    output = map_tensors(outputs_of(job, model, batch), detached)
    loss = job.loss if alone is None else partial(alone.run, job.loss)
    ready = ReadyCall(lambda: loss(output, batch), tuple(given))
    read = iter(given)
    found = [next((x for x in read if tuple(x.shape) == shape), None) for shape in operator.input_shapes]
    activations = () if any(x is None for x in found) else tuple(x for x in found if x is not None)
    return BenchmarkCase(lambda: ready, activations, (*model.parameters(), *batch.tensors))


def _buffers(bound: Callable[[], Any], known: set[int]) -> list[torch.Tensor]:
    """Other tensors that a bound call reads and that live anyway: running statistics, the batch's indices and targets.

    Masks are made in the forward, and kept for backward alone.
    """
    if not isinstance(bound, partial):
        return []
    leaves = pytree.tree_leaves((bound.args, bound.keywords))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool and id(leaf) not in known]

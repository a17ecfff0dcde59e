"""Products that read a stored weight: it is dequantized in each pass, so that no copy of it lives between them.

An int8 product reads int8 rows as they are stored (:class:`qsync_torch.operators.products.QuantizedProduct` with that copy).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Storage
from qsync_core.kernels.backend import Kernel
from qsync_core.kernels.launches import HERE
from qsync_core.kernels.support import FLOATS
from qsync_torch.aten import float_products, stored_weights
from qsync_torch.aten.stored_weights import StoredWeight
from qsync_torch.dtypes import PRECISION
from qsync_torch.kernels.binding import BOUND, Memo, OperatorBinding
from qsync_torch.kernels.library_ops import WithoutAutocast, is_plain
from qsync_torch.kernels.selection import build_kernel, dequantize_request, reports
from qsync_torch.kinds import products
from qsync_torch.kinds.kind import OperatorKind, Settings
from qsync_torch.operators.autograd import apply_of
from qsync_torch.operators.cast_cache import CastCache
from qsync_torch.operators.casts import Operand, Seeds, float_input
from qsync_torch.operators.products import QuantizedProduct, offset_of
from qsync_torch.operators.replays import Context, Replayed, Tensors
from qsync_torch.replaying import extension
from qsync_torch.torch_internals import transforms_are_active


def dequantize(stored: StoredWeight, storage: Storage, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What products in ``dtype`` read of a stored weight, as one operator of PyTorch's, which a compiler keeps whole.

    The backend is the fastest that the device has (:data:`qsync_core.kernels.backend.Op.DEQUANTIZE`); all write the same bits.
    """
    return _read(*stored, str(storage), tuple(shape), dtype)


def _read(values: torch.Tensor, *others: Any) -> torch.Tensor:
    """Call the operator with what :func:`_dequantize` takes, or that at once: the dispatcher takes longer than a small weight's
    kernel runs.
    """
    run = _dequantize if is_plain(values) and values.device.type != "meta" else torch.ops.qsync.dequantize_stored
    return cast(torch.Tensor, run(values, *others))


def _dequantize(
    values: torch.Tensor,
    scale: torch.Tensor,
    constants: torch.Tensor | None,
    offset: torch.Tensor | None,
    storage: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device=values.device)
    kernel = _KERNELS[values.device, storage, tuple(shape), dtype]
    if HERE.recorder is not None and not reports(kernel):
        HERE.recorder.refuse("a backend does not tell of its launches")
    kernel(values, scale, constants, offset, out)
    return out


def _kernel_of(asked: tuple[torch.device, str, tuple[int, ...], torch.dtype]) -> Kernel:
    device, storage, shape, dtype = asked
    if PRECISION.get(dtype) not in FLOATS:  # such as float64, which no product of a plan computes in
        return stored_weights.build_dequantize(Storage(storage))
    return build_kernel(*dequantize_request(device, Storage(storage), shape, PRECISION[dtype]))


_KERNELS = Memo(_kernel_of)


_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define(
    "dequantize_stored(Tensor values, Tensor scale, Tensor? constants, Tensor? offset, str storage, int[] shape, ScalarType dtype) "
    "-> Tensor"
)
_LIBRARY.impl("dequantize_stored", _dequantize, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "dequantize_stored",
    lambda values, scale, constants, offset, storage, shape, dtype: values.new_empty(shape, dtype=dtype),
    "Meta",
)


@torch.compiler.allow_in_graph  # traced, it would save its operands past the hooks of a checkpoint that runs it again
class StoredProduct(torch.autograd.Function):
    """The product with a stored weight, and the gradients of activation and bias.

    Operands are in one float format, and so are results and gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        values: torch.Tensor,
        scale: torch.Tensor,
        constants: torch.Tensor | None,
        offset: torch.Tensor | None,
        storage: str,
        shape: tuple[int, ...],
        settings: tuple[Any, ...] | None,
    ) -> torch.Tensor:
        """The geometry comes as constants, which a compiler can write into a graph."""
        ctx.save_for_backward(values, scale, constants, offset)
        ctx.kept = storage, shape, settings, x.shape
        weight = _read(values, scale, constants, offset, storage, shape, x.dtype)
        return float_products.product(x, weight, bias, _geometry_of(settings))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Differentiable by the incoming gradient: it consists of torch's operators."""
        storage, shape, settings, x_shape = ctx.kept
        geometry, grad_x, grad_b = _geometry_of(settings), None, None
        with WithoutAutocast(grad.device.type):  # where ``backward()`` is called under it, that would choose other formats
            if ctx.needs_input_grad[0]:
                values, scale, constants, offset = ctx.saved_tensors
                weight = _read(values, scale, constants, offset, storage, shape, grad.dtype)
                wide = float_products.needs_widening(grad)
                source = grad.float() if wide else grad
                x = source.new_empty(()).expand(x_shape)  # of which no more than the shape is read
                grad_x, _ = products.product_gradients(source, x, weight.float() if wide else weight, geometry, True, False)
                grad_x = grad_x.to(grad.dtype)
            if ctx.needs_input_grad[1]:
                grad_b = products.bias_gradient(grad, geometry, torch.float32).to(grad.dtype)
        return grad_x, grad_b, *(None,) * 7


class StoredReplays(Replayed):
    """Products with weights stored alike.

    A forward's tensors are activation, bias and None among what is stored: (x, values, bias, None, scale, constants, offset); the
    gradient by the weight is None.

    Args:
        how: storage, shape of the weight, and geometry, as :class:`StoredProduct` takes them.
    """

    def __init__(self, how: tuple[Any, ...]) -> None:
        self._how = how

    def _forward(self, tensors: Tensors, needs: Sequence[bool], grad_enabled: bool) -> Tensors:
        x, values, bias, _, *others = tensors
        context = Context(needs)
        y = StoredProduct.forward(context, x, bias, values, *others, *self._how)  # type: ignore[arg-type]
        return y, *context.saved_tensors, None, None

    def backward(self, name: str, tensors: Tensors, needs: Sequence[bool], shape: Sequence[int], dtype: torch.dtype) -> Tensors:
        """The gradients of activation, weight and bias."""
        grad, *saved = tensors
        assert grad is not None
        context = Context((needs[0], needs[2]))
        context.saved_tensors, context.kept = saved[:4], (*self._how, shape)
        grad_x, grad_b, *_ = StoredProduct.backward(context, grad)
        return grad_x, None, grad_b


REPLAY_OF_STORED: Memo[tuple[Any, ...], Callable[..., Any]] = Memo(lambda how: StoredReplays(how).runner())
"""What runs a product in the extension, by how its weight is stored: as :data:`qsync_torch.operators.replays.REPLAY_OF`."""


def _applied(x: torch.Tensor, bias: torch.Tensor | None, stored: StoredWeight, how: tuple[Any, ...]) -> torch.Tensor:
    if not torch.compiler.is_compiling() and extension.loaded() is not None:  # which a compiler would guard, and then compile again
        y = REPLAY_OF_STORED[how](x, stored.values, bias, None, stored[1:], False, "")
        if y is not None:
            return cast(torch.Tensor, y)
    return apply_of(StoredProduct)(x, bias, *stored, *how)


def _int8_product(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    copy = Operand(values, scale, scale.new_empty(0, dtype=torch.int64))
    return apply_of(QuantizedProduct, binding, seeds)(x, values, bias, binding, seeds, torch.is_grad_enabled(), cache, copy)


def _run_node(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    key: str,
    x_seed: int,
    w_seed: int,
    grad_seed: int,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Run an int8 product that is one node of a compiled graph, as :func:`qsync_torch.operators.products.lowered_node` makes it."""
    binding = cast(OperatorBinding, BOUND[key])
    return _int8_product(x, values, scale, bias, binding, Seeds(x_seed, w_seed, offset_of(offset, x), grad_seed))


_LIBRARY.define(
    "stored_int8(Tensor x, Tensor values, Tensor scale, Tensor? bias, str binding, SymInt x_seed, SymInt w_seed, SymInt grad_seed, "
    "Tensor offset) -> Tensor"
)
_LIBRARY.impl("stored_int8", _run_node, "CompositeImplicitAutograd")

_geometry = functools.cache(Geometry)


def _geometry_of(settings: tuple[Any, ...] | None) -> Geometry | None:
    return None if settings is None else _geometry(*settings)


def _settings_of(geometry: Geometry | None) -> tuple[Any, ...] | None:
    g = geometry
    return None if g is None else (g.stride, g.padding, g.dilation, g.groups, g.transposed, g.output_padding)


def _is_transformed(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product has to consist of PyTorch's own operators: transformed, recorded, or in forward mode."""
    if transforms_are_active() or torch.jit.is_tracing():
        return True
    operands = () if torch.compiler.is_compiling() else (x, bias)
    return any(forward_ad.unpack_dual(operand).tangent is not None for operand in operands if operand is not None)


def run_stored(
    x: torch.Tensor,
    stored: StoredWeight,
    storage: Storage,
    shape: tuple[int, ...],
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """A call of an operator whose weight is stored, with every cast of core's table; of images with or without a batch.

    Args:
        x: the activation, float32 or a 16-bit float.
        stored: the weight; storage: how, as the binding's variant says; shape: of the weight.
        bias: as the script holds it.
        binding: how the operator runs.
        seeds: of the activation's rounding in an int8 product.
        cache: where casts of ``x`` are shared.
    """
    if not binding.of_rows and x.ndim == len(shape) - 1:
        return run_stored(x[None], stored, storage, shape, bias, binding, seeds, cache)[0]
    if binding.variant.reads_stored:
        if torch.compiler.is_compiling():
            node = torch.ops.qsync.stored_int8
            return cast(
                torch.Tensor, node(x, stored.values, stored.scale, bias, binding.key, seeds.x, seeds.w, seeds.grad, seeds.offset)
            )
        return _int8_product(x, stored.values, stored.scale, bias, binding, seeds, cache)
    x = float_input(x, binding, cache)
    bias = None if bias is None else bias.to(binding.bias_dtype)
    if _is_transformed(x, bias):
        weight = dequantize(stored, storage, shape, x.dtype)
        y = float_products.product(x, weight, bias, binding.called)
    else:
        y = _applied(x, bias, stored, (str(storage), shape, _settings_of(binding.called)))
    return y if y.dtype is binding.output else y.to(binding.output)


def run_in_own_format(
    x: torch.Tensor,
    stored: StoredWeight,
    storage: Storage,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    kind: OperatorKind,
    settings: Settings,
) -> torch.Tensor | None:
    """A call that runs as the script has it (in eval mode), where gradients are to come: no dequantized copy waits for them.

    Args:
        x, bias, settings: as the function of the kind takes them.
        stored: the weight; storage: how; shape: of the weight; dtype: in which the script has it.

    Returns:
        None where PyTorch's function has to run: without gradients, in compiled code, with formats that it refuses.
    """
    needed = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if not needed or torch.compiler.is_compiling() or not is_plain(x) or _is_transformed(x, bias):
        return None
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype is not torch.float64
    compute = torch.get_autocast_dtype(device) if casts else x.dtype
    operands = [x.dtype, dtype] if bias is None else [x.dtype, dtype, bias.dtype]
    if dtype not in (compute, torch.float32) or (not casts and any(one is not compute for one in operands)):
        return None
    if x.ndim == len(shape) - 1 and kind.prepare is not None:
        y = run_in_own_format(x[None], stored, storage, shape, dtype, bias, kind, settings)
        return None if y is None else y[0]
    geometry = None
    if kind.prepare is not None:
        x, geometry = kind.prepare(x, torch.empty(shape, device="meta"), settings)
    x, bias = x.to(compute), None if bias is None else bias.to(compute)
    with WithoutAutocast(device):
        return _applied(x, bias, stored, (str(storage), shape, _settings_of(geometry)))

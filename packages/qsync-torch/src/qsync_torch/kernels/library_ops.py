"""The custom operators ``torch.ops.qsync.*``: quantizations and products that run a backend's kernels.

Each is a function of tensors and a binding that allocates its results and calls the kernel.  Where a compiler, a dispatch mode,
fake tensors or a tensor subclass want to see the call, it goes through the operator of the same name, which has a fake
implementation and takes the binding's key; a plain eager call skips the dispatcher, which costs several microseconds.  Gradients
are attached where operators are put together (:mod:`qsync_torch.operators`): backward reads the saved 8-bit copies and never the
float activation.

The overloads ``at`` take the offset of the random numbers in a tensor: compilers make one graph for every step with it.

A quantization also gives its *stream*, one int64: which random numbers it took, a function of the offset and the bits of what it
read (:func:`~qsync_torch.aten.random_bits.stream_of`).  It is the offset of what is quantized because of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from qsync_core.kernels.backend import Op
from qsync_core.kernels.launches import HERE
from qsync_torch.aten.quantize import quantizable
from qsync_torch.aten.random_bits import Offset, as_kernels_take
from qsync_torch.kernels.binding import BOUND, Memo, OperatorBinding, Quantization
from qsync_torch.replaying import extension
from qsync_torch.replaying.recording import recorded

Copied = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Values, scales and stream."""
CopiedTwice = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The same and the transposed values."""
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_OPS = torch.ops.qsync


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether a call on these may skip the dispatcher: no compiler, dispatch mode or tensor subclass wants to see it.

    The dispatcher also writes numbers out whose sign is changed when they are read (``z.conj().imag``).
    """
    if torch.compiler.is_compiling():  # first, because a compiler does not read further
        return False
    for x in tensors:
        if type(x) not in PLAIN_TENSORS or x.is_neg():
            return False
    return not (torch._C._len_torch_dispatch_stack() and HERE.recorder is None)


class WithoutAutocast:
    """Autocast turned off on a kind of device; ``torch.autocast(enabled=False)`` takes ten times as long."""

    def __init__(self, kind: str) -> None:
        self._kind, self._was_on = kind, torch.is_autocast_enabled(kind)

    def __enter__(self) -> None:
        if self._was_on:
            torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            torch.set_autocast_enabled(self._kind, True)


def quantize(
    x: torch.Tensor,
    quantization: Quantization,
    seed: int,
    offset: Offset,
    multiplier: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
    *,
    straight: bool = False,
) -> Copied:
    """Quantize ``x``, without a derivative.

    Args:
        maxima: of ``x`` times ``multiplier``, where the kernel that made ``x`` found them (docs/design/fused-chains.md#backward).

    Returns:
        The 8-bit copy, dense in the layout of ``x``; its float32 scales as a vector, with its zero points behind them where it is
        affine; and its stream, (1,), which is empty where the quantization says that none is read.
    """
    if not straight and not is_plain(x):
        op = _OPS.quantize.at if isinstance(offset, torch.Tensor) else _OPS.quantize.default
        return cast(Copied, op(x, quantization.key, seed, offset, multiplier, maxima))
    if not x.is_contiguous():
        x = quantizable(x, quantization.granularity)
    kernel = quantization.kernel(Op.QUANTIZE, x.device, x.shape)
    q, scale, stream = _quantized(x, quantization, quantization.scale_counts[x.shape], _NO_STREAM[x.device])
    written = stream if quantization.streamed else None
    known = {} if maxima is None else {"maxima": maxima}
    if multiplier is None:
        kernel(x, q, scale, written, seed, offset, **known)
    else:
        kernel(x, q, scale, written, seed, offset, multiplier, **known)
    return q, scale, stream


def quantize_transposed(
    x: torch.Tensor,
    quantization: Quantization,
    seed: int,
    offset: Offset,
    multiplier: torch.Tensor | None = None,
    row_multiplier: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
    *,
    straight: bool = False,
) -> CopiedTwice:
    """Quantize ``x`` (..., K) as :func:`quantize` does; the fourth result is the copy as (K, M), M all other dimensions.

    Under a scale for each row that copy has a scale for each column, and is of ``x`` times ``row_multiplier`` (M), where there is
    one.  ``maxima``: as there.
    """
    if not straight and not is_plain(x):
        op = _OPS.quantize_transposed.at if isinstance(offset, torch.Tensor) else _OPS.quantize_transposed.default
        return cast(CopiedTwice, op(x, quantization.key, seed, offset, multiplier, row_multiplier, maxima))
    x_MK = rows(x).contiguous()
    kernel = quantization.kernel(Op.QUANTIZE, x.device, x_MK.shape)
    q, scale, stream, transposed = _transposed(x_MK, x.shape, quantization, quantization.scale_counts[x_MK.shape])
    written = stream if quantization.streamed else None
    by_row = () if row_multiplier is None else (row_multiplier,)
    known = {} if maxima is None else {"maxima": maxima}
    kernel(x_MK, q.view(x_MK.shape), scale, written, seed, offset, multiplier, transposed, *by_row, **known)
    return q, scale, stream, transposed


def _no_stream(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.int64, device=device)


_NO_STREAM = Memo(_no_stream)
"""What stands on each device for a stream that nothing reads: it holds nothing, and is never written."""


def _quantized(x: torch.Tensor, quantization: Quantization, scale_count: int, no_stream: torch.Tensor | None = None) -> Copied:
    """Allocate a copy, its scales and its stream, for which ``no_stream`` stands where there is none."""
    stream = x.new_empty(int(quantization.streamed), dtype=torch.int64) if quantization.streamed or no_stream is None else no_stream
    return torch.empty_like(x, dtype=quantization.dtype), x.new_empty(scale_count, dtype=torch.float32), stream


def _transposed(x_MK: torch.Tensor, shape: Sequence[int], quantization: Quantization, scale_count: int) -> CopiedTwice:
    q, scale, stream = _quantized(x_MK, quantization, scale_count)
    return (
        q.view(shape) if q.is_contiguous() else q,
        scale,
        stream,
        torch.empty(x_MK.shape[::-1], dtype=quantization.dtype, device=x_MK.device),
    )


def rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix of the last dimension; one that is a matrix already is not even viewed, which would take a microsecond."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


# Products of rows and of convolutions have one signature: what one of them does not need it does not read.


def linear_output(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    *,
    straight: bool = False,
) -> torch.Tensor:
    """(..., K) and (N, K) of 8 bits to (..., N) in the output's format."""
    if not straight and not is_plain(x):
        return cast(torch.Tensor, _OPS.linear_output.default(x, x_scale, w, w_scale, bias, binding.key))
    w_shape = w.shape
    if x.ndim == 2:
        shape = x.shape
        out = x.new_empty(shape[0], w_shape[0], dtype=binding.output)
        binding.kernel(Op.LINEAR_OUTPUT, x.device, shape, w_shape)(x, x_scale, w, w_scale, bias, out)
        return out
    x_MK, out = rows(x), x.new_empty(*x.shape[:-1], w_shape[0], dtype=binding.output)
    binding.kernel(Op.LINEAR_OUTPUT, x.device, x_MK.shape, w_shape)(x_MK, x_scale, w, w_scale, bias, rows(out))
    return out


def linear_grad_input(
    grad: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    x_shape: Sequence[int],
    binding: OperatorBinding,
    dtype: torch.dtype | None = None,
    columns: torch.Tensor | None = None,
    *,
    straight: bool = False,
) -> torch.Tensor:
    """(..., N), or (M, N) of all rows, and (N, K) to ``x_shape`` (..., K) in ``dtype``, by default the variant's, times ``columns``
    (K)."""
    if not straight and not is_plain(grad):
        return cast(torch.Tensor, _OPS.linear_grad_input.default(grad, w, scale, x_shape, binding.key, dtype, columns))
    more = () if columns is None else (columns,)
    if grad.ndim == 2 and len(x_shape) == 2:
        out = grad.new_empty(*x_shape, dtype=dtype or binding.grad_input)
        binding.kernel(Op.LINEAR_GRAD_INPUT, grad.device, grad.shape, w.shape)(grad, w, scale, out, *more)
        return out
    grad_MN, out = rows(grad), grad.new_empty(*x_shape, dtype=dtype or binding.grad_input)
    binding.kernel(Op.LINEAR_GRAD_INPUT, grad.device, grad_MN.shape, w.shape)(grad_MN, w, scale, rows(out), *more)
    return out


def linear_grad_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    w: torch.Tensor | None,
    binding: OperatorBinding,
    columns: torch.Tensor | None = None,
    *,
    straight: bool = False,
) -> torch.Tensor:
    """(..., N) and (..., K) to (N, K) in float32, times ``columns`` (K)."""
    if not straight and not is_plain(grad):
        return cast(torch.Tensor, _OPS.linear_grad_weight.default(grad, x, scale, w, binding.key, columns))
    grad_MN, x_MK = rows(grad), rows(x)
    grad_shape, x_shape = grad_MN.shape, x_MK.shape
    out = grad.new_empty(grad_shape[1], x_shape[1], dtype=torch.float32)
    kernel = binding.kernel(Op.LINEAR_GRAD_WEIGHT, grad.device, grad_shape, x_shape)
    kernel(grad_MN, x_MK, scale, out, *(() if columns is None else (columns,)))
    return out


def _images(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # Sizes one by one: PyTorch takes twice as long over a tuple.
    return torch.empty(*shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether it is images that lie in memory by position, and not by channel as well."""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _in_layout_of(y: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Channels-last ``y`` in the layout that PyTorch's function would give: channels-last where an operand is, else contiguous."""
    for x in operands:
        if is_channels_last(x):
            return y
    return y.contiguous()


def convolution_output(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    *,
    straight: bool = False,
) -> torch.Tensor:
    """(B, C, H, W) and (O, C / groups, KH, KW) of 8 bits to (B, O, OH, OW) in the output's format.

    Images with fewer dimensions than the kernels take are taken as such of one row; so they are by the gradients.

    Raises:
        RuntimeError: where operands do not fit each other, as PyTorch's function does.
    """
    if x.ndim < binding.dimensions:
        out = convolution_output(x.unsqueeze(2), x_scale, w.unsqueeze(2), w_scale, bias, binding, straight=straight)
        return out.squeeze(2).clone()  # a view could not be changed in place by what follows, such as ``ReLU(inplace=True)``
    if not straight and not is_plain(x):
        return cast(torch.Tensor, _OPS.convolution_output.default(x, x_scale, w, w_scale, bias, binding.key))
    out = _images(x, binding.result_shapes[x.shape, w.shape], binding.output)
    if bias is not None and bias.shape != w.shape[:1]:
        raise RuntimeError(
            f"a convolution with {w.shape[0]} output channels has as many biases, got a bias of shape {list(bias.shape)}"
        )
    binding.kernel(binding.output_op, x.device, x.shape, w.shape)(x, x_scale, w, w_scale, bias, out)
    return _in_layout_of(out, x, w)


def _check_result(grad: torch.Tensor, x_shape: tuple[int, ...], w: torch.Tensor, binding: OperatorBinding) -> None:
    """Refuse a gradient that no convolution of this activation with these filters has."""
    expected = binding.result_shapes[x_shape, w.shape]
    if grad.shape != expected:
        raise RuntimeError(
            f"a convolution of {list(x_shape)} with filters {list(w.shape)} gives {list(expected)}, and its gradient has the shape "
            f"{list(grad.shape)}"
        )


def as_images(x: torch.Tensor, binding: OperatorBinding) -> torch.Tensor:
    """Images with as many dimensions as the kernels take, those that are missing of size 1."""
    return x.unsqueeze(2) if x.ndim < binding.dimensions else x


def convolution_grad_input(
    grad: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    x_shape: Sequence[int],
    binding: OperatorBinding,
    dtype: torch.dtype | None = None,
    columns: torch.Tensor | None = None,
    *,
    straight: bool = False,
) -> torch.Tensor:
    """(B, O, OH, OW) and the filters to ``x_shape`` in ``dtype``, by default the variant's."""
    if len(x_shape) < binding.dimensions:
        images, filters, sizes = as_images(grad, binding), w.unsqueeze(2), (*x_shape[:2], 1, *x_shape[2:])
        return convolution_grad_input(images, filters, scale, sizes, binding, dtype, straight=straight).squeeze(2)
    if not straight and not is_plain(grad):
        return cast(torch.Tensor, _OPS.convolution_grad_input.default(grad, w, scale, x_shape, binding.key, dtype))
    dtype = dtype or binding.grad_input
    _check_result(grad, tuple(x_shape), w, binding)
    kernel = binding.kernel(binding.grad_input_op, grad.device, grad.shape, w.shape)
    make = getattr(kernel, "make_gradient", None)
    if make is not None:
        made: torch.Tensor = make(grad, w, scale, x_shape)
        if made.dtype is dtype:
            return _in_layout_of(made.contiguous(memory_format=torch.channels_last), grad)
    out = _images(grad, x_shape, dtype)
    kernel(grad, w, scale, out)
    return _in_layout_of(out, grad)


def convolution_grad_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    binding: OperatorBinding,
    columns: torch.Tensor | None = None,
    *,
    straight: bool = False,
) -> torch.Tensor:
    """(B, O, OH, OW) and (B, C, H, W) to the filters' shape and layout, which ``w`` has, in float32."""
    if x.ndim < binding.dimensions:
        images = as_images(grad, binding), x.unsqueeze(2)
        return convolution_grad_weight(*images, x_scale, w.unsqueeze(2), binding, straight=straight).squeeze(2)
    if not straight and not is_plain(grad):
        return cast(torch.Tensor, _OPS.convolution_grad_weight.default(grad, x, x_scale, w, binding.key))
    _check_result(grad, x.shape, w, binding)
    out = torch.empty_like(w, dtype=torch.float32)
    binding.kernel(binding.grad_weight_op, grad.device, grad.shape, x.shape)(grad, x, x_scale, out)
    return out


OUTPUT = {True: linear_output, False: convolution_output}
"""The products of operands in 8 bit, by whether an operator is one of rows; likewise their gradients."""
GRAD_INPUT = {True: linear_grad_input, False: convolution_grad_input}
GRAD_WEIGHT = {True: linear_grad_weight, False: convolution_grad_weight}


# The operators behind the functions above.  ``binding`` is the key of an OperatorBinding, ``quantization`` of a Quantization.

_LIBRARY = torch.library.Library("qsync", "FRAGMENT")


def _operator(key: str) -> OperatorBinding:
    return cast(OperatorBinding, BOUND[key])


def _quantization(key: str) -> Quantization:
    return cast(Quantization, BOUND[key])


def _record(new_program: Callable[[], Any], run: Callable[..., Any], *args: Any) -> Any:
    """The program of an operator's call, by the tensors among its arguments; None where there is none."""

    def call(*tensors: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        left = iter(tensors)
        result = run(*(next(left) if isinstance(argument, torch.Tensor) else argument for argument in args))
        return result if isinstance(result, (tuple, list)) else (result,)

    return recorded(new_program, call, [argument for argument in args if isinstance(argument, torch.Tensor)])


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make an operator ``qsync::*`` that autograd does not record; ``fake`` gives its results without their numbers."""
    replays: list[Callable[..., Any]] = []
    listed = schema.endswith("Tensor[]")

    def without_autocast(*args: Any, **kwargs: Any) -> Any:  # which would turn the float32 products of kernels into its own format
        for argument in args:
            if isinstance(argument, torch.Tensor):
                break
        device = argument.device
        # A compiled model's forward does not ask for it, as it is not traced.
        if not kwargs and (module := extension.want(device)) is not None and HERE.recorder is None:
            if not replays:
                replays.append(module.Replayed(functools.partial(_record, module.Program, run)))
            if (found := replays[0](*args)) is not None:
                return found if len(found) > 1 or listed else found[0]
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            return run(*args, **kwargs)
        with WithoutAutocast(device.type):
            return run(*args, **kwargs)

    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsync::{name}", fake, lib=_LIBRARY)


def _fake_quantize(x: torch.Tensor, key: str, seed: int, offset: Offset, *more: Any) -> Copied:
    quantization = _quantization(key)
    return _quantized(quantizable(x, quantization.granularity), quantization, quantization.scale_count(x.shape))


def _fake_quantize_transposed(x: torch.Tensor, key: str, seed: int, offset: Offset, *more: Any) -> CopiedTwice:
    x_MK, quantization = rows(x).contiguous(), _quantization(key)
    return _transposed(x_MK, x.shape, quantization, quantization.scale_count(x_MK.shape))


def _define_quantization(name: str, more: str, results: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    def quantized(x: Any, key: str, seed: int, offset: Offset, *multipliers: Any) -> Any:
        return run(x, _quantization(key), seed, as_kernels_take(offset), *multipliers, straight=True)

    for overload, kind in (("", "SymInt"), (".at", "Tensor")):
        arguments = f"Tensor x, str quantization, SymInt seed, {kind} offset, Tensor? multiplier=None{more}, Tensor? maxima=None"
        define(f"{name}{overload}({arguments}) -> {results}", quantized, fake)


_define_quantization("quantize", "", "(Tensor, Tensor, Tensor)", quantize, _fake_quantize)
_define_quantization(
    "quantize_transposed",
    ", Tensor? row_multiplier=None",
    "(Tensor, Tensor, Tensor, Tensor)",
    quantize_transposed,
    _fake_quantize_transposed,
)


def _fake_output(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: Any, bias: Any, key: str) -> torch.Tensor:
    binding = _operator(key)
    if binding.of_rows:
        return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=binding.output)
    return _in_layout_of(_images(x, binding.result_shape(x.shape, w.shape), binding.output), x, w)


def _fake_grad_input(
    grad: torch.Tensor, w: torch.Tensor, scale: Any, x_shape: Sequence[int], key: str, dtype: Any = None, columns: Any = None
) -> torch.Tensor:
    binding = _operator(key)
    dtype = dtype or binding.grad_input
    return grad.new_empty(x_shape, dtype=dtype) if binding.of_rows else _in_layout_of(_images(grad, x_shape, dtype), grad)


def _fake_grad_weight(
    grad: torch.Tensor, x: torch.Tensor, scale: Any, w: torch.Tensor, key: str, columns: Any = None
) -> torch.Tensor:
    if _operator(key).of_rows:
        return grad.new_empty((grad.shape[-1], x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(w, dtype=torch.float32)


def _define_products(name: str, of_rows: bool) -> None:
    output, grad_input, grad_weight = (cast(Callable[..., Any], of[of_rows]) for of in (OUTPUT, GRAD_INPUT, GRAD_WEIGHT))
    define(
        f"{name}_output(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, str binding) -> Tensor",
        lambda x, x_scale, w, w_scale, bias, key: output(x, x_scale, w, w_scale, bias, _operator(key), straight=True),
        _fake_output,
    )
    define(
        f"{name}_grad_input(Tensor grad, Tensor w, Tensor scale, SymInt[] x_shape, str binding, ScalarType? dtype=None, "
        "Tensor? columns=None) -> Tensor",
        lambda grad, w, scale, shape, key, *more: grad_input(grad, w, scale, shape, _operator(key), *more, straight=True),
        _fake_grad_input,
    )
    define(
        f"{name}_grad_weight(Tensor grad, Tensor x, Tensor scale, Tensor? w, str binding, Tensor? columns=None) -> Tensor",
        lambda grad, x, scale, w, key, *more: grad_weight(grad, x, scale, w, _operator(key), *more, straight=True),
        _fake_grad_weight,
    )


_define_products("linear", True)
_define_products("convolution", False)

GRAD_WEIGHT_OF_ROWS = torch.ops.qsync.linear_grad_weight.default
"""What stands in a graph for the gradient of a weight that multiplies rows."""

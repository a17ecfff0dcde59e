"""The casts around adjustable operators: of operands, shared among consumers; of gradients; and what autograd keeps of them.

Consumers that read one activation in the same format (Q, K and V) share one cast of it.  A cast is kept as long as the activation
it was made from, and is of no meaning for the result: made again, it has the same bits.

Random numbers follow from data (docs/decisions/counter-based-random-numbers.md).  Which ones the activation takes follows from the
offset and its bits; that is its *stream*, and the offset with which the weight and, in backward, the incoming gradient are
quantized: so all three differ from one micro-batch to the next.  Seeds only tell the three apart.

With G the incoming gradient (..., N), w_q (N, K) and x_q (M, K) the saved copies with scales s_w[n] and s_x, a product in int8
needs one scale for everything that it sums.  ``grad_input`` sums over the output channels n, along which the weight's scales lie,
so G is multiplied by them before it is quantized: s_g · g_q = G · s_w.  Then

* grad_input[m, k] = s_g · Σ_n g_q[m, n] · w_q[n, k], and
* grad_weight[n, k] = (s_g · s_x / s_w[n]) · Σ_m g_q[m, n] · x_q[m, k],

the same quantized copy in both.  Under a scale for each row of activation and gradient, s_x[m] and s_g[m], the second sum runs over
them: it reads copies with a scale for each column instead, (s_g[n] · s_x[k] / s_w[n]) · Σ_m g'_q[m, n] · x'_q[m, k].  Where the
weight has one scale, or ``grad_input`` is computed in a float format, G is quantized as it is.  Stochastic rounding draws
independently of the operands' rounding, so both products stay unbiased.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch

from qsync_core.errors import NumericsError, PlanError
from qsync_core.ir.profile import CastKey
from qsync_torch.aten.random_bits import Offset, as_kernels_take, stream_key
from qsync_torch.dtypes import LOW_FLOATS, PRECISION
from qsync_torch.kernels.binding import Memo, OperatorBinding
from qsync_torch.kernels.library_ops import as_images, is_plain, quantize, quantize_transposed, rows
from qsync_torch.torch_internals import TorchDispatchMode, transforms_are_active, version_of


@functools.lru_cache(maxsize=64)
def float_key(source: torch.dtype, target: torch.dtype) -> CastKey:
    """The kind of a cast between two float formats; operators and promotion of mixed operands share such casts."""
    return CastKey(PRECISION[source], PRECISION[target])


class CachedCast(weakref.ref[torch.Tensor]):
    """A cast of an activation, to which this is a weak reference.

    Attributes:
        value: the cast; None where it is still to be made.
        mark: of the random numbers it was made with.
        history: what a gradient of the cast reaches, as :func:`_history` says of the activation.
    """

    __slots__ = ("address", "grad_enabled", "history", "mark", "place", "value", "version")

    address: int
    place: tuple[int, Hashable]
    value: Any
    version: int
    grad_enabled: bool
    history: object
    mark: Hashable


def _history(x: torch.Tensor) -> object:
    """What a gradient that arrives at ``x`` now reaches: a node of autograd's graph, a leaf (True), or nothing.

    It changes without a new version of the tensor: ``requires_grad_()`` makes a leaf of it, ``detach_()`` cuts it off.
    """
    return (x.grad_fn or True) if x.requires_grad else None


class CastCache:
    """Casts of activations, by the tensor's identity and version and the kind of cast.

    A cast through which a gradient would take another way than through its activation as it is now is made again.  A change that
    leaves a tensor's version and memory as they were (``x.data.mul_``) is not seen here, as autograd does not see it.
    """

    def __init__(self) -> None:
        entries: dict[tuple[int, Hashable], CachedCast] = {}

        def forget(entry: CachedCast) -> None:
            entries.pop(entry.place, None)

        self._entries, self._forget = entries, forget

    def applies_to(self, x: torch.Tensor) -> bool:
        """False under ``torch.compile`` and ``torch.func``, and in inference mode, where changes of a tensor go unnoticed.

        A compiler shares equal casts itself.  A cast that is made in inference mode cannot be kept for backward by a consumer
        outside of it.
        """
        if torch.compiler.is_compiling() or x.is_inference() or torch.is_inference_mode_enabled():
            return False
        return not transforms_are_active()

    def find(self, x: torch.Tensor, key: Hashable, mark: Hashable = None) -> CachedCast:
        """The entry for ``x`` and that kind of cast; the caller makes the cast where its ``value`` is None.

        A caller who makes the cast itself spares the call of a function that would make it, once per operator.

        Args:
            x: the activation; :meth:`applies_to` must be true of it.
            key: what kind of cast.
            mark: of the random numbers that it takes now.
        """
        place = (id(x), key)
        version, grad_enabled = version_of(x), torch.is_grad_enabled()
        history = _history(x) if grad_enabled else None
        entry, address = self._entries.get(place), x.data_ptr()
        if entry is None or entry() is not x or entry.version != version or entry.address != address:
            entry = self._entries[place] = CachedCast(x, self._forget)
            entry.place, entry.version, entry.address, entry.value = place, version, address, None
        elif entry.grad_enabled != grad_enabled or entry.history is not history or entry.mark != mark:
            entry.value = None
        entry.grad_enabled, entry.history, entry.mark = grad_enabled, history, mark
        return entry

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


_QUANTIZED = frozenset({torch.float32, *LOW_FLOATS})
"""Formats that are quantized; a float operator takes 8-bit inputs too."""


class Operand(NamedTuple):
    """An operand in the compute format.

    Attributes:
        values: 8-bit; ``scale``: its scales.
        stream: one int64, which random numbers it took; empty where nothing reads that.
        transposed: a copy (K, M), where a backward product wants it.
        column_scale: its scales, where it has some of its own.
    """

    values: torch.Tensor
    scale: torch.Tensor
    stream: torch.Tensor
    transposed: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The copy that backward reads, as (M, K), and its scales."""
        values = self.values if self.transposed is None else self.transposed.t()
        return values, self.scale if self.column_scale is None else self.column_scale


def by_row_and_column(scale: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of a copy's rows, and those of its transposed copy, from the vector that holds both."""
    of_rows: torch.Tensor = scale.narrow(0, 0, scale.numel() - columns)
    return of_rows, scale.narrow(0, scale.numel() - columns, columns)


X, W, GRAD, KEPT, KEPT_FACTOR, AGAIN = range(1, 7)
"""Roles of what is quantized, as seeds: activation, weight, incoming gradient, what a producer keeps for backward: its input, and
what a gated unit multiplies with; and the copy of a result that backward writes again."""


class Seeds(NamedTuple):
    """Which random numbers an operator's stochastic rounding takes: a seed per operand, alike for all operators, and the offset of
    the activation, from whose stream the others follow.

    ``name`` is the operator's, for messages.
    """

    x: int = X
    w: int = W
    offset: Offset = 0
    grad: int = GRAD
    name: str = "an operator"


def seeds_of(seed: int, offset: Offset = 0) -> Seeds:
    """The seeds of the roles under one seed."""
    return Seeds(stream_key(seed, X), stream_key(seed, W), offset, stream_key(seed, GRAD))


def cast_input(
    x: torch.Tensor,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
    *,
    grad_enabled: bool = True,
    straight: bool = False,
    inverse: torch.Tensor | None = None,
) -> Operand:
    """The activation quantized as the operator's steps say, shared through ``cache``.

    Not differentiable, and called where autograd does not record: the operator itself takes the gradient to the activation.

    Args:
        x: float32 or a 16-bit float.
        binding: how the operator runs.
        seeds: which random numbers the rounding takes.
        cache: where casts are shared.
        grad_enabled: whether a backward pass may follow, which reads the transposed copy of a GPU's operand.
        straight: as :func:`~qsync_torch.kernels.library_ops.is_plain` says of ``x``.
        inverse: of the factors of the channels; its copies are the operator's own.
    """
    if x.dtype not in _QUANTIZED:
        raise _refused(x, binding)
    transposed = grad_enabled and wants_transposed(x, binding)
    if cache is None or inverse is not None or not cache.applies_to(x):
        return _cast(x, binding, seeds, transposed, straight, inverse)
    entry = cache.find(x, (binding.x_transposed if transposed else binding.x).kind, _mark(seeds))
    operand: Operand | None = entry.value
    if operand is None:
        operand = entry.value = _cast(x, binding, seeds, transposed, straight)
    return operand


def _cast(
    x: torch.Tensor,
    binding: OperatorBinding,
    seeds: Seeds,
    transposed: bool,
    straight: bool,
    inverse: torch.Tensor | None = None,
) -> Operand:
    if not transposed:
        # The channels that a multiplier counts are the last dimension of a matrix.
        q, scale, stream = quantize(x if inverse is None else rows(x), binding.x, seeds.x, seeds.offset, inverse, straight=straight)
        return Operand(q if inverse is None else q.view(x.shape), scale, stream)
    found = Operand(*quantize_transposed(x, binding.x_transposed, seeds.x, seeds.offset, inverse, straight=straight))
    if not binding.by_column:
        return found
    of_rows, of_columns = by_row_and_column(found.scale, x.shape[-1])
    return found._replace(scale=of_rows, column_scale=of_columns)


def wants_transposed(x: torch.Tensor, binding: OperatorBinding) -> bool:
    """Whether a backward product reads the transposed copy; on a CPU products read operands in any layout."""
    return binding.wants_transposed and (binding.by_column or x.device.type == "cuda")


def _mark(seeds: Seeds) -> Hashable:
    """What tells random numbers apart: an offset on a device is advanced in place."""
    offset = seeds.offset
    return (seeds.x, id(offset), version_of(offset)) if isinstance(offset, torch.Tensor) else (seeds.x, offset)


def float_input(x: torch.Tensor, binding: OperatorBinding, cache: CastCache | None = None) -> torch.Tensor:
    """The activation in a float compute format; differentiable, its gradient is cast back once for all who share the cast."""
    dtype = binding.x_dtype
    if x.dtype is dtype:
        return x
    if x.dtype not in PRECISION:
        raise _refused(x, binding)
    if cache is None or (x.requires_grad and x.is_leaf) or not cache.applies_to(x):  # a leaf's cast keeps the leaf alive
        return x.to(dtype)
    entry = cache.find(x, float_key(x.dtype, dtype))
    cast: torch.Tensor | None = entry.value
    if cast is None:
        cast = entry.value = x.to(dtype)
    return cast


def _refused(x: torch.Tensor, binding: OperatorBinding) -> NumericsError:
    return NumericsError(
        f"an operator in {binding.variant.label} takes float32 or a 16-bit float, got {x.dtype}; cast its input first"
    )


def cast_weight(
    weight: torch.Tensor,
    binding: OperatorBinding,
    seed: int,
    stream: Offset,
    *,
    straight: bool = False,
    factor: torch.Tensor | None = None,
) -> Operand:
    """The float32 parameter, quantized; called where autograd does not record, like :func:`cast_input`.

    Args:
        weight: in any layout.
        binding: how the operator runs.
        seed: of the weights' rounding; stream: the activation's, so that a weight's error differs from one micro-batch to the next.
        straight: as :func:`~qsync_torch.kernels.library_ops.is_plain` says of ``weight``.
        factor: of each input channel, by which it is multiplied.
    """
    # Integer products read the rows of a matrix; the transpose of a (K, N) parameter is copied.
    dense = weight.contiguous() if binding.of_rows else weight
    return Operand(*quantize(dense, binding.w, seed, _offset(stream, straight), factor, straight=straight))


def _offset(stream: Offset, straight: bool) -> Offset:
    """A stream as the offset of what follows from it: its number, where a kernel is called right away."""
    return as_kernels_take(stream) if straight else stream


Needs = tuple[bool, bool, bool]
"""Whether activation, weight and bias want a gradient."""
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of activation, weight and bias; None where none is wanted."""


Copy = Any
"""A tensor, or None where no product reads it: needs and binding say which, before a product reads."""


class Gradient(NamedTuple):
    """An incoming gradient and its copies.

    Attributes:
        incoming: as autograd delivers it.
        wide: in the operator's float gradient format; None where no product reads one.
        quantized: 8-bit values, of a linear operator as (M, N); ``scale``: their one scale, or one a row; None where no product
            reads them.
        transposed: the 8-bit values as (N, M), where the product for the weight's gradient wants them so; ``column_scale``: their
            scales, where they have some of their own.
        channel_scale: the weight's scales, if the gradient was multiplied by them first.
    """

    incoming: torch.Tensor
    wide: Copy = None
    quantized: Copy = None
    scale: Copy = None
    transposed: Copy = None
    channel_scale: Copy = None
    column_scale: Copy = None

    def grad_input_scale(self, w_scale: torch.Tensor) -> torch.Tensor:
        """The scale, or one a row, of an 8-bit product with the weight."""
        scale: torch.Tensor = self.scale if self.channel_scale is not None else self.scale * w_scale
        return scale

    def grad_weight_scale(self, x_scale: torch.Tensor) -> torch.Tensor:
        """The scale, or one per output channel, of an 8-bit product with the activation, whose scales by column are left out."""
        scale: torch.Tensor = self.scale * x_scale if self.column_scale is None else self.column_scale
        return scale if self.channel_scale is None else scale / self.channel_scale

    def for_bias(self) -> torch.Tensor:
        """The copy whose sum is the bias's gradient: the float one where there is one."""
        return self.incoming if self.wide is None else self.wide


def cast_gradient(
    grad: torch.Tensor,
    w_scale: torch.Tensor | None,
    binding: OperatorBinding,
    needs: Needs,
    seed: int,
    stream: Offset,
    straight: bool = False,
) -> Gradient:
    """Make the copies that the backward products of ``needs`` read.

    Args:
        grad: in the output's shape and format.
        w_scale: the weight's scales, one or one per output channel; needed for an 8-bit gradient of the activation only.
        binding: how the operator runs.
        needs: which gradients are wanted.
        seed: of the gradients' rounding; stream: the activation's, where an 8-bit copy is made.
        straight: as :func:`~qsync_torch.kernels.library_ops.is_plain` says of ``grad``.
    """
    need_x, need_w, _ = needs
    dtype = binding.grad_float if need_x else binding.grad_float_weight_only
    wide = grad if grad.dtype is dtype else None if dtype is None else grad.to(dtype)
    for_input, for_weight = need_x and binding.grad_input_quantized, need_w and binding.grad_weight_quantized
    if not for_input and not for_weight:
        return Gradient(grad, wide)
    multiplied = for_input and binding.steps.multiplied and w_scale is not None and w_scale.numel() > 1
    multiplier = w_scale if multiplied else None
    transpose = for_weight and wants_transposed(grad, binding)
    quantization = binding.grad[multiplier is not None][transpose]
    # The channels that the multiplier counts are the last dimension of a matrix, and dimension 1 of images.
    source, offset = rows(grad) if binding.of_rows else as_images(grad, binding), _offset(stream, straight)
    if transpose:
        q, scale, _, transposed = quantize_transposed(source, quantization, seed, offset, multiplier, straight=straight)
        of_rows, of_columns = by_row_and_column(scale, source.shape[1]) if binding.by_column else (scale, None)
        return Gradient(grad, wide, q, of_rows, transposed, multiplier, of_columns)
    q, scale, _ = quantize(source, quantization, seed, offset, multiplier, straight=straight)
    return Gradient(grad, wide, q, scale, None, multiplier)


class Saved(NamedTuple):
    """What a quantized operator keeps for backward.

    Attributes:
        x, x_scale: the activation's 8-bit copy, for linear as it came or as (M, K) with M contiguous; None where the weight wants
            no gradient.
        w, w_scale: the weight's copy; None where no product reads it.
        x_shape, x_dtype: of the float activation.
        inverse: of the factors of its channels.
    """

    x: Copy
    x_scale: Copy
    w: Copy
    w_scale: Copy
    x_shape: torch.Size
    x_dtype: torch.dtype
    inverse: Copy = None


BackwardProducts = Callable[[Gradient, Saved, OperatorBinding, Needs, bool], Grads]
"""Both backward products of an operator, from the saved copies (:func:`qsync_torch.operators.products.backward_products`)."""


def apply_of(
    function: type[torch.autograd.Function], binding: OperatorBinding | None = None, seeds: Seeds | None = None
) -> Callable[..., torch.Tensor]:
    """``function.apply``, straight in plain eager mode: what PyTorch prepares for functorch takes longer than the rest of it.

    Args:
        function: what is to be applied.
        binding, seeds: of an 8-bit operator.

    Raises:
        PlanError: where ``torch.func`` transforms an 8-bit operator.
    """
    if transforms_are_active():
        if binding is not None and seeds is not None:
            raise PlanError(
                f"{seeds.name} runs in {binding.variant.compute}, which torch.func cannot transform (grad, vmap, jvp, jacrev): "
                f"{_INSTEAD}, and gradients by backward() or torch.autograd.grad run as planned"
            )
        return function.apply
    return function.apply if torch.compiler.is_compiling() else _STRAIGHT[function]


_STRAIGHT: Memo[type[torch.autograd.Function], Callable[..., torch.Tensor]]
_STRAIGHT = Memo(lambda function: super(torch.autograd.Function, function).apply)  # type: ignore[misc]


_INSTEAD = "keep it in a float format in the plan, or do this on a model without a plan (copy.deepcopy gives one, remove() too)"
"""What to do about what 8-bit operators lack."""


def _is_batched(grad: torch.Tensor) -> bool:
    """Whether it is a batch of gradients: of ``is_grads_batched`` and ``jacobian(vectorize=True)``, or of ``torch.vmap``."""
    try:
        grad.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return type(grad) is torch.Tensor
    return False


class _Underivable(torch.autograd.Function):
    """Gradients that cannot be differentiated again.

    The engine runs what lies on a path to the tensors whose gradients are asked for: ``sources`` are all that these gradients were
    computed from, so that there is a path wherever a derivative would be left out.
    """

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, which follow ``count`` sources among the tensors."""
        ctx.refusal = refusal
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise PlanError(ctx.refusal)


def _leaves(node: Any) -> list[torch.Tensor]:
    """The tensors that a part of autograd's graph begins with."""
    found, seen, waiting = [], {node}, [node]
    while waiting:
        for source, _ in waiting.pop().next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
                if (leaf := getattr(source, "variable", None)) is not None:
                    found.append(leaf)
    return found


def _in_8_bit(ctx: Any) -> str:
    binding, seeds, *_ = ctx.kept
    return f"{seeds.name} runs in {binding.variant.compute}"


def no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    """Refuse forward mode, in place of an 8-bit operator's ``jvp``.

    Raises:
        PlanError: naming the operator.
    """
    raise PlanError(
        f"{_in_8_bit(ctx)}, which has no derivative in forward mode (torch.autograd.forward_ad, jvp, jacfwd): {_INSTEAD}"
    )


def first_derivative(
    backward: Callable[[Any, torch.Tensor], Any], runs: Callable[[Any], str]
) -> Callable[[Any, torch.Tensor], Any]:
    """A backward whose gradients are refused to be differentiated, which only one that is recorded itself pays for.

    PyTorch's ``once_differentiable`` refuses on the way to the incoming gradient alone: what activation and weight have to do with
    the gradients would be left out without a word.

    Args:
        backward: of an autograd function.
        runs: what runs how, of its ``ctx``.
    """

    def call(ctx: Any, grad: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():  # unless by create_graph=True
            return backward(ctx, grad)
        return _underivable(ctx, grad, backward, runs(ctx))

    return call


def _underivable(
    ctx: Any, grad: torch.Tensor, backward: Callable[[Any, torch.Tensor], Any], runs: str
) -> tuple[torch.Tensor | None, ...]:
    """The gradients that a backward gives, which are refused to be differentiated."""
    refusal = f"{runs}, which has no second derivative, and its gradient is differentiated (create_graph=True): {_INSTEAD}"
    if _is_batched(grad):  # what is put around a batch is lost where it is taken apart
        raise PlanError(refusal)
    with torch.no_grad():
        grads = backward(ctx, grad)
    sources = [grad, *_leaves(ctx)]
    own = (None if g is None else g.requires_grad_() for g in grads)
    found: Any = apply_of(_Underivable)(refusal, len(sources), *sources, *own)
    return cast(tuple[torch.Tensor | None, ...], found)


def keep_for_backward(
    ctx: Any,
    x: torch.Tensor,
    copies: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    stream: torch.Tensor,
    binding: OperatorBinding,
    seeds: Seeds,
    inverse: torch.Tensor | None,
) -> None:
    """Save the 8-bit copies (activation, its scales, weight, its scales), the activation's stream and what else backward asks for;
    never a float operand."""
    rounds = binding.grad_input_quantized or binding.grad_weight_quantized
    ctx.save_for_backward(*copies, stream if rounds else None, inverse)
    ctx.kept = binding, seeds, x.shape, x.dtype


class _Dispatched(TorchDispatchMode):
    """Kernels run as operators of PyTorch's dispatcher.

    It takes a batch of gradients apart: each runs as by itself.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_NO_TENSORS = (None,) * 7
"""Gradients of an operator's arguments from the binding on."""


def _in_float32(scale: Copy) -> Copy:
    return scale if scale is None or scale.dtype is torch.float32 else scale.float()


def run_backward(ctx: Any, grad: torch.Tensor, products: BackwardProducts) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a quantized operator's inputs, refused to be differentiated as :func:`first_derivative` does.

    Autocast may be active where the script calls ``backward()``, and would turn the float32 products inside into its own format.
    """
    if torch.is_grad_enabled():
        return _underivable(ctx, grad, functools.partial(run_backward, products=products), _in_8_bit(ctx))
    straight = is_plain(grad)
    if straight and _is_batched(grad):
        with _Dispatched():  # type: ignore[no-untyped-call]
            return run_backward(ctx, grad, products)
    if grad.device.type != "meta" and torch.is_autocast_enabled(grad.device.type):
        with torch.autocast(grad.device.type, enabled=False):
            return run_backward(ctx, grad, products)
    binding, seeds, x_shape, x_dtype = ctx.kept
    needs = ctx.needs_input_grad[:3]
    x, x_scale, w, w_scale, stream, inverse = ctx.saved_tensors
    # Hooks may keep 16 bits of all that autograd saves (saved_tensors_hooks).
    saved = Saved(x, _in_float32(x_scale), w, _in_float32(w_scale), x_shape, x_dtype, _in_float32(inverse))
    gradient = cast_gradient(grad, saved.w_scale, binding, needs, seeds.grad, stream, straight)
    grad_x, grad_w, grad_b = products(gradient, saved, binding, needs, straight)
    if grad_x is not None and grad_x.dtype is not x_dtype:
        grad_x = grad_x.to(x_dtype)
    return grad_x, grad_w, grad_b, *_NO_TENSORS

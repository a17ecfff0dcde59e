"""What produces the activation of an 8-bit product, as custom operators (docs/design/fused-chains.md).

Like :mod:`qsync_torch.kernels.library_ops`: each allocates what its binding wants written and calls a backend's kernel.
Operators give lists of the tensors that there are; :meth:`ProducerBinding.named` tells them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import attrs
import torch

from qsync_core.ir.chain import Activation, ChainForm, Producer
from qsync_core.ir.precision import Granularity
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_core.kernels.choice import AUTO_BACKEND, FLOAT_BACKEND, KernelChoice
from qsync_torch.aten.random_bits import as_kernels_take
from qsync_torch.devices import device_facts
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.binding import BOUND, Bound
from qsync_torch.kernels.library_ops import define
from qsync_torch.kernels.selection import backend_of, reasons_against


class Produced(NamedTuple):
    """What a producer writes; None where it is not wanted.

    Attributes:
        out: the result, in a float format.
        absmax: its largest magnitude (batch norm).
        q, scale: its 8-bit copy; stream: one int64, the offset for those who quantize because of it.
        mean, spread: the statistics; ``spread`` is a batch norm's biased variance, another norm's 1 / deviation, or 1 / root mean
            square.
        kept, kept_scale: what backward reads in the place of the argument: the sum that a norm of rows normalizes, or the
            normalized input (of an activation: the input) in 8 bit.
        open: one bit per element, whether ReLU let it pass.
        factor, factor_scale: of a gated unit, the second tensor in 8 bit.
    """

    out: torch.Tensor | None = None
    absmax: torch.Tensor | None = None
    q: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    stream: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    spread: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    kept_scale: torch.Tensor | None = None
    open: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    factor_scale: torch.Tensor | None = None


class ProducerBinding(Bound):
    """How one chain runs.

    Attributes:
        producer: what the chain is built around.
        variant: formats of the copy (``compute``), the result (``output``), what is kept (``saved``) and the gradient of the input.
        writes_copy, saves_copy: the result, and what is kept, are written in 8 bit.
    """

    def __init__(self, producer: Producer, variant: Variant, choice: KernelChoice, chain: ChainForm) -> None:
        self.producer, self.variant, self.choice, self.chain = producer, variant, choice, chain
        self.output_op, self.grad_op = f"{producer}.output", f"{producer}.grad_input"
        self.dtype, self.output, self.grad_input = (
            TORCH_DTYPE[precision] for precision in (variant.compute, variant.output, variant.grad_input)
        )
        self.writes_copy, self.saves_copy = variant.compute.needs_scale, variant.saved.needs_scale
        self.saved = TORCH_DTYPE[variant.saved]
        self._register("producer", producer, variant, choice.backend, choice.config, chain)

    def request(self, op: str, device: torch.device, *shapes: tuple[int, ...]) -> KernelRequest:
        """What a call asks of a backend."""
        kind, capability = device_facts(device)
        sizes = tuple(tuple(shape) for shape in shapes)
        return KernelRequest(op, self.variant, sizes, device_kind=kind, compute_capability=capability, chain=self.chain)

    def reasons_against(self, device: torch.device, shape: tuple[int, ...]) -> list[str]:
        """Why no backend of the choice runs it, forward or backward; empty where one does."""
        return [*reasons_against(self.request(self.output_op, device, shape), self.choice), *self.reasons_backward(device, shape)]

    def reasons_backward(self, device: torch.device, shape: tuple[int, ...]) -> list[str]:
        """Why no backend of the choice runs it backward."""
        return reasons_against(self.request(self.grad_op, device, shape), self.choice)

    @functools.cached_property
    def with_grad_copy(self) -> ProducerBinding:
        """The binding of the same batch norm with a backward kernel that also writes its input's gradient in int8."""
        return producer_binding(self.producer, self.variant, self.choice, attrs.evolve(self.chain, grad_copy=True))

    def adds_gradients(self, device: torch.device, shape: tuple[int, ...]) -> bool:
        """Whether the backend that runs its backward takes the gradient in two parts; another would take over the whole of it."""
        runs = backend_of(self.request(self.grad_op, device, shape), self.choice)
        summing = self.with_grad_sum
        return runs != "" and runs == backend_of(summing.request(self.grad_op, device, shape), summing.choice)

    @functools.cached_property
    def with_grad_sum(self) -> ProducerBinding:
        """The binding of the same batch norm with a backward kernel that takes the gradient of its result in two parts."""
        return producer_binding(self.producer, self.variant, self.choice, attrs.evolve(self.chain, grad_sum=True))

    @functools.cached_property
    def with_copy_again(self) -> ProducerBinding:
        """The binding of the same gated unit with a backward kernel that also writes the copy of its result again."""
        return producer_binding(self.producer, self.variant, self.choice, attrs.evolve(self.chain, copy_again=True))

    def names(self, keep: bool) -> tuple[str, ...]:
        """Which fields of :class:`Produced` are written; ``keep`` where a backward pass may follow."""
        chain, normalizes = self.chain, self.producer not in (Producer.ACTIVATION, Producer.GLU)
        is_image = self.producer is Producer.BATCH_NORM
        wanted = {
            "out": chain.float_result,
            "absmax": chain.float_result and is_image,
            "q": self.writes_copy,
            "scale": self.writes_copy,
            "stream": self.writes_copy,
            "mean": normalizes and self.producer is not Producer.RMS_NORM,
            "spread": normalizes,
            "kept": keep and (self.saves_copy or (self.producer.normalizes_rows and chain.residual)),
            "kept_scale": keep and self.saves_copy,
            "open": keep and is_image and chain.activation is Activation.RELU and (chain.residual or self.saves_copy),
            "factor": keep and self.saves_copy and self.producer is Producer.GLU,
            "factor_scale": keep and self.saves_copy and self.producer is Producer.GLU,
        }
        return tuple(name for name in Produced._fields if wanted[name])

    def named(self, tensors: Sequence[torch.Tensor], keep: bool) -> Produced:
        """The tensors of an operator's list by their names."""
        return Produced(**dict(zip(self.names(keep), tensors, strict=True)))

    def allocate(self, x: torch.Tensor, keep: bool) -> Produced:
        """Tensors to be written, for an input that is dense: channels-last, or rows."""
        is_image = self.producer is Producer.BATCH_NORM
        groups = x.shape[1] if is_image else x.shape[0]
        copy_scales = x.shape[0] if self.variant.x_granularity is Granularity.PER_ROW else 1
        kept_dtype = self.saved if self.saves_copy else TORCH_DTYPE[self.variant.saved]
        make: dict[str, Callable[[], torch.Tensor]] = {
            "out": lambda: torch.empty_like(x, dtype=self.output),
            "absmax": lambda: x.new_empty(1, dtype=torch.float32),
            "q": lambda: torch.empty_like(x, dtype=self.dtype),
            "scale": lambda: x.new_empty(copy_scales, dtype=torch.float32),
            "stream": lambda: x.new_empty(1, dtype=torch.int64),
            "mean": lambda: x.new_empty(groups, dtype=torch.float32),
            "spread": lambda: x.new_empty(groups, dtype=torch.float32),
            "kept": lambda: torch.empty_like(x, dtype=kept_dtype),
            "kept_scale": lambda: x.new_empty(groups, dtype=torch.float32),
            "open": lambda: x.new_empty(x.shape[0], x.shape[2], x.shape[3], (x.shape[1] + 7) // 8, dtype=torch.uint8),
            "factor": lambda: torch.empty_like(x, dtype=kept_dtype),
            "factor_scale": lambda: x.new_empty(groups, dtype=torch.float32),
        }
        return Produced(**{name: make[name]() for name in self.names(keep)})


producer_binding = functools.lru_cache(maxsize=4096)(ProducerBinding)
"""The one :class:`ProducerBinding` of its arguments."""


def producer_choice(choice: KernelChoice) -> KernelChoice:
    """Whose kernels produce an operator's activation: the backend that would quantize it by itself, then the operator's.

    PyTorch's kernels fuse nothing: where they would quantize, the operator's order stands.  What pins a producer by its name
    (``batch_norm.output``) goes before both.
    """
    pins = tuple((role, chosen) for role, chosen in choice.pins if role in Op.PRODUCERS)
    quantizer = choice.of(Op.QUANTIZE)
    if quantizer is None or quantizer.backend == FLOAT_BACKEND:
        return KernelChoice(choice.chain, pins)
    rest = () if choice.chain == (AUTO_BACKEND,) else choice.chain
    return KernelChoice(tuple(dict.fromkeys((quantizer.backend, *rest))), pins)


def _binding(key: str) -> ProducerBinding:
    return cast(ProducerBinding, BOUND[key])


def _written(produced: Produced) -> list[torch.Tensor]:
    return [tensor for tensor in produced if tensor is not None]


def _kept_args(binding: ProducerBinding, p: Produced) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``x_q_out`` and ``x_scale_out``."""
    return (p.kept, p.kept_scale) if binding.saves_copy else (None, None)


def _opened(x: torch.Tensor, key: str, keep: bool) -> tuple[ProducerBinding, Produced, Kernel]:
    """The binding of a forward call, what it writes, and its kernel."""
    binding = _binding(key)
    return binding, binding.allocate(x, keep), binding.kernel(binding.output_op, x.device, x.shape)


def _operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an operator ``qsync::*`` of a function, with its name and schema; ``fake`` allocates what it writes."""

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        define(run.__name__.lstrip("_") + torch.library.infer_schema(run, mutates_args=()), run, fake)
        return run

    return make


def _allocated(x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    """Make what a forward operator writes, from its arguments: the binding, and then whether a backward pass may follow."""
    place = next(index for index, argument in enumerate(args) if isinstance(argument, str))
    return _written(_binding(args[place]).allocate(x, args[place + 1]))


@_operator(_allocated)
def _batch_norm_output(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    residual_absmax: torch.Tensor | None,
    key: str,
    keep: bool,
    seed: int,
    x_seed: int,
    offset: torch.Tensor,
) -> list[torch.Tensor]:
    binding, p, kernel = _opened(x, key, keep)
    kernel(
        x, weight, bias, eps, residual, residual_absmax, p.mean, p.spread, p.out, p.absmax, p.q, p.scale, p.stream,
        *_kept_args(binding, p), p.open, seed, x_seed, as_kernels_take(offset),
    )  # fmt: skip
    return _written(p)


@_operator(_allocated)
def _layer_norm_output(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    key: str,
    keep: bool,
    seed: int,
    x_seed: int,
    offset: torch.Tensor,
) -> list[torch.Tensor]:
    binding, p, kernel = _opened(x, key, keep)
    summed = p.kept if residual is not None and not binding.saves_copy else None
    kernel(
        x, weight, bias, eps, residual, summed, p.mean, p.spread, p.out, p.q, p.scale, p.stream,
        *_kept_args(binding, p), seed, x_seed, as_kernels_take(offset),
    )  # fmt: skip
    return _written(p)


@_operator(_allocated)
def _rms_norm_output(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    key: str,
    keep: bool,
    seed: int,
    x_seed: int,
    offset: torch.Tensor,
) -> list[torch.Tensor]:
    binding, p, kernel = _opened(x, key, keep)
    summed = p.kept if residual is not None and not binding.saves_copy else None
    kernel(
        x, weight, eps, residual, summed, p.spread, p.out, p.q, p.scale, p.stream,
        *_kept_args(binding, p), seed, x_seed, as_kernels_take(offset),
    )  # fmt: skip
    return _written(p)


@_operator(_allocated)
def _activation_output(x: torch.Tensor, key: str, keep: bool, seed: int, x_seed: int, offset: torch.Tensor) -> list[torch.Tensor]:
    binding, p, kernel = _opened(x, key, keep)
    kernel(x, p.out, p.q, p.scale, p.stream, *_kept_args(binding, p), seed, x_seed, as_kernels_take(offset))
    return _written(p)


@_operator(_allocated)
def _glu_output(
    x: torch.Tensor, factor: torch.Tensor, key: str, keep: bool, seed: int, x_seed: int, factor_seed: int, offset: torch.Tensor
) -> list[torch.Tensor]:
    binding, p, kernel = _opened(x, key, keep)
    copies = *_kept_args(binding, p), p.factor, p.factor_scale
    kernel(x, factor, p.out, p.q, p.scale, p.stream, *copies, seed, x_seed, factor_seed, as_kernels_take(offset))
    return _written(p)


def _gradients(
    x: torch.Tensor, binding: ProducerBinding, wanted: Sequence[bool]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Tensors for the gradients of input, residual, weight and bias, None where one is not wanted; and those that are."""
    like, vector = functools.partial(torch.empty_like, x, dtype=binding.grad_input), functools.partial(x.new_empty, x.shape[1])
    makes = (like, like, functools.partial(vector, dtype=torch.float32), functools.partial(vector, dtype=torch.float32))
    made = [make() if is_wanted else None for make, is_wanted in zip(makes, wanted, strict=True)]
    return made, [tensor for tensor in made if tensor is not None]


def _wanted_gradients(*args: Any) -> list[torch.Tensor]:
    """Make the wanted gradients of a norm, from the arguments of its operator: the binding, and then which are wanted."""
    place = next(index for index, argument in enumerate(args) if isinstance(argument, str))
    return _gradients(args[1], _binding(args[place]), args[place + 1])[1]


GRADIENT_BINDING = 9
"""Which argument of a batch norm's gradient names its binding."""


def _parts(grad: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The gradient of a result, as kernels take it whole or in two parts.

    Dense already, unless the graph was made with a layout that the operator before it does not give.
    """
    return tuple(part.contiguous(memory_format=torch.channels_last) for part in (grad, other) if part is not None)


def _grad_copy(x: torch.Tensor) -> list[torch.Tensor]:
    """Make the tensors of a gradient's copy, to be written: int8 and its scale."""
    return [torch.empty_like(x, dtype=torch.int8), x.new_empty(1, dtype=torch.float32)]


@_operator(_wanted_gradients)
def _batch_norm_grad_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    open: torch.Tensor | None,
    key: str,
    wanted: Sequence[bool],
    other: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    binding = _binding(key)
    all_four, out = _gradients(x, binding, wanted)
    kernel = binding.kernel(binding.grad_op, x.device, x.shape)
    kernel(*_parts(grad, other), x, x_scale, mean, var, weight, bias, eps, open, *all_four)
    return out


@_operator(lambda *args: [*_wanted_gradients(*args), *_grad_copy(args[1])])
def _batch_norm_grad_copy(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    open: torch.Tensor | None,
    key: str,
    wanted: Sequence[bool],
    multiplier: torch.Tensor | None,
    seed: int,
    offset: torch.Tensor,
    other: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    binding = _binding(key)
    all_four, out = _gradients(x, binding, wanted)
    copy = _grad_copy(x)
    kernel = binding.kernel(binding.grad_op, x.device, x.shape)
    operands = (*_parts(grad, other), x, x_scale, mean, var, weight, bias, eps, open, *all_four)
    kernel(*operands, multiplier, *copy, seed, as_kernels_take(offset))
    return [*out, *copy]


@_operator(_wanted_gradients)
def _layer_norm_grad_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    key: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    binding = _binding(key)
    (grad_input, _, grad_weight, grad_bias), out = _gradients(x, binding, wanted)
    binding.kernel(binding.grad_op, x.device, x.shape)(grad, x, x_scale, mean, rstd, weight, grad_input, grad_weight, grad_bias)
    return out


@_operator(_wanted_gradients)
def _rms_norm_grad_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    key: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    binding = _binding(key)
    (grad_input, _, grad_weight, _), out = _gradients(x, binding, wanted)
    binding.kernel(binding.grad_op, x.device, x.shape)(grad, x, x_scale, rstd, weight, grad_input, grad_weight)
    return out


@_operator(lambda grad, x, x_scale, key: torch.empty_like(x, dtype=_binding(key).grad_input))
def _activation_grad_input(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor | None, key: str) -> torch.Tensor:
    binding = _binding(key)
    out = torch.empty_like(x, dtype=binding.grad_input)
    binding.kernel(binding.grad_op, x.device, x.shape)(grad, x, x_scale, out)
    return out


def _glu_gradients_and_copy(x: torch.Tensor, key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the tensors that a gated unit's backward writes, its result's copy among them."""
    binding = _binding(key)
    grad_input, grad_factor = (torch.empty_like(x, dtype=binding.grad_input) for _ in range(2))
    return grad_input, grad_factor, torch.empty_like(x, dtype=binding.dtype)


@_operator(lambda grad, x, x_scale, factor, factor_scale, key: _glu_gradients_and_copy(x, key)[:2])
def _glu_grad_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    factor: torch.Tensor,
    factor_scale: torch.Tensor | None,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    binding = _binding(key)
    both = torch.empty_like(x, dtype=binding.grad_input), torch.empty_like(x, dtype=binding.grad_input)
    binding.kernel(binding.grad_op, x.device, x.shape)(grad, x, x_scale, factor, factor_scale, *both)
    return both


@_operator(lambda grad, x, x_scale, factor, factor_scale, key, *rest: _glu_gradients_and_copy(x, key))
def _glu_grad_copy(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    factor: torch.Tensor,
    factor_scale: torch.Tensor | None,
    key: str,
    scale: torch.Tensor,
    seed: int,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    binding = _binding(key)
    written = _glu_gradients_and_copy(x, key)
    kernel = binding.kernel(binding.grad_op, x.device, x.shape)
    kernel(grad, x, x_scale, factor, factor_scale, *written[:2], scale, written[2], seed, as_kernels_take(offset))
    return written

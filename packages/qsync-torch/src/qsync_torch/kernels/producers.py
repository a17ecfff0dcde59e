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
from qsync_core.kernels.backend import PARTIAL_MAXIMA, Op
from qsync_core.kernels.choice import AUTO_BACKEND, FLOAT_BACKEND, KernelChoice
from qsync_torch.aten.random_bits import as_kernels_take
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
        summed: the sum that a norm of rows normalizes, kept for backward in a float format.
        kept, kept_scale: the normalized input (of an activation: the input) in 8 bit, kept for backward.
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
    summed: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    kept_scale: torch.Tensor | None = None
    open: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    factor_scale: torch.Tensor | None = None

    def read_backward(self, x: torch.Tensor) -> torch.Tensor:
        """What backward reads in the place of the argument ``x``, or that itself."""
        return next(kept for kept in (self.kept, self.summed, x) if kept is not None)


_COPY = "q scale stream"
_WRITTEN = {
    Producer.BATCH_NORM: f"mean spread out absmax {_COPY} kept kept_scale open",
    Producer.LAYER_NORM: f"summed mean spread out {_COPY} kept kept_scale",
    Producer.RMS_NORM: f"summed spread out {_COPY} kept kept_scale",
    Producer.ACTIVATION: f"out {_COPY} kept kept_scale",
    Producer.GLU: f"out {_COPY} kept kept_scale factor factor_scale",
}
"""What the forward kernels write, in the order of their arguments (docs/design/fused-chains.md#kernels)."""


class ProducerBinding(Bound):
    """How one chain runs.

    Attributes:
        producer: what the chain is built around.
        variant: formats of the copy (``compute``), the result (``output``), what is kept (``saved``) and the gradient of the input.
        writes_copy, saves_copy: the result, and what is kept, are written in 8 bit.
        written: fields of :class:`Produced` as the forward kernel takes them; names: those that it writes and its operator lists,
            by whether a backward pass may follow.
    """

    def __init__(self, producer: Producer, variant: Variant, choice: KernelChoice, chain: ChainForm) -> None:
        self.producer, self.variant, self.choice, self.chain = producer, variant, choice, chain
        self.output_op, self.grad_op = f"{producer}.output", f"{producer}.grad_input"
        self.dtype, self.output, self.grad_input = (
            TORCH_DTYPE[precision] for precision in (variant.compute, variant.output, variant.grad_input)
        )
        self.writes_copy, self.saves_copy = variant.compute.needs_scale, variant.saved.needs_scale
        self.saved = TORCH_DTYPE[variant.saved]
        self.written = _WRITTEN[producer].split()
        self.names = {keep: self._written(keep) for keep in (False, True)}
        self._register("producer", producer, variant, choice.backend, choice.config, chain)

    def reasons_against(self, device: torch.device, shape: tuple[int, ...]) -> list[str]:
        """Why no backend of the choice runs it, forward or backward; empty where one does."""
        return [*reasons_against(self.request(self.output_op, device, shape), self.choice), *self.reasons_backward(device, shape)]

    def reasons_backward(self, device: torch.device, shape: tuple[int, ...]) -> list[str]:
        """Why no backend of the choice runs it backward."""
        return reasons_against(self.request(self.grad_op, device, shape), self.choice)

    def backward_with(self, **form: Any) -> ProducerBinding:
        """The binding of the same producer whose backward kernel does more, named as in :class:`~qsync_core.ir.chain.ChainForm`."""
        return producer_binding(self.producer, self.variant, self.choice, attrs.evolve(self.chain, **form))

    def also_does(self, device: torch.device, shape: tuple[int, ...], **form: Any) -> bool:
        """Whether the backend that runs its backward does so with more in its form; another would take over the whole of it."""
        runs = backend_of(self.request(self.grad_op, device, shape), self.choice)
        more = self.backward_with(**form)
        return runs != "" and runs == backend_of(more.request(self.grad_op, device, shape), more.choice)

    def _written(self, keep: bool) -> tuple[str, ...]:
        """Which fields of :class:`Produced` are written; ``keep`` where a backward pass may follow."""
        chain, kept, copies = self.chain, keep and self.saves_copy, self.writes_copy
        wanted = {
            "out": chain.float_result, "absmax": chain.float_result, "q": copies, "scale": copies, "stream": copies,
            "mean": True, "spread": True, "summed": keep and chain.residual and not self.saves_copy,
            "kept": kept, "kept_scale": kept, "factor": kept, "factor_scale": kept,
            "open": keep and chain.activation is Activation.RELU and (chain.residual or self.saves_copy),
        }  # fmt: skip
        return tuple(name for name in Produced._fields if name in self.written and wanted[name])

    def named(self, tensors: Sequence[torch.Tensor], keep: bool) -> Produced:
        """The tensors of an operator's list by their names."""
        return Produced(**dict(zip(self.names[keep], tensors, strict=True)))

    def allocate(self, x: torch.Tensor, keep: bool) -> Produced:
        """Tensors to be written, for an input that is dense: channels-last, or rows."""
        is_image = self.producer is Producer.BATCH_NORM
        groups = x.shape[1] if is_image else x.shape[0]
        copy_scales = x.shape[0] if self.variant.x_granularity is Granularity.PER_ROW else 1
        make: dict[str, Callable[[], torch.Tensor]] = {
            "out": lambda: torch.empty_like(x, dtype=self.output),
            "absmax": lambda: x.new_empty(1, dtype=torch.float32),
            "q": lambda: torch.empty_like(x, dtype=self.dtype),
            "scale": lambda: x.new_empty(copy_scales, dtype=torch.float32),
            "stream": lambda: x.new_empty(1, dtype=torch.int64),
            "mean": lambda: x.new_empty(groups, dtype=torch.float32),
            "spread": lambda: x.new_empty(groups, dtype=torch.float32),
            "summed": lambda: torch.empty_like(x, dtype=self.saved),
            "kept": lambda: torch.empty_like(x, dtype=self.saved),
            "kept_scale": lambda: x.new_empty(groups, dtype=torch.float32),
            "open": lambda: x.new_empty(x.shape[0], x.shape[2], x.shape[3], (x.shape[1] + 7) // 8, dtype=torch.uint8),
            "factor": lambda: torch.empty_like(x, dtype=self.saved),
            "factor_scale": lambda: x.new_empty(groups, dtype=torch.float32),
        }
        return Produced(**{name: make[name]() for name in self.names[keep]})


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


def _listed(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


Operands = Sequence[Any]
"""The input first; of a gradient, behind that of the result."""
Written = tuple[torch.Tensor, ...]
Function = Callable[..., Any]


def _define(name: str, operands: str, more: str, run: Function, fake: Function, results: str = "Tensor[]") -> None:
    """Make an operator of operands, which its kernel takes as they come, of the key of a binding, and of more.

    ``run`` and ``fake``, which allocates what is written, get the operands together, the binding, and the rest.
    """
    place = operands.count(",") + 1

    def of_binding(function: Function) -> Function:
        return lambda *args: function(args[:place], cast(ProducerBinding, BOUND[args[place]]), *args[place + 1 :])

    define(f"{name}({operands}, str key{more}) -> {results}", of_binding(run), of_binding(fake))


def _output(operands: Operands, binding: ProducerBinding, keep: bool, *seeds: Any) -> list[torch.Tensor]:
    x, p = operands[0], binding.allocate(operands[0], keep)
    written = [getattr(p, name) for name in binding.written]
    binding.kernel(binding.output_op, x.device, x.shape)(*operands, *written, *seeds[:-1], as_kernels_take(seeds[-1]))
    return _listed(p)


def _fake_output(operands: Operands, binding: ProducerBinding, keep: bool, *seeds: Any) -> list[torch.Tensor]:
    return _listed(binding.allocate(operands[0], keep))


_SEEDS = ", bool keep, SymInt seed, SymInt x_seed"
for _name, _operands, _more in (
    ("batch_norm", "Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, Tensor? residual_absmax", _SEEDS),
    ("layer_norm", "Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual", _SEEDS),
    ("rms_norm", "Tensor x, Tensor? weight, float eps, Tensor? residual", _SEEDS),
    ("activation", "Tensor x", _SEEDS),
    ("glu", "Tensor x, Tensor factor", f"{_SEEDS}, SymInt factor_seed"),
):
    _define(f"{_name}_output", _operands, f"{_more}, Tensor offset", _output, _fake_output)


_GRADIENTS = {Producer.BATCH_NORM: (0, 1, 2, 3), Producer.LAYER_NORM: (0, 2, 3), Producer.RMS_NORM: (0, 2)}
"""Which gradients the backward kernel of a norm takes, of those of input, residual, weight and bias."""


def _gradients(x: torch.Tensor, binding: ProducerBinding, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """Tensors for the gradients of input, residual, weight and bias; None where one is not wanted."""
    like = functools.partial(torch.empty_like, x, dtype=binding.grad_input)
    vector = functools.partial(x.new_empty, x.shape[1], dtype=torch.float32)
    return [make() if is_wanted else None for make, is_wanted in zip((like, like, vector, vector), wanted, strict=True)]


def _parts(grad: torch.Tensor, other: torch.Tensor | None) -> list[torch.Tensor]:
    """The gradient of a result, as kernels take it: that of images whole or in two parts.

    Dense already, unless the graph was made with a layout that the operator before it does not give.
    """
    if grad.ndim != 4:
        return [grad]
    return [part.contiguous(memory_format=torch.channels_last) for part in (grad, other) if part is not None]


def _norm_grad_input(
    operands: Operands, binding: ProducerBinding, wanted: Sequence[bool], other: torch.Tensor | None = None
) -> list[torch.Tensor]:
    grad, x, *rest = operands
    four = _gradients(x, binding, wanted)
    written = [four[place] for place in _GRADIENTS[binding.producer]]
    binding.kernel(binding.grad_op, x.device, x.shape)(*_parts(grad, other), x, *rest, *written)
    return _listed(four)


def _fake_norm_grad_input(operands: Operands, binding: ProducerBinding, wanted: Sequence[bool], *other: Any) -> list[torch.Tensor]:
    return _listed(_gradients(operands[1], binding, wanted))


def _grad_copy(x: torch.Tensor) -> list[torch.Tensor]:
    """Make the tensors of a gradient's copy, to be written: int8 and its scale."""
    return [torch.empty_like(x, dtype=torch.int8), x.new_empty(1, dtype=torch.float32)]


def _batch_norm_grad_copy(
    operands: Operands,
    binding: ProducerBinding,
    wanted: Sequence[bool],
    multiplier: torch.Tensor | None,
    seed: int,
    offset: torch.Tensor,
    other: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    grad, x, *rest = operands
    four, copy, kernel = _gradients(x, binding, wanted), _grad_copy(x), binding.kernel(binding.grad_op, x.device, x.shape)
    kernel(*_parts(grad, other), x, *rest, *four, multiplier, *copy, seed, as_kernels_take(offset))
    return [*_listed(four), *copy]


_OF_BATCH_NORM = (
    "Tensor grad, Tensor x, Tensor? x_scale, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps, Tensor? open"
)
GRADIENT_BINDING = 9
"""Which argument of a batch norm's gradient names its binding."""
for _name, _operands, _more in (
    ("batch_norm", _OF_BATCH_NORM, ", Tensor? other=None"),
    ("layer_norm", "Tensor grad, Tensor x, Tensor? x_scale, Tensor mean, Tensor rstd, Tensor? weight", ""),
    ("rms_norm", "Tensor grad, Tensor x, Tensor? x_scale, Tensor rstd, Tensor? weight", ""),
):
    _define(f"{_name}_grad_input", _operands, f", bool[] wanted{_more}", _norm_grad_input, _fake_norm_grad_input)
_define(
    "batch_norm_grad_copy",
    _OF_BATCH_NORM,
    ", bool[] wanted, Tensor? multiplier, SymInt seed, Tensor offset, Tensor? other=None",
    _batch_norm_grad_copy,
    lambda operands, binding, wanted, *more: [*_fake_norm_grad_input(operands, binding, wanted), *_grad_copy(operands[1])],
)


def _activation_grad_input(operands: Operands, binding: ProducerBinding) -> torch.Tensor:
    x, out = operands[1], _fake_activation_grad_input(operands, binding)
    binding.kernel(binding.grad_op, x.device, x.shape)(*operands, out)
    return out


def _fake_activation_grad_input(operands: Operands, binding: ProducerBinding) -> torch.Tensor:
    return torch.empty_like(operands[1], dtype=binding.grad_input)


def _glu_grad_input(operands: Operands, binding: ProducerBinding) -> Written:
    x, both = operands[1], _fake_glu_grad_input(operands, binding)
    binding.kernel(binding.grad_op, x.device, x.shape)(*operands, *both)
    return both


def _fake_glu_grad_input(operands: Operands, binding: ProducerBinding) -> Written:
    return tuple(torch.empty_like(operands[1], dtype=binding.grad_input) for _ in range(2))


def _glu_grad_copy(operands: Operands, binding: ProducerBinding, scale: torch.Tensor, seed: int, offset: torch.Tensor) -> Written:
    x, written = operands[1], _fake_glu_grad_copy(operands, binding)
    kernel = binding.kernel(binding.grad_op, x.device, x.shape)
    kernel(*operands, *written[:2], scale, written[2], seed, as_kernels_take(offset))
    return written


def _glu_grad_maxima(operands: Operands, binding: ProducerBinding, *multipliers: torch.Tensor | None) -> Written:
    x, written = operands[1], _fake_glu_grad_maxima(operands, binding)
    grad_input, grad_factor, maxima, factor_maxima = written
    binding.kernel(binding.grad_op, x.device, x.shape)(
        *operands, grad_input, grad_factor, multiplier=multipliers[0], maxima_out=maxima, factor_multiplier=multipliers[1],
        factor_maxima_out=factor_maxima,
    )  # fmt: skip
    return written


def _fake_glu_grad_maxima(operands: Operands, binding: ProducerBinding, *more: Any) -> Written:
    gradients = _fake_glu_grad_input(operands, binding)
    return *gradients, *map(empty_maxima, gradients)


def empty_maxima(gradient: torch.Tensor) -> torch.Tensor:
    """Allocate the partial maxima of a gradient, and below them its checksums."""
    return gradient.new_empty((2, PARTIAL_MAXIMA), dtype=torch.float32)


def _fake_glu_grad_copy(operands: Operands, binding: ProducerBinding, *more: Any) -> Written:
    return *_fake_glu_grad_input(operands, binding), torch.empty_like(operands[1], dtype=binding.dtype)


_OF_ACTIVATION = "Tensor grad, Tensor x, Tensor? x_scale"
_OF_GLU = f"{_OF_ACTIVATION}, Tensor factor, Tensor? factor_scale"
_define("activation_grad_input", _OF_ACTIVATION, "", _activation_grad_input, _fake_activation_grad_input, "Tensor")
_define("glu_grad_input", _OF_GLU, "", _glu_grad_input, _fake_glu_grad_input, "(Tensor, Tensor)")
_define(
    "glu_grad_copy", _OF_GLU, ", Tensor scale, SymInt seed, Tensor offset", _glu_grad_copy, _fake_glu_grad_copy,
    "(Tensor, Tensor, Tensor)",
)  # fmt: skip
_define(
    "glu_grad_maxima", _OF_GLU, ", Tensor? multiplier, Tensor? factor_multiplier", _glu_grad_maxima, _fake_glu_grad_maxima,
    "(Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip

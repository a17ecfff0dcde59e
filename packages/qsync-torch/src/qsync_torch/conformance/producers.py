"""Producers and what they should write: batch norm, layer norm and activation in float64, and calls of their kernels.

All tensors are matrices here, of positions and channels for a batch norm; its kernels get them as channels-last images.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch.nn import functional

from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.aten.random_bits import Offset
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.subject import Kernel, Subject
from qsync_torch.dtypes import TORCH_DTYPE

FINE = 2.0**-19
"""What float32 arithmetic may be off by, as a part of the magnitudes of all terms, sums over thousands of elements included."""
EPS = 1e-5
BATCH_NORM, LAYER_NORM, ACTIVATION = "batch_norm", "layer_norm", "activation"
FORMS = {
    "batch_norm": (BATCH_NORM, ChainForm()),
    "batch_norm+relu": (BATCH_NORM, ChainForm(Activation.RELU)),
    "batch_norm+add": (BATCH_NORM, ChainForm(residual=True)),
    "batch_norm+add+relu": (BATCH_NORM, ChainForm(Activation.RELU, residual=True)),
    "layer_norm": (LAYER_NORM, ChainForm()),
    "add+layer_norm": (LAYER_NORM, ChainForm(residual=True)),
    **{str(function): (ACTIVATION, ChainForm(function)) for function in Activation if function is not Activation.NONE},
}
"""Every producer with every chain that there is, by a name for people."""
_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda z: z,
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda z: functional.gelu(z, approximate="tanh"),
    Activation.SILU: functional.silu,
}


def variant_of(
    compute: Precision = Precision.INT8,
    *,
    saved: Precision = Precision.FLOAT32,
    output: Precision = Precision.FLOAT32,
    granularity: Granularity = Granularity.PER_TENSOR,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> Variant:
    """A copy in ``compute``, with these formats of what is kept and written; gradients in the format of what is written."""
    return Variant(compute, output, saved, output, output, granularity, rounding=rounding)


@attrs.frozen(eq=False)
class Written:
    """What a forward kernel wrote, as matrices and vectors; None for what was not wanted.

    ``offset`` is what it was called with, ``spread`` the variance of a batch norm's channels and σ⁻¹ of a layer norm's rows.
    """

    mean: torch.Tensor | None
    spread: torch.Tensor | None
    out: torch.Tensor | None
    absmax: torch.Tensor | None
    q: torch.Tensor | None
    scale: torch.Tensor | None
    stream: torch.Tensor | None
    x_q: torch.Tensor | None
    x_scale: torch.Tensor | None
    bits: torch.Tensor | None
    sum: torch.Tensor | None
    offset: Offset


@attrs.frozen(eq=False)
class Expected:
    """The result in float64.

    Attributes:
        s: what is normalized; mean, var: its statistics, kept as dimensions of size 1.
        xhat: normalized (an activation's x); affine: times weight plus bias; z: before the activation; r: the result.
        xhat_error, error: what float32 arithmetic may be off by in x̂, and in z and r.
    """

    s: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor
    xhat: torch.Tensor
    affine: torch.Tensor
    z: torch.Tensor
    r: torch.Tensor
    xhat_error: torch.Tensor
    error: torch.Tensor


@attrs.frozen(eq=False)
class Gradients:
    """What a backward kernel wrote, or should have; None for what was not wanted or does not exist."""

    x: torch.Tensor | None
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@attrs.frozen(eq=False)
class GradCopy:
    """The int8 copy of a gradient, as a matrix, and its scale; ``multiplier`` is what it was multiplied by, for each column."""

    multiplier: torch.Tensor | None
    q: torch.Tensor
    scale: torch.Tensor


@attrs.frozen(eq=False)
class Producer:
    """One call of a producer.

    Attributes:
        name: ``batch_norm``, ``layer_norm`` or ``activation``; chain: with what; variant: in which formats.
        x: float matrix; images: (B, H, W), whose product is the number of its rows.
        residual: of the same shape; weight, bias: float32, for each column.
    """

    name: str
    chain: ChainForm
    variant: Variant
    x: torch.Tensor
    images: tuple[int, int, int]
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def of(
        cls, form: str, variant: Variant, shape: tuple[int, int], device: torch.device, seed: int = 0, *, mean: float = 0.5,
        deviation: float = 2.0,
    ) -> Producer:  # fmt: skip
        """Normal numbers in the format that the variant writes; weights of both signs."""
        name, chain = FORMS[form]
        dtype = TORCH_DTYPE[variant.output]
        x = (floats(shape, torch.float32, device, seed) * deviation + mean).to(dtype)
        normalized = name != ACTIVATION
        return cls(
            name,
            chain,
            variant,
            x,
            images_of(shape[0]),
            floats(shape, dtype, device, seed + 1) if chain.residual else None,
            floats((shape[1],), torch.float32, device, seed + 2) if normalized else None,
            floats((shape[1],), torch.float32, device, seed + 3) if normalized else None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand that the producer's kernels get."""
        batch, height, width = self.images
        return (batch, self.x.shape[1], height, width) if self.name == BATCH_NORM else tuple(self.x.shape)

    def kernels(self, subject: Subject, part: str = "output", *, bare: bool = False) -> list[Kernel]:
        """Build kernels of all configurations of ``output`` or ``grad_input``; where the backend refuses, the test is skipped."""
        ask = subject.bare_kernels if bare else subject.kernels
        return ask(f"{self.name}.{part}", self.variant, (self.shape,), chain=self.chain)

    def is_refused(self, subject: Subject) -> bool:
        """Whether the backend has reasons against one of its two kernels."""
        return any(
            subject.refuses(f"{self.name}.{part}", self.variant, (self.shape,), chain=self.chain)
            for part in ("output", "grad_input")
        )

    def image(self, matrix: torch.Tensor | None) -> torch.Tensor | None:
        """A matrix as its kernels take it."""
        if matrix is None or self.name != BATCH_NORM:
            return matrix
        return matrix.view(*self.images, matrix.shape[1]).permute(0, 3, 1, 2)

    @property
    def wants_bits(self) -> bool:
        """Whether backward cannot tell from x where ReLU was open."""
        is_relu = self.name == BATCH_NORM and self.chain.activation is Activation.RELU
        return is_relu and (self.chain.residual or self.variant.saved.needs_scale)

    def run(self, kernel: Kernel, outputs: Outputs, seed: int = 11, x_seed: int = 12, offset: Offset = 13) -> Written:
        """Call a forward kernel on fresh outputs: all that its chain and its variant ask for."""
        (rows, columns), variant = self.x.shape, self.variant

        def empty(wanted: bool, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
            return outputs.empty(shape, dtype) if wanted else None

        of_batch, copied, saved = self.name == BATCH_NORM, variant.compute.needs_scale, variant.saved.needs_scale
        groups, float32 = rows if variant.x_granularity is Granularity.PER_ROW else 1, torch.float32
        per_group = columns if of_batch else rows
        normalized = self.name != ACTIVATION
        found = Written(
            mean=empty(normalized, float32, per_group),
            spread=empty(normalized, float32, per_group),
            out=empty(self.chain.float_result, TORCH_DTYPE[variant.output], rows, columns),
            absmax=empty(of_batch and self.chain.float_result, float32, 1),
            q=empty(copied, TORCH_DTYPE[variant.compute], rows, columns),
            scale=empty(copied, float32, groups),
            stream=empty(copied, torch.int64, 1),
            x_q=empty(saved, TORCH_DTYPE[variant.saved], rows, columns),
            x_scale=empty(saved, float32, per_group),
            bits=empty(self.wants_bits, torch.uint8, rows, -(-columns // 8)),
            sum=empty(self.name == LAYER_NORM and self.chain.residual and not saved, self.x.dtype, rows, columns),
            offset=offset,
        )
        copies = (found.x_scale, seed, x_seed, offset)
        if of_batch:
            absmax = None if self.residual is None else magnitude(self.residual).float().view(1)
            bits = None if found.bits is None else found.bits.view(*self.images, found.bits.shape[1])
            kernel(
                self.image(self.x), self.weight, self.bias, EPS, self.image(self.residual), absmax, found.mean, found.spread,
                self.image(found.out), found.absmax, self.image(found.q), found.scale, found.stream, self.image(found.x_q),
                found.x_scale, bits, seed, x_seed, offset,
            )  # fmt: skip
        elif normalized:
            kernel(
                self.x, self.weight, self.bias, EPS, self.residual, found.sum, found.mean, found.spread, found.out, found.q,
                found.scale, found.stream, found.x_q, *copies,
            )  # fmt: skip
        else:
            kernel(self.x, found.out, found.q, found.scale, found.stream, found.x_q, *copies)
        return found

    def expected(self, written: Written | None = None) -> Expected:
        """Compute the result in float64, of the sum that was written, where one was."""
        dim = 0 if self.name == BATCH_NORM else 1
        s, added = self.x.double(), 0.0 if self.residual is None else self.residual.double()
        if self.name == LAYER_NORM:
            s = s + added if written is None or written.sum is None else written.sum.double()
        if self.name == ACTIVATION:
            nothing = torch.zeros((), dtype=torch.float64, device=s.device)
            xhat, mean, var, xhat_error = s, nothing, nothing, torch.zeros_like(s)
        else:
            mean = s.sum(dim, keepdim=True) / max(s.shape[dim], 1)
            var = (s - mean).square().sum(dim, keepdim=True) / max(s.shape[dim], 1)
            rstd = (var + EPS).rsqrt()
            xhat = (s - mean) * rstd
            size = s.abs() + s.abs().sum(dim, keepdim=True) / max(s.shape[dim], 1)
            xhat_error = FINE * (size * rstd + xhat.abs())
        weight = 1.0 if self.weight is None else self.weight.double()
        bias = 0.0 if self.bias is None else self.bias.double()
        affine = xhat * weight + bias
        z = affine + added if self.name == BATCH_NORM else affine
        error = xhat_error * torch.as_tensor(weight).abs() + FINE * (affine.abs() + torch.as_tensor(bias).abs() + z.abs())
        return Expected(s, mean, var, xhat, affine, z, _FUNCTIONS[self.chain.activation](z), xhat_error, error)

    def run_backward(
        self, kernel: Kernel, outputs: Outputs, grad: torch.Tensor, kept: torch.Tensor, kept_scale: torch.Tensor | None,
        mean: torch.Tensor, spread: torch.Tensor, bits: torch.Tensor | None, copy: GradCopy | None = None, seed: int = 21,
        offset: Offset = 22, other: torch.Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        """Call a backward kernel on fresh outputs; of a chain with a copy of the gradient, into ``copy``; of one that takes its
        gradient in two parts, with ``other``."""
        columns = grad.shape[1]

        def empty() -> torch.Tensor:
            return outputs.empty(tuple(grad.shape), grad.dtype)

        if self.name == ACTIVATION:
            found = Gradients(empty())
            kernel(grad, kept, kept_scale, found.x)
            return found
        vectors = [
            outputs.empty((columns,), torch.float32) if parameter is not None else None for parameter in (self.weight, self.bias)
        ]
        if self.name == LAYER_NORM:
            found = Gradients(empty(), None, *vectors)
            kernel(grad, kept, kept_scale, mean, spread, self.weight, found.x, *vectors)
            return found
        found = Gradients(empty(), empty() if self.chain.residual else None, *vectors)
        copied = () if copy is None else (copy.multiplier, self.image(copy.q), copy.scale, seed, offset)
        parts = (grad,) if other is None else (grad, other)
        kernel(
            *map(self.image, parts), self.image(kept), kept_scale, mean, spread, self.weight, self.bias, EPS,
            None if bits is None else bits.view(*self.images, bits.shape[1]), self.image(found.x), self.image(found.residual),
            *vectors, *copied,
        )  # fmt: skip
        return found

    def expected_gradients(
        self, grad: torch.Tensor, xhat: torch.Tensor, spread: torch.Tensor, is_open: torch.Tensor
    ) -> tuple[Gradients, Gradients]:
        """The formulas of docs/design/fused-chains.md in float64, and what float32 arithmetic may be off by.

        Args:
            grad: of the result.
            xhat: what backward normalizes x to; of an activation: x.
            spread: as in :class:`Written`.
            is_open: where a ReLU behind a batch norm lets gradients through.
        """
        g = grad.double()
        if self.name == ACTIVATION:
            x = xhat.clone().requires_grad_()
            (derivative,) = torch.autograd.grad(_FUNCTIONS[self.chain.activation](x).sum(), x)
            return Gradients(derivative * g), Gradients(8 * FINE * (1 + xhat.abs()) * g.abs())
        of_batch = self.name == BATCH_NORM
        dim, weight = (0 if of_batch else 1), 1.0 if self.weight is None else self.weight.double()
        h = torch.where(is_open, g, 0.0)
        inner = h if of_batch else h * weight
        rstd = (spread.double() + EPS).rsqrt() if of_batch else spread.double()[:, None]
        factor = rstd * weight if of_batch else rstd
        count = max(h.shape[dim], 1)

        def formula(inner: torch.Tensor, factor: torch.Tensor, xhat: torch.Tensor, sign: float) -> torch.Tensor:
            means = inner.sum(dim, keepdim=True) + xhat * (inner * xhat).sum(dim, keepdim=True)
            return (inner + sign * means / count) * factor

        of_weight, of_bias = (h * xhat).sum(0), h.sum(0)
        sizes = Gradients(
            8 * FINE * formula(inner.abs(), torch.as_tensor(factor).abs(), xhat.abs(), 1.0),
            0.0 * h,
            8 * FINE * (h * xhat).abs().sum(0),
            8 * FINE * h.abs().sum(0),
        )
        return Gradients(formula(inner, torch.as_tensor(factor), xhat, -1.0), h, of_weight, of_bias), sizes


def given(x: torch.Tensor | None) -> torch.Tensor:
    """What is there because it was asked for."""
    assert x is not None
    return x


def images_of(positions: int) -> tuple[int, int, int]:
    """(B, H, W) with that many positions, as square as they go."""
    width = next((w for w in (7, 5, 3, 2) if positions % w == 0), 1)
    rest = positions // width
    height = next((h for h in (4, 3, 2) if rest % h == 0), 1)
    return (rest // height, height, width)


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """The largest, 0 of nothing."""
    return x.abs().amax() if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)

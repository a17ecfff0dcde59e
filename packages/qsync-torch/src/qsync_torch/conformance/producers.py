"""Producers: batch norm, layer norm and activation, forward and backward, with what they should write in float64.

All tensors are matrices here, of positions and channels for a batch norm; its kernels get them as channels-last images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.nn import functional

from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import PARTIAL_MAXIMA
from qsync_torch.conformance.calls import Asked, Call, Written
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.producer_checks import FINE, check_bits, check_close, check_copy, packed, unpacked
from qsync_torch.conformance.quantization import LARGEST, check_maxima, check_stream
from qsync_torch.conformance.subject import Kernel
from qsync_torch.dtypes import TORCH_DTYPE

EPS = 1e-5
BATCH_NORM, LAYER_NORM, RMS_NORM, ACTIVATION, GLU = "batch_norm", "layer_norm", "rms_norm", "activation", "glu"
NORMS = (BATCH_NORM, LAYER_NORM, RMS_NORM)
ROW_NORMS = (LAYER_NORM, RMS_NORM)
FORMS = {
    "batch_norm": (BATCH_NORM, ChainForm()),
    "batch_norm+relu": (BATCH_NORM, ChainForm(Activation.RELU)),
    "batch_norm+add": (BATCH_NORM, ChainForm(residual=True)),
    "batch_norm+add+relu": (BATCH_NORM, ChainForm(Activation.RELU, residual=True)),
    "layer_norm": (LAYER_NORM, ChainForm()),
    "add+layer_norm": (LAYER_NORM, ChainForm(residual=True)),
    "rms_norm": (RMS_NORM, ChainForm()),
    "add+rms_norm": (RMS_NORM, ChainForm(residual=True)),
    **{str(function): (ACTIVATION, ChainForm(function)) for function in Activation if function is not Activation.NONE},
    **{f"glu {function}": (GLU, ChainForm(function)) for function in Activation if function is not Activation.NONE},
}
"""Every producer with every chain that there is, by a name for people."""
_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda z: z,
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda z: functional.gelu(z, approximate="tanh"),
    Activation.SILU: functional.silu,
}
_COPY = "q> scale> stream>"
SIGNATURES = {
    "batch_norm.output": f"x weight bias eps residual residual_absmax mean> spread> out> absmax> {_COPY} x_q> x_scale> bits> "
    "seed x_seed offset",
    "layer_norm.output": f"x weight bias eps residual sum> mean> spread> out> {_COPY} x_q> x_scale> seed x_seed offset",
    "rms_norm.output": f"x weight eps residual sum> spread> out> {_COPY} x_q> x_scale> seed x_seed offset",
    "glu.output": f"x factor out> {_COPY} x_q> x_scale> factor_q> factor_scale> seed x_seed factor_seed offset",
    "activation.output": f"x out> {_COPY} x_q> x_scale> seed x_seed offset",
    "batch_norm.grad_input": "kept kept_scale mean spread weight bias eps bits x> residual> weight> bias>",
    "layer_norm.grad_input": "kept kept_scale mean spread weight x> weight> bias>",
    "rms_norm.grad_input": "kept kept_scale spread weight x> weight>",
    "glu.grad_input": "kept kept_scale factor factor_scale x> factor>",
    "activation.grad_input": "kept kept_scale x>",
}
"""Arguments by the names that they have here; a backward kernel's come behind its gradient."""

__tracebackhide__ = True  # a failure shows the test and the kernel


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


@attrs.frozen(eq=False, kw_only=True)
class _OfProducer(Call):
    """What both directions share.

    Attributes:
        name: ``batch_norm``, ``layer_norm`` or ``activation``; chain: with what.
        images: (B, H, W), whose product is the number of rows.
        weight, bias: float32, for each column.
    """

    name: str
    chain: ChainForm
    images: tuple[int, int, int]
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def eps(self) -> float:
        """Added to variances."""
        return EPS

    @property
    def wants_bits(self) -> bool:
        """Whether backward cannot tell from x where ReLU was open."""
        is_relu = self.name == BATCH_NORM and self.chain.activation is Activation.RELU
        return is_relu and (self.chain.residual or self.variant.saved.needs_scale)

    def argument(self, x: torch.Tensor) -> torch.Tensor:
        """A matrix as its kernels take it."""
        if x.dim() != 2 or self.name != BATCH_NORM:
            return x
        image = x.view(*self.images, x.shape[1])
        return image if x.dtype is torch.uint8 else image.permute(0, 3, 1, 2)

    def shape_of(self, x: torch.Tensor) -> tuple[int, ...]:
        """The shape of an operand as its kernels get it."""
        batch, height, width = self.images
        return (batch, x.shape[1], height, width) if self.name == BATCH_NORM else tuple(x.shape)


@attrs.frozen(eq=False, kw_only=True)
class Producer(_OfProducer):
    """One forward call.

    Attributes:
        x: float matrix; residual: of the same shape.
        factor: what a gated unit multiplies with.
        x_seed, factor_seed: name the random numbers of what is kept.
    """

    x: torch.Tensor
    residual: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    x_seed: int = 12
    factor_seed: int = 14
    offset: Any = 13

    @classmethod
    def of(
        cls, form: str, variant: Variant, shape: tuple[int, int], device: torch.device, seed: int = 0, *, mean: float = 0.5,
        deviation: float = 2.0,
    ) -> Producer:  # fmt: skip
        """Normal numbers in the format that the variant writes; weights of both signs."""
        name, chain = FORMS[form]
        dtype = TORCH_DTYPE[variant.output]
        weight, bias = (floats((shape[1],), torch.float32, device, seed + more) for more in (2, 3))
        return cls(
            name=name,
            chain=chain,
            variant=variant,
            x=(floats(shape, torch.float32, device, seed) * deviation + mean).to(dtype),
            images=images_of(shape[0]),
            residual=floats(shape, dtype, device, seed + 1) if chain.residual else None,
            factor=floats(shape, dtype, device, seed + 4) if name == GLU else None,
            weight=weight if name in NORMS else None,
            bias=bias if name in (BATCH_NORM, LAYER_NORM) else None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x as its kernels get it."""
        return self.shape_of(self.x)

    @property
    def asked(self) -> Asked:
        """The request's operands: copies have a seed each, and both the offset; matrices and parameters have any strides."""
        copies = {"seed": ("q",), "x_seed": ("x_q",)} if self.variant.saved.needs_scale else {"seed": ("q",)}
        if self.name == GLU and self.variant.saved.needs_scale:
            copies["factor_seed"] = ("factor_q",)
        return Asked(
            op := f"{self.name}.output",
            SIGNATURES[op],
            (self.shape,),
            {"chain": self.chain},
            copies | {"offset": ("q", "x_q", "factor_q")[: len(copies)]},
            ("weight", "bias") if self.name == BATCH_NORM else ("x", "residual", "factor", "weight", "bias"),
        )

    @property
    def residual_absmax(self) -> torch.Tensor | None:
        """The residual's largest magnitude, which whoever wrote it hands on."""
        return None if self.residual is None else magnitude(self.residual).float().view(1)

    def allocate(self, outputs: Outputs) -> Written:
        """All that its chain and its variant ask for."""
        (rows, columns), variant = self.x.shape, self.variant
        of_batch, copied, saved = self.name == BATCH_NORM, variant.compute.needs_scale, variant.saved.needs_scale
        groups, float32 = rows if variant.x_granularity is Granularity.PER_ROW else 1, torch.float32
        per_group, result = columns if of_batch else rows, self.chain.float_result
        normalized, summed = self.name in NORMS, self.name in ROW_NORMS and self.chain.residual and not saved
        wanted: dict[str, tuple[bool, torch.dtype, tuple[int, ...]]] = {
            "mean": (normalized and self.name != RMS_NORM, float32, (per_group,)),
            "spread": (normalized, float32, (per_group,)),
            "out": (result, TORCH_DTYPE[variant.output], (rows, columns)),
            "absmax": (of_batch and result, float32, (1,)),
            "q": (copied, TORCH_DTYPE[variant.compute], (rows, columns)),
            "scale": (copied, float32, (groups,)),
            "stream": (copied, torch.int64, (1,)),
            "x_q": (saved, TORCH_DTYPE[variant.saved], (rows, columns)),
            "x_scale": (saved, float32, (per_group,)),
            "factor_q": (saved and self.name == GLU, TORCH_DTYPE[variant.saved], (rows, columns)),
            "factor_scale": (saved and self.name == GLU, float32, (per_group,)),
            "bits": (self.wants_bits, torch.uint8, (rows, -(-columns // 8))),
            "sum": (summed, self.x.dtype, (rows, columns)),
        }
        return Written({name: outputs.empty(shape, dtype) for name, (is_wanted, dtype, shape) in wanted.items() if is_wanted})

    def expected(self, written: Written | None = None) -> Expected:
        """Compute the result in float64, of the sum that was written, where one was."""
        dim = 0 if self.name == BATCH_NORM else 1
        s, added = self.x.double(), 0.0 if self.residual is None else self.residual.double()
        if self.name in ROW_NORMS:
            s = written["sum"].double() if written is not None and "sum" in written else s + added
        if self.name not in NORMS:
            nothing = torch.zeros((), dtype=torch.float64, device=s.device)
            xhat, mean, var, xhat_error = s, nothing, nothing, torch.zeros_like(s)
        else:
            mean = s.sum(dim, keepdim=True) / max(s.shape[dim], 1) * (self.name != RMS_NORM)
            var = (s - mean).square().sum(dim, keepdim=True) / max(s.shape[dim], 1)
            rstd = (var + EPS).rsqrt()
            xhat = (s - mean) * rstd
            size = s.abs() + s.abs().sum(dim, keepdim=True) / max(s.shape[dim], 1)
            xhat_error = FINE * (size * rstd + xhat.abs())
        affine, z, error = with_parameters(self, xhat, xhat_error, added if self.name == BATCH_NORM else 0.0)
        r = _FUNCTIONS[self.chain.activation](z)
        if self.factor is not None:
            factor = self.factor.double()
            r, error = r * factor, error * factor.abs() + FINE * (r * factor).abs()
        return Expected(s, mean, var, xhat, affine, z, r, xhat_error, error)

    def compare(self, written: Written) -> None:
        """Statistics, the sum, the result, both copies, bits and the stream."""
        expected, variant, x = self.expected(written), self.variant, self.x
        if "stream" in written:
            check_stream(written["stream"], self.offset, x)
        of_batch, s, r = self.name == BATCH_NORM, expected.s, expected.r
        if not x.numel():
            statistics = [written[name] for name in ("mean", "spread") if name in written]
            assert not of_batch or not torch.cat(statistics).any(), "without positions, mean and variance are 0"
            return
        if of_batch:
            # One pass with a running mean, as PyTorch's on GPUs, rounds the mean at every step: that is the last term.
            size = s.abs().mean(0)
            slack = 8 * FINE * expected.var[0] + (FINE * size).square() + 2.0**-22 * size * expected.var[0].sqrt()
            check_close(written["mean"], expected.mean[0], FINE * size, "the mean of a channel")
            what = "the variance of a channel (biased: divided by the number of positions)"
            check_close(written["spread"], expected.var[0], slack, what)
        if self.name in ROW_NORMS:
            rstd, size = (expected.var + EPS).rsqrt()[:, 0], s.abs().mean(1)
            if "mean" in written:
                check_close(written["mean"], expected.mean[:, 0], FINE * size, "the mean of a row")
            what = "1 / sqrt(variance + eps) of a row" if self.name == LAYER_NORM else "1 / sqrt(mean square + eps) of a row"
            check_close(written["spread"], rstd, rstd * (8 * FINE + FINE * size * rstd), what)
        if "sum" in written and self.residual is not None:
            exact = (x.float() + self.residual.float()).to(written["sum"].dtype)
            assert torch.equal(written["sum"], exact), "the sum is not that of x and residual, rounded once"
        if "out" in written:
            check_close(written["out"], r, expected.error, "the result")
        if "absmax" in written:
            largest = magnitude(written["out"]).float().view(1)
            assert torch.equal(written["absmax"], largest), "absmax_out is not the largest of out"
        if "bits" in written:
            check_bits(written["bits"], expected.z, expected.error)
        if "q" in written:
            by_row = variant.x_granularity is Granularity.PER_ROW
            most = r.abs().amax(1) if by_row else r.abs().max()
            if self.residual is not None and of_batch:
                most = magnitude(expected.affine) + magnitude(self.residual).double()
            scale = written["scale"].view(-1, 1)
            check_copy(written["q"], scale, r, expected.error, most, variant.rounding, "the copy of the result")
        if "x_q" in written:
            scale = written["x_scale"][None] if of_batch else written["x_scale"][:, None]
            most, error = expected.xhat.abs().amax(0 if of_batch else 1), expected.xhat_error
            check_copy(written["x_q"], scale, expected.xhat, error, most, variant.rounding, "the copy of what is kept")
        if "factor_q" in written:
            factor, scale = given(self.factor).double(), written["factor_scale"][:, None]
            what, exact = "the copy of what is multiplied with", torch.zeros_like(factor)
            check_copy(written["factor_q"], scale, factor, exact, factor.abs().amax(1), variant.rounding, what)

    def backward(self, seed: int = 50) -> Backward:
        """A backward call from what a forward kernel would have kept, made here: x or its 8-bit copy, statistics, random bits.

        Its gradient has a mean: one that has none hides what is not subtracted.
        """
        x, of_batch = self.x, self.name == BATCH_NORM
        if self.name in ROW_NORMS and self.residual is not None:
            x = x + self.residual
        dim = 0 if of_batch else 1
        var, mean = torch.var_mean(x.double(), dim, correction=0) if x.numel() else (x.double().sum(dim), x.double().sum(dim))
        if self.name == RMS_NORM:
            var, mean = var + mean.square(), mean * 0
        spread, mean = (var if of_batch else (var + EPS).rsqrt()).float(), mean.float()
        grad = (floats(tuple(x.shape), torch.float32, x.device, seed) + 0.5).to(TORCH_DTYPE[self.variant.grad_input])
        bits = packed(floats(tuple(x.shape), torch.float32, x.device, 77) > 0) if self.wants_bits else None
        call = Backward(
            name=self.name, chain=self.chain, variant=self.variant, images=self.images, weight=self.weight, bias=self.bias,
            grad=grad, kept=x, kept_scale=None, mean=mean, spread=spread, bits=bits,
            factor=self.factor,
        )  # fmt: skip
        if self.chain.copy_again:
            r = self.expected().r
            most = r.abs().amax(1) if self.variant.x_granularity is Granularity.PER_ROW else magnitude(r).view(1)
            call = call.changed(r_scale=torch.where(most == 0, 1.0, most / LARGEST[self.variant.compute]).float())
        if not self.variant.saved.needs_scale:
            return call
        q, scale = _kept(call.normalized()[0], dim, TORCH_DTYPE[self.variant.saved])
        call = call.changed(kept=q, kept_scale=scale)
        if self.factor is None:
            return call
        q, scale = _kept(self.factor.double(), dim, TORCH_DTYPE[self.variant.saved])
        return call.changed(factor=q, factor_scale=scale)

    def run_backward(
        self, kernel: Kernel, outputs: Outputs, grad: torch.Tensor, kept: torch.Tensor, kept_scale: torch.Tensor | None,
        mean: torch.Tensor | None, spread: torch.Tensor | None, bits: torch.Tensor | None,
        factor_q: torch.Tensor | None = None, factor_scale: torch.Tensor | None = None,
    ) -> Written:  # fmt: skip
        """Call a backward kernel on what a forward kernel wrote."""
        call = Backward(
            name=self.name, chain=self.chain, variant=self.variant, images=self.images, weight=self.weight, bias=self.bias,
            grad=grad, kept=kept, kept_scale=kept_scale, mean=mean, spread=spread, bits=bits,
            factor=self.factor if factor_q is None else factor_q, factor_scale=factor_scale,
        )  # fmt: skip
        return call.run(kernel, outputs)


@attrs.frozen(eq=False, kw_only=True)
class Backward(_OfProducer):
    """One backward call.

    Attributes:
        grad: of the result; other: its second part, of a chain that takes two.
        kept: x or its 8-bit copy; kept_scale: of that; bits: where ReLU was open, where they are wanted.
        mean, spread: the variance of a batch norm's channels and σ⁻¹ of a layer norm's rows (1 / root mean square, without a mean).
        factor, factor_scale: what a gated unit multiplies with, and the scales of its 8-bit copy.
        r_scale: of the result's copy, which is written again.
        multiplier: of the gradient's copy, or of its maxima, for each column; factor_multiplier: of those of the second gradient.
        wanted: names of the gradients that are.
    """

    grad: torch.Tensor
    kept: torch.Tensor
    kept_scale: torch.Tensor | None
    mean: torch.Tensor | None
    spread: torch.Tensor | None
    bits: torch.Tensor | None
    factor: torch.Tensor | None = None
    factor_scale: torch.Tensor | None = None
    r_scale: torch.Tensor | None = None
    other: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    factor_multiplier: torch.Tensor | None = None
    seed: int = 21
    offset: Any = 22
    wanted: tuple[str, ...] = ("x", "residual", "factor", "weight", "bias")

    @property
    def asked(self) -> Asked:
        """The producer's, with a second part of the gradient or a copy where the chain has them."""
        copied, op = self.chain.grad_copy, f"{self.name}.grad_input"
        again = self.chain.copy_again
        copy = " multiplier q> scale> seed offset" if copied else " r_scale q> seed offset" if again else ""
        if self.chain.grad_maxima:
            copy += " multiplier= maxima>= factor_multiplier= factor_maxima>="
        return Asked(
            op,
            f"grad {'other ' if self.chain.grad_sum else ''}{SIGNATURES[op]}{copy}",
            (self.shape_of(self.grad),),
            {"chain": self.chain},
            {"seed": ("q",), "offset": ("q",)} if copied or again else {},
            () if self.name == BATCH_NORM else ("grad", "kept", "factor"),
        )

    def allocate(self, outputs: Outputs) -> Written:
        """All gradients that exist and are wanted, and the copy."""
        shape, columns = tuple(self.grad.shape), self.grad.shape[1]
        exist = {
            "x": True,
            "residual": self.name == BATCH_NORM and self.chain.residual,
            "factor": self.name == GLU,
            "weight": self.weight is not None,
            "bias": self.bias is not None,
        }
        written = Written()
        for name in self.wanted:
            if exist[name]:
                is_matrix = name in ("x", "residual", "factor")
                written[name] = outputs.empty(shape if is_matrix else (columns,), self.grad.dtype if is_matrix else torch.float32)
        if self.chain.grad_copy:
            written |= {"q": outputs.empty(shape, torch.int8), "scale": outputs.empty((1,), torch.float32)}
        if self.chain.copy_again:
            written["q"] = outputs.empty(shape, TORCH_DTYPE[self.variant.compute])
        if self.chain.grad_maxima:
            for name in ("maxima", "factor_maxima"):
                written[name] = outputs.empty((2, PARTIAL_MAXIMA), torch.float32)
        return written

    def normalized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What backward normalizes x to (of an activation: x), and what float32 may be off by."""
        of_batch, kept = self.name == BATCH_NORM, self.kept.double()
        if self.kept_scale is not None:
            xhat = kept * self.kept_scale.double().unsqueeze(0 if of_batch else 1)
            return xhat, FINE * xhat.abs()
        if self.name not in NORMS:
            return kept, torch.zeros_like(kept)
        mean, rstd = given(self.mean).double().unsqueeze(0 if of_batch else 1), self.rstd
        xhat = (kept - mean) * rstd
        return xhat, FINE * ((kept.abs() + mean.abs()) * rstd + xhat.abs())

    @property
    def rstd(self) -> torch.Tensor:
        """σ⁻¹ of each channel or row in float64."""
        spread = given(self.spread).double()
        return (spread + EPS).rsqrt()[None] if self.name == BATCH_NORM else spread[:, None]

    def compare(self, written: Written) -> None:
        """All gradients, by the formulas of docs/design/fused-chains.md in float64."""
        g = (self.grad if self.other is None else self.grad + self.other).double()
        (xhat, xhat_error), of_batch = self.normalized(), self.name == BATCH_NORM
        if self.name not in NORMS:
            x = xhat.clone().requires_grad_()
            with torch.enable_grad():
                r = _FUNCTIONS[self.chain.activation](x)
                (derivative,) = torch.autograd.grad(r.sum(), x)
            factor = torch.ones_like(g) if self.factor is None else self.factor.double()
            factor = factor if self.factor_scale is None else factor * self.factor_scale.double()[:, None]
            slack = 8 * FINE * (1 + xhat.abs()) * g.abs()
            if "x" in written:
                check_close(written["x"], derivative * factor * g, slack * factor.abs(), "the gradient of x")
            if "q" in written and self.r_scale is not None and g.numel():
                largest = self.r_scale.double().view(-1, 1) * LARGEST[self.variant.compute]
                value, error = r.detach() * factor, FINE * (1 + xhat.abs()) * factor.abs()
                clipped, what = torch.minimum(torch.maximum(value, -largest), largest), "the copy that is written again"
                scale, most = self.r_scale.view(-1, 1), largest.view(-1)
                check_copy(written["q"], scale, clipped, error, most, self.variant.rounding, what)
            if "factor" in written:
                check_close(written["factor"], r.detach() * g, slack, "the gradient of what is multiplied with")
            for name, its_multiplier in (("x", self.multiplier), ("factor", self.factor_multiplier)):
                maxima = written.get("maxima" if name == "x" else "factor_maxima")
                if maxima is not None:
                    check_maxima(maxima, written[name], its_multiplier, f"the gradient of {name}")
            return
        is_open, unsure = torch.ones_like(g, dtype=torch.bool), torch.zeros_like(g)
        if self.bits is not None:
            is_open = unpacked(self.bits)[:, : g.shape[1]]
        elif of_batch and self.chain.activation is Activation.RELU:
            _, z, error = with_parameters(self, xhat, xhat_error, 0.0)
            is_open, unsure = z > 0, torch.where(z.abs() > 4 * error, 0.0, g.abs())  # where float32's errors decide
        dim, weight = (0 if of_batch else 1), g.new_ones(g.shape[1]) if self.weight is None else self.weight.double()
        h = torch.where(is_open, g, 0.0)
        terms = 8 * FINE * h.abs() + unsure
        factor, of_terms = (self.rstd * weight, h) if of_batch else (self.rstd, h * weight)
        sizes, count = terms if of_batch else terms * weight.abs(), max(h.shape[dim], 1)

        def formula(inner: torch.Tensor, factor: torch.Tensor, xhat: torch.Tensor, sign: float) -> torch.Tensor:
            means = xhat * (inner * xhat).sum(dim, keepdim=True)
            if self.name != RMS_NORM:
                means = means + inner.sum(dim, keepdim=True)
            return (inner + sign * means / count) * factor

        expected = {
            "x": (formula(of_terms, factor, xhat, -1.0), formula(sizes, factor.abs(), xhat.abs(), 1.0)),
            "residual": (h, unsure),
            "weight": ((h * xhat).sum(0), (terms * xhat.abs()).sum(0)),
            "bias": (h.sum(0), terms.sum(0)),
        }
        for name, (value, error) in expected.items():
            if name in written:
                check_close(written[name], value, error, f"the gradient of {name}")
        if "q" in written and not g.numel():
            assert written["scale"].item() == 1, "the scale of nothing is 1"
        elif "q" in written:
            times = g.new_ones(g.shape[1]) if self.multiplier is None else self.multiplier.double()
            means = h.mean(0).abs(), (h * xhat).mean(0).abs()
            known = h.abs().amax(0) + means[0] + xhat.abs().amax(0) * means[1]
            most = (known * (factor * times).abs()).max()
            value, error = (part * times for part in expected["x"])
            scale, what = written["scale"].view(1, 1), "the copy of the gradient"
            check_copy(written["q"], scale, value, error, most, self.variant.rounding, what)


def with_parameters(
    call: _OfProducer, xhat: torch.Tensor, xhat_error: torch.Tensor, added: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x̂ times weight plus bias, what comes before the activation, and what float32 may be off by in that."""
    weight = xhat.new_ones(xhat.shape[1]) if call.weight is None else call.weight.double()
    bias = xhat.new_zeros(xhat.shape[1]) if call.bias is None else call.bias.double()
    affine = xhat * weight + bias
    z = affine + added
    return affine, z, xhat_error * weight.abs() + FINE * (affine.abs() + bias.abs() + z.abs())


def _kept(x: torch.Tensor, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An 8-bit copy of numbers in float64, with a scale for each row (dim 1) or column."""
    most = x.abs().amax(dim) if x.numel() else x.sum(dim)
    scale = torch.where(most == 0, 1.0, most / 127).float()
    return (x / scale.double().unsqueeze(dim)).round().clamp(-127, 127).to(dtype), scale


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

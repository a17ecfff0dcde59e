"""Producers, backward: gradients of x, residual, weight and bias, from what was kept in float or in 8 bit."""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.checks import FLOATS
from qsync_torch.conformance.operands import LAYOUTS, Outputs, floats, laid_out
from qsync_torch.conformance.producer_checks import check_close, check_copy, packed
from qsync_torch.conformance.producers import (
    ACTIVATION,
    BATCH_NORM,
    EPS,
    FORMS,
    LAYER_NORM,
    GradCopy,
    Gradients,
    Producer,
    given,
    variant_of,
)  # fmt: skip
from qsync_torch.conformance.subject import Subject
from qsync_torch.dtypes import TORCH_DTYPE

INT8, FLOAT32 = Precision.INT8, Precision.FLOAT32
SHAPES = [(1, 1), (1, 9), (6, 1), (30, 13), (56, 64), (84, 200), (1050, 24)]


@attrs.frozen(eq=False)
class Kept:
    """What a forward kernel would have kept, made here: x or its 8-bit copy, statistics, and what x is normalized to."""

    x: torch.Tensor
    scale: torch.Tensor | None
    mean: torch.Tensor
    spread: torch.Tensor
    xhat: torch.Tensor

    @classmethod
    def of(cls, problem: Producer) -> Kept:
        """Make what is kept for a problem; its residual, where it has one, is part of the kept sum of a layer norm."""
        x, dim = problem.x, 0 if problem.name == BATCH_NORM else 1
        if problem.name == LAYER_NORM and problem.residual is not None:
            x = x + problem.residual
        var, mean = torch.var_mean(x.double(), dim, correction=0) if x.numel() else (x.double().sum(dim), x.double().sum(dim))
        spread = (var if problem.name == BATCH_NORM else (var + EPS).rsqrt()).float()
        rstd = (spread.double() + EPS).rsqrt() if problem.name == BATCH_NORM else spread.double()
        mean = mean.float()
        xhat = x.double()
        if problem.name != ACTIVATION:
            xhat = (xhat - mean.double().unsqueeze(dim)) * rstd.unsqueeze(dim)
        if not problem.variant.saved.needs_scale:
            return cls(x, None, mean, spread, xhat)
        most = xhat.abs().amax(dim if problem.name != ACTIVATION else 1) if x.numel() else mean.double()
        scale = torch.where(most == 0, 1.0, most / 127).float()
        columns = scale.double()[None] if problem.name == BATCH_NORM else scale.double()[:, None]
        q = (xhat / columns).round().clamp(-127, 127)
        return cls(q.to(TORCH_DTYPE[problem.variant.saved]), scale, mean, spread, q * columns)


def check(subject: Subject, outputs: Outputs, problem: Producer, grad: torch.Tensor, kept: Kept | None = None) -> list[Gradients]:
    """Run every configuration's kernel and check all that it writes."""
    kept = kept or Kept.of(problem)
    is_relu, is_open, bits = "relu" in str(problem.chain.activation), torch.ones_like(grad, dtype=torch.bool), None
    if is_relu and problem.name == BATCH_NORM and problem.wants_bits:
        is_open = floats(tuple(grad.shape), FLOAT, grad.device, 77) > 0
        bits = packed(is_open)
    elif is_relu and problem.name == BATCH_NORM:
        expected = problem.expected()
        is_open = expected.z > 0
        grad = torch.where(expected.z.abs() > 4 * expected.error, grad, 0.0)  # elsewhere float32's errors decide
    wanted, errors = problem.expected_gradients(grad, kept.xhat, kept.spread, is_open)
    found = []
    for kernel in problem.kernels(subject, "grad_input"):
        written = problem.run_backward(kernel, outputs, grad, kept.x, kept.scale, kept.mean, kept.spread, bits)
        for name, value in attrs.asdict(written, recurse=False).items():
            if value is not None:
                check_close(value, getattr(wanted, name), getattr(errors, name), f"the gradient of {name}")
        found.append(written)
    return found


FLOAT = torch.float32


def gradient(problem: Producer, seed: int = 50) -> torch.Tensor:
    """Draw a gradient of the result, with a mean: one that has none hides what is not subtracted."""
    x = problem.x
    return (floats(tuple(x.shape), FLOAT, x.device, seed) + 0.5).to(TORCH_DTYPE[problem.variant.grad_input])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(subject: Subject, outputs: Outputs, form: str, saved: Precision, dtype: Precision) -> None:
    """All gradients are right at once, compared with float64."""
    kept = saved if saved.needs_scale else dtype
    problem = Producer.of(form, variant_of(saved=kept, output=dtype), (56, 40), subject.device)
    check(subject, outputs, problem, gradient(problem))


@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", FORMS)
def test_shapes_of_every_kind(subject: Subject, outputs: Outputs, form: str, saved: Precision) -> None:
    """Gradients are right for shapes of every kind, also where sums go over more positions than a program takes."""
    for shape in SHAPES:
        problem = Producer.of(form, variant_of(saved=saved), shape, subject.device, shape[1])
        check(subject, outputs, problem, gradient(problem))


@pytest.mark.parametrize("multiplied", [True, False], ids=["times a multiplier", "as it is"])
@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name == BATCH_NORM])
def test_the_copy_of_a_gradient(subject: Subject, outputs: Outputs, form: str, saved: Precision, multiplied: bool) -> None:
    """Nothing clipped, its scale no larger than what is known ahead allows, rounded once, by numbers of its offset."""
    chain = FORMS[form][1]
    for rows, columns in ((56, 40), (1050, 24), (30, 13), (0, 16)):
        problem = Producer.of(form, variant_of(saved=saved), (rows, columns), subject.device, 30)
        problem = attrs.evolve(problem, chain=attrs.evolve(chain, grad_copy=True))
        grad, kept = gradient(problem), Kept.of(problem)
        is_relu, is_open, bits = "relu" in form, torch.ones_like(grad, dtype=torch.bool), None
        if is_relu and problem.wants_bits:
            is_open = floats(tuple(grad.shape), FLOAT, grad.device, 77) > 0
            bits = packed(is_open)
        elif is_relu:
            expected = problem.expected()
            is_open = expected.z > 0
            grad = torch.where(expected.z.abs() > 4 * expected.error, grad, 0.0)
        wanted, errors = problem.expected_gradients(grad, kept.xhat, kept.spread, is_open)
        multiplier = floats((columns,), FLOAT, grad.device, 31).abs() + 0.1 if multiplied else None
        factor = torch.ones(columns, device=grad.device).double() if multiplier is None else multiplier.double()
        h = torch.where(is_open, grad.double(), 0.0)
        of_channel = ((kept.spread.double() + EPS).rsqrt() * given(problem.weight).double() * factor).abs()
        for kernel in problem.kernels(subject, "grad_input"):
            copy = GradCopy(multiplier, outputs.empty((rows, columns), torch.int8), outputs.empty((1,), FLOAT))
            found = problem.run_backward(kernel, outputs, grad, kept.x, kept.scale, kept.mean, kept.spread, bits, copy)
            if not rows:
                assert copy.scale.item() == 1, "the scale of nothing is 1"
                continue
            check_close(given(found.x), given(wanted.x), given(errors.x), "the gradient of x beside its copy")
            exact, error = given(wanted.x) * factor, given(errors.x) * factor
            means = (h.mean(0).abs(), (h * kept.xhat).mean(0).abs())
            most = ((h.abs().amax(0) + means[0] + kept.xhat.abs().amax(0) * means[1]) * of_channel).max()
            check_copy(copy.q, copy.scale.view(1, 1), exact, error, most, problem.variant.rounding, "the copy of the gradient")
            for offset, is_same in ((22, True), (23, False)):
                again = attrs.evolve(copy, q=outputs.empty((rows, columns), torch.int8), scale=outputs.empty((1,), FLOAT))
                problem.run_backward(kernel, outputs, grad, kept.x, kept.scale, kept.mean, kept.spread, bits, again, offset=offset)
                assert torch.equal(again.q, copy.q) is is_same, f"the numbers of offset {offset} beside those of offset 22"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name == BATCH_NORM])
def test_a_gradient_in_two_parts(subject: Subject, outputs: Outputs, form: str, saved: Precision, dtype: Precision) -> None:
    """Two parts of a gradient give, to the bit, what their sum gives, rounded to the format of both; the copy is the same too."""
    for rows, columns in ((56, 40), (1050, 24), (30, 13), (0, 16)):
        variant = variant_of(saved=saved if saved.needs_scale else dtype, output=dtype)
        whole = Producer.of(form, variant, (rows, columns), subject.device, 40)
        kept, grad, other = Kept.of(whole), gradient(whole), gradient(whole, 51)
        bits = packed(floats((rows, columns), FLOAT, grad.device, 77) > 0) if "relu" in form and whole.wants_bits else None
        for grad_copy in (False, True):
            chain = attrs.evolve(whole.chain, grad_copy=grad_copy)
            problems = [attrs.evolve(whole, chain=attrs.evolve(chain, grad_sum=grad_sum)) for grad_sum in (False, True)]
            plain, summing = (problem.kernels(subject, "grad_input") for problem in problems)
            for of_whole, of_parts in zip(plain, summing, strict=True):
                copies = [
                    GradCopy(None, outputs.empty((rows, columns), torch.int8), outputs.empty((1,), FLOAT)) if grad_copy else None
                    for _ in problems
                ]
                operands = (kept.x, kept.scale, kept.mean, kept.spread, bits)
                expected = problems[0].run_backward(of_whole, outputs, grad + other, *operands, copies[0])
                found = problems[1].run_backward(of_parts, outputs, grad, *operands, copies[1], other=other)
                for name, value in attrs.asdict(expected, recurse=False).items():
                    assert value is None or torch.equal(getattr(found, name), value), f"the gradient of {name} from two parts"
                if copies[0] is not None and copies[1] is not None:
                    assert torch.equal(copies[1].q, copies[0].q), "the copy of the gradient from two parts"


@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name != ACTIVATION])
@pytest.mark.parametrize("missing", ["weight", "bias", "weight and bias"])
def test_normalization_without_parameters(subject: Subject, outputs: Outputs, form: str, missing: str) -> None:
    """Their gradients do not exist either."""
    problem = Producer.of(form, variant_of(), (35, 17), subject.device, 8)
    weight, bias = (None if name in missing else vector for name, vector in (("weight", problem.weight), ("bias", problem.bias)))
    problem = attrs.evolve(problem, weight=weight, bias=bias)
    check(subject, outputs, problem, gradient(problem))


@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name != ACTIVATION])
def test_equal_numbers_and_large_means(subject: Subject, outputs: Outputs, form: str) -> None:
    """Gradients are right where there is no variance: σ⁻¹ is 1/sqrt(eps), and x̂ is 0."""
    problem = Producer.of(form, variant_of(), (28, 16), subject.device, 10)
    equal = attrs.evolve(problem, x=torch.full_like(problem.x, 3.0))
    if problem.residual is not None and problem.name == LAYER_NORM:
        equal = attrs.evolve(equal, residual=torch.zeros_like(problem.x))
    check(subject, outputs, equal, gradient(equal))


@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch_leaves_gradients_of_zeros(subject: Subject, outputs: Outputs, form: str, saved: Precision) -> None:
    """The gradients of weight and bias are zeros: what a rank without samples contributes."""
    problem = Producer.of(form, variant_of(saved=saved), (0, 16), subject.device)
    for written in check(subject, outputs, problem, gradient(problem)):
        for vector in (written.weight, written.bias):
            assert vector is None or not vector.any(), "the gradient of a parameter is not 0 without positions"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["add+layer_norm", "gelu"])
def test_matrices_of_any_strides(subject: Subject, outputs: Outputs, form: str, layout: str) -> None:
    """Matrices may have any strides, as operands of products may."""
    problem = Producer.of(form, variant_of(), (24, 21), subject.device, 12)
    kept = Kept.of(problem)
    check(subject, outputs, problem, laid_out(gradient(problem), layout), attrs.evolve(kept, x=laid_out(kept.x, layout)))


def test_a_residual_that_needs_no_gradient(subject: Subject, outputs: Outputs) -> None:
    """None is an output that is not wanted."""
    problem = Producer.of("batch_norm+add", variant_of(), (28, 16), subject.device, 13)
    grad, kept = gradient(problem), Kept.of(problem)
    whole = check(subject, outputs, problem, grad, kept)
    for written, kernel in zip(whole, problem.kernels(subject, "grad_input"), strict=True):
        x = outputs.empty(tuple(grad.shape), grad.dtype)
        kernel(
            problem.image(grad), problem.image(kept.x), None, kept.mean, kept.spread, problem.weight, problem.bias, EPS, None,
            problem.image(x), None, None, None,
        )  # fmt: skip
        assert torch.equal(x, given(written.x)), "the gradient of x depends on which others are wanted"


def test_backward_follows_its_own_forward(subject: Subject, outputs: Outputs) -> None:
    """z is worked out again where no bits were kept, from statistics that the forward kernel wrote."""
    subject.skip_unless_offered(Op.BATCH_NORM_OUTPUT)
    problem = Producer.of("batch_norm+relu", variant_of(), (84, 24), subject.device, 14)
    forwards, backwards = problem.kernels(subject), problem.kernels(subject, "grad_input")
    for forward, backward in zip(forwards, backwards, strict=False):
        written = problem.run(forward, outputs)
        ones = torch.ones_like(problem.x)
        mean, var = given(written.mean), given(written.spread)
        found = problem.run_backward(backward, outputs, ones, problem.x, None, mean, var, None)
        opened = (given(written.out) > 0).sum(0).float()
        assert torch.equal(given(found.bias), opened), "backward opens ReLU where forward did not, or the other way round"


@pytest.mark.parametrize("draw", range(24))
def test_random_gradients(subject: Subject, outputs: Outputs, draw: int) -> None:
    """Shapes of no particular kind, in every combination of chains and formats."""
    choose = random.Random(draw)
    form, dtype = choose.choice(list(FORMS)), choose.choice(FLOATS)
    shape = (choose.choice((1, 2, 5, 12, 60, 210)), choose.choice((1, 3, 8, 17, 64, 100)))
    saved = INT8 if choose.random() < 0.5 and form != "relu" else dtype
    variant = variant_of(saved=saved, output=dtype, granularity=Granularity.PER_TENSOR, rounding=choose.choice(list(Rounding)))
    mean, deviation = choose.choice((0.0, 4.0)), choose.choice((1.0, 0.1, 30.0))
    problem = Producer.of(form, variant, shape, subject.device, draw, mean=mean, deviation=deviation)
    check(subject, outputs, problem, gradient(problem, draw))

"""Producers, forward: results, copies with their scales and streams, what is kept for backward, and numbers that have no copy."""

from __future__ import annotations

import functools
import random

import attrs
import pytest
import torch

from qsync_core.errors import NumericsError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import Op
from qsync_torch.aten.random_bits import Offset, checksum
from qsync_torch.conformance.checks import FLOATS
from qsync_torch.conformance.operands import LAYOUTS, Outputs, between_others, laid_out
from qsync_torch.conformance.producer_checks import check_forward
from qsync_torch.conformance.producers import ACTIVATION, BATCH_NORM, FORMS, Producer, Written, given, variant_of
from qsync_torch.conformance.subject import Kernel, Subject

INT8, FLOAT8, FLOAT32 = Precision.INT8, Precision.FLOAT8_E4M3FN, Precision.FLOAT32
TENSOR, ROW = Granularity.PER_TENSOR, Granularity.PER_ROW
NEAREST, STOCHASTIC = Rounding.NEAREST, Rounding.STOCHASTIC
BY_ROW = [form for form, (name, _) in FORMS.items() if name != BATCH_NORM]
ON_IMAGES = [form for form, (name, _) in FORMS.items() if name == BATCH_NORM]
SHAPES = [(1, 1), (1, 9), (6, 1), (30, 13), (56, 64), (84, 200), (420, 24)]


def check(subject: Subject, outputs: Outputs, problem: Producer) -> list[Written]:
    """Run every configuration's kernel and check all that it writes."""
    found = [problem.run(kernel, outputs) for kernel in problem.kernels(subject)]
    for written in found:
        check_forward(problem, written)
    return found


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", FORMS)
def test_result_copies_and_statistics(subject: Subject, outputs: Outputs, form: str, saved: Precision, output: Precision) -> None:
    """All outputs at once, each against float64; copies are of the float32 result, before it is rounded to the output's format."""
    kept = saved if saved.needs_scale else output
    check(subject, outputs, Producer.of(form, variant_of(saved=kept, output=output, rounding=NEAREST), (56, 40), subject.device))


@pytest.mark.parametrize("form", FORMS)
def test_shapes_of_every_kind(subject: Subject, outputs: Outputs, form: str) -> None:
    """Results are right for one position, one channel, no multiple of 8 channels, more positions than a program takes."""
    for shape in SHAPES:
        check(subject, outputs, Producer.of(form, variant_of(), shape, subject.device, shape[1]))


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("granularity", [TENSOR, ROW])
@pytest.mark.parametrize("form", BY_ROW)
def test_scales_of_rows(subject: Subject, outputs: Outputs, form: str, granularity: Granularity, rounding: Rounding) -> None:
    """Each row has the scale of its own largest magnitude, or all have one."""
    problem = Producer.of(form, variant_of(granularity=granularity, rounding=rounding), (24, 56), subject.device, 3)
    factors = torch.logspace(-3, 3, 24, device=subject.device)[:, None]
    check(subject, outputs, attrs.evolve(problem, x=problem.x * factors))


@pytest.mark.parametrize("form", FORMS)
def test_float8_copies(subject: Subject, outputs: Outputs, form: str) -> None:
    """Copies in float8 are right where a backend offers them."""
    check(subject, outputs, Producer.of(form, variant_of(FLOAT8), (42, 24), subject.device, 5))


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_without_a_copy(subject: Subject, outputs: Outputs, form: str, output: Precision) -> None:
    """A chain in a float format is fused too."""
    check(subject, outputs, Producer.of(form, variant_of(output, saved=output, output=output), (42, 24), subject.device, 6))


@pytest.mark.parametrize("form", FORMS)
def test_without_a_float_result(subject: Subject, outputs: Outputs, form: str) -> None:
    """The copy is bit for bit what it is beside a float result."""
    problem = Producer.of(form, variant_of(), (42, 40), subject.device, 7)
    alone = attrs.evolve(problem, chain=attrs.evolve(problem.chain, float_result=False))
    for beside, found in zip(check(subject, outputs, problem), check(subject, outputs, alone), strict=True):
        assert torch.equal(given(found.q), given(beside.q)), "the copy depends on whether a float result is written"


@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name != ACTIVATION])
@pytest.mark.parametrize("missing", ["weight", "bias", "weight and bias"])
def test_normalization_without_parameters(subject: Subject, outputs: Outputs, form: str, missing: str) -> None:
    """``affine=False``, or a layer norm without a bias."""
    problem = Producer.of(form, variant_of(), (35, 17), subject.device, 8)
    weight, bias = (None if name in missing else vector for name, vector in (("weight", problem.weight), ("bias", problem.bias)))
    check(subject, outputs, attrs.evolve(problem, weight=weight, bias=bias))


@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name != ACTIVATION])
def test_large_means_beside_small_deviations(subject: Subject, outputs: Outputs, form: str) -> None:
    """The variance is that of differences from the mean: a mean of squares minus a squared mean has no digit left here."""
    problem = Producer.of(form, variant_of(saved=INT8), (70, 24), subject.device, 9, mean=3000.0, deviation=0.5)
    if problem.name != BATCH_NORM and problem.residual is not None:
        problem = attrs.evolve(problem, residual=problem.residual * 0.5)
    check(subject, outputs, problem)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_overflows_on_the_way(subject: Subject, outputs: Outputs, form: str) -> None:
    """float16 ends at 65,504, and so do squares of 256; arithmetic between reading and writing is wider."""
    problem = Producer.of(form, variant_of(output=Precision.FLOAT16, saved=Precision.FLOAT16), (28, 40), subject.device, 19)
    check(subject, outputs, attrs.evolve(problem, x=(problem.x.float() * 8000).clamp(-6e4, 6e4).half()))


@pytest.mark.parametrize("form", FORMS)
def test_equal_numbers(subject: Subject, outputs: Outputs, form: str) -> None:
    """A channel or a row without variance is 0 after normalization, and zeros have the scale 1."""
    problem = Producer.of(form, variant_of(saved=INT8 if form != "relu" else FLOAT32), (28, 16), subject.device, 10)
    x, bias = torch.full_like(problem.x, 3.0), None if problem.bias is None else torch.zeros_like(problem.bias)
    residual = None if problem.residual is None else torch.zeros_like(problem.residual)
    check(subject, outputs, attrs.evolve(problem, x=x, bias=bias, residual=residual))
    if problem.name == BATCH_NORM:  # some channels only
        x = problem.x.clone()
        x[:, ::3] = -7.0
        check(subject, outputs, attrs.evolve(problem, x=x))


@pytest.mark.parametrize("form", FORMS)
def test_results_of_one_sign(subject: Subject, outputs: Outputs, form: str) -> None:
    """The largest magnitude is that of the smallest number, or of the largest, and behind a ReLU never of a negative one."""
    for sign in (1.0, -1.0):
        problem = Producer.of(form, variant_of(rounding=NEAREST), (28, 16), subject.device, 11)
        bias = None if problem.bias is None else torch.full_like(problem.bias, 20.0 * sign)
        check(subject, outputs, attrs.evolve(problem, x=problem.x.abs() * sign, bias=bias))


@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", FORMS)
def test_empty_operands(subject: Subject, outputs: Outputs, form: str, saved: Precision) -> None:
    """A rank may get an empty batch: no error, and a batch norm's statistics are 0."""
    problem = Producer.of(form, variant_of(saved=saved), (0, 16), subject.device)
    for written in check(subject, outputs, problem):
        if problem.name == BATCH_NORM:
            assert not torch.cat([given(written.mean), given(written.spread)]).any(), "without positions, mean and variance are 0"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", BY_ROW)
def test_matrices_of_any_strides(subject: Subject, outputs: Outputs, form: str, layout: str) -> None:
    """Matrices may have any strides, as operands of products may."""
    problem = Producer.of(form, variant_of(), (24, 21), subject.device, 12)
    residual = None if problem.residual is None else laid_out(problem.residual, layout)
    check(subject, outputs, attrs.evolve(problem, x=laid_out(problem.x, layout), residual=residual))


@pytest.mark.parametrize("form", ["batch_norm+relu", "layer_norm"])
def test_parameters_may_be_strided(subject: Subject, outputs: Outputs, form: str) -> None:
    """A column of a larger parameter."""
    problem = Producer.of(form, variant_of(), (28, 24), subject.device, 13)
    strided = attrs.evolve(problem, weight=between_others(given(problem.weight)), bias=between_others(given(problem.bias)))
    check(subject, outputs, strided)


def errors_in_steps(problem: Producer, written: Written) -> tuple[torch.Tensor, torch.Tensor]:
    """What rounding added to the copy, in steps, and its variance: f(1 - f) with f the fraction."""
    y = given(written.out).double() / given(written.scale).double().view(-1, 1)
    fraction = y - y.floor()
    return given(written.q).double() - y, fraction * (1 - fraction)


@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_unbiased(subject: Subject, outputs: Outputs, form: str) -> None:
    """The errors of many numbers have the mean 0, within five standard errors, and their own variance."""
    problem = Producer.of(form, variant_of(), (420, 120), subject.device, 14)
    for kernel in problem.kernels(subject):
        error, variance = errors_in_steps(problem, problem.run(kernel, outputs))
        assert abs(error.sum().item()) <= 5 * variance.sum().sqrt().item(), "stochastic rounding is biased"
        ratio = error.square().sum().item() / variance.sum().item()
        assert 0.97 < ratio < 1.03, f"errors have {ratio:.3f} times the variance of stochastic rounding"


def of_equal_copies(form: str, subject: Subject) -> Producer:
    """Make a problem whose two copies, of the result and of what is kept, are of the same numbers under the same scales."""
    name, _ = FORMS[form]
    variant = variant_of(saved=INT8, granularity=TENSOR if name == BATCH_NORM else ROW)
    problem = Producer.of(form, variant, (2048, 1) if name == BATCH_NORM else (32, 64), subject.device, 15)
    if name == ACTIVATION:  # beyond 20, x is what GELU makes of it
        return attrs.evolve(problem, x=problem.x.abs() + 20)
    return attrs.evolve(problem, weight=None, bias=None)


def both_copies(
    problem: Producer, kernel: Kernel, outputs: Outputs, seed: int, x_seed: int, offset: Offset
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel and return its copies of the result and of what is kept."""
    written = problem.run(kernel, outputs, seed, x_seed, offset)
    return given(written.q), given(written.x_q)


@pytest.mark.parametrize("form", ["batch_norm", "layer_norm", "gelu"])
def test_streams_of_random_numbers(subject: Subject, outputs: Outputs, form: str) -> None:
    """``seed`` names the stream of the result's copy, ``x_seed`` that of what is kept, and ``offset`` counts for both."""
    problem = of_equal_copies(form, subject)
    for kernel in problem.kernels(subject):
        copies = functools.partial(both_copies, problem, kernel, outputs)
        first, kept = copies(1, 2, 3)
        assert all(map(torch.equal, copies(1, 2, 3), (first, kept))), "the same streams gave other bits"
        assert not torch.equal(first, kept), "both copies took their random numbers from one stream"
        assert all(map(torch.equal, copies(2, 1, 3), (kept, first))), "a copy did not take the numbers of its own stream"
        high, kept_high = copies(1 + (1 << 62), 2 + (1 << 62), 3)
        later, kept_later = copies(1, 2, 3 + (1 << 62))
        for name, found, same in (("seed", high, first), ("x_seed", kept_high, kept), ("offset", later, first)):
            assert not torch.equal(found, same), f"the high bits of {name} do not count"
        assert not torch.equal(kept_later, kept), "the offset does not count for what is kept"


@pytest.mark.parametrize("form", ["batch_norm", "layer_norm", "gelu"])
def test_an_offset_in_a_tensor_gives_the_bits_of_the_number(subject: Subject, outputs: Outputs, form: str) -> None:
    """``offset_tensors``: of both copies."""
    subject.skip_unless_offset_tensors()
    problem = of_equal_copies(form, subject)
    for kernel in problem.kernels(subject):
        for number in (2, 2 + (1 << 40), (1 << 63) - 1):
            tensor = torch.full((1,), number, dtype=torch.int64, device=subject.device)
            found, expected = (
                both_copies(problem, kernel, outputs, 1, 2, tensor),
                both_copies(problem, kernel, outputs, 1, 2, number),
            )
            assert all(map(torch.equal, found, expected)), f"the offset {number} gave other bits in a tensor"


@pytest.mark.parametrize("form", FORMS)
def test_copies_are_those_of_quantize(subject: Subject, outputs: Outputs, form: str) -> None:
    """Number i of the stream goes to element i in memory, as where the float32 result is quantized by itself under that stream."""
    problem = Producer.of(form, variant_of(), (70, 33), subject.device, 16)
    kernels = problem.kernels(subject)
    if problem.residual is not None and problem.name == BATCH_NORM:
        pytest.skip("its scale may be larger than that of quantize")
    shape = (tuple(problem.x.shape),)
    quantize = subject.kernels(Op.QUANTIZE, problem.variant, shape)[0]
    for kernel in kernels:
        written = problem.run(kernel, outputs, seed=21, offset=22)
        q, scale = outputs.empty(shape[0], torch.int8), outputs.empty((1,), torch.float32)
        out = given(written.out)
        of_out = 22 + (int(checksum(problem.x)) - int(checksum(out))) * (0x9E3779B9 << 32)
        quantize(out, q, scale, None, 21, (of_out + (1 << 63)) % (1 << 64) - (1 << 63))
        moved = (q != given(written.q)).float().mean().item()  # rounding errors of a quotient may decide now and then
        assert moved < 0.01, f"{moved:.1%} of the values are not those of quantize"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_have_no_copy_show(subject: Subject, outputs: Outputs, form: str, bad: float) -> None:
    """A CPU raises, a GPU writes a scale that is not finite."""
    problem = Producer.of(form, variant_of(), (28, 16), subject.device, 17)
    kernels = problem.kernels(subject)
    problem.x[3, 5] = bad
    for kernel in kernels:
        if subject.device.type == "cpu":
            with pytest.raises(NumericsError):
                problem.run(kernel, outputs)
        else:
            scale = given(problem.run(kernel, outputs).scale)
            assert not torch.isfinite(scale).all(), "the scale hides a number that is not finite"


@pytest.mark.parametrize("form", FORMS)
def test_producers_can_be_captured(subject: Subject, outputs: Outputs, form: str) -> None:
    """A captured call computes with new inputs: nothing synchronises, and nothing is read on the host."""
    if subject.device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    saved = FLOAT32 if form == "relu" else INT8
    problem = Producer.of(form, variant_of(saved=saved, rounding=NEAREST), (56, 40), subject.device, 18)
    for kernel in problem.kernels(subject, bare=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            problem.run(kernel, outputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            written = problem.run(kernel, outputs)
        problem.x.mul_(1.5).add_(0.25)
        graph.replay()
        torch.cuda.synchronize()
        check_forward(problem, written)


@pytest.mark.parametrize("draw", range(24))
def test_random_producers(subject: Subject, outputs: Outputs, draw: int) -> None:
    """Shapes of no particular kind, in every combination of chains, formats and roundings."""
    choose = random.Random(draw)
    form, output = choose.choice(list(FORMS)), choose.choice(FLOATS)
    shape = (choose.choice((1, 2, 5, 12, 60, 210)), choose.choice((1, 3, 8, 17, 64, 100)))
    granularity = ROW if form in BY_ROW and choose.random() < 0.5 else TENSOR
    saved = INT8 if choose.random() < 0.5 and form != "relu" else output
    variant = variant_of(saved=saved, output=output, granularity=granularity, rounding=choose.choice(list(Rounding)))
    mean, deviation = choose.choice((0.0, 4.0)), choose.choice((1.0, 1e-3, 30.0))
    problem = Producer.of(form, variant, shape, subject.device, draw, mean=mean, deviation=deviation)
    check(subject, outputs, problem)

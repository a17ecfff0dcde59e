"""Producers: what only they promise, beyond the checks of every operator."""

from __future__ import annotations

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import Op
from qsync_torch.aten.random_bits import checksum
from qsync_torch.conformance.operands import Outputs
from qsync_torch.conformance.producer_entries import COPIED, KEPT, copying_call
from qsync_torch.conformance.producers import BATCH_NORM, FORMS, Producer, variant_of
from qsync_torch.conformance.products import FLOATS
from qsync_torch.conformance.quantization import check_unbiased
from qsync_torch.conformance.subject import Subject

ON_IMAGES = [form for form, (name, _) in FORMS.items() if name == BATCH_NORM]


@pytest.mark.parametrize("form", FORMS)
def test_without_a_float_result(subject: Subject, outputs: Outputs, form: str) -> None:
    """The copy is bit for bit what it is beside a float result."""
    problem = Producer.of(form, variant_of(), (42, 40), subject.device, 7)
    alone = problem.changed(chain=attrs.evolve(problem.chain, float_result=False))
    for beside, found in zip(problem.put_to(subject, outputs), alone.put_to(subject, outputs), strict=True):
        assert torch.equal(found["q"], beside["q"]), "the copy depends on whether a float result is written"


@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_unbiased(subject: Subject, outputs: Outputs, form: str) -> None:
    """Errors of the copy's many numbers."""
    problem = Producer.of(form, variant_of(), (420, 120), subject.device, 14)
    for kernel in problem.kernels(subject):
        written = problem.run(kernel, outputs)
        check_unbiased(written["q"], written["out"].double() / written["scale"].double())


@pytest.mark.parametrize("form", ["batch_norm", "layer_norm", "gelu"])
def test_each_copy_has_its_own_seed(subject: Subject, outputs: Outputs, form: str) -> None:
    """``seed`` names the stream of the result's copy, ``x_seed`` that of what is kept: equal numbers change places with them."""
    of_batch = form == "batch_norm"
    variant = variant_of(saved=Precision.INT8, granularity=Granularity.PER_TENSOR if of_batch else Granularity.PER_ROW)
    problem = Producer.of(form, variant, (2048, 1) if of_batch else (32, 64), subject.device, 15)
    x = problem.x.abs() + 20 if form == "gelu" else problem.x  # beyond 20, x is what GELU makes of it
    problem = problem.changed(x=x, weight=None, bias=None)
    for kernel in problem.kernels(subject):
        one, other = (problem.run(kernel, outputs, seed=seed, x_seed=3 - seed) for seed in (1, 2))
        assert not torch.equal(one["q"], one["x_q"]), "both copies took their random numbers from one stream"
        same = torch.equal(other["q"], one["x_q"]) and torch.equal(other["x_q"], one["q"])
        assert same, "a copy did not take the numbers of its own stream"


@pytest.mark.parametrize("form", [form for form, (name, chain) in FORMS.items() if name != BATCH_NORM or not chain.residual])
def test_copies_are_those_of_quantize(subject: Subject, outputs: Outputs, form: str) -> None:
    """Number i of the stream goes to element i in memory, as where the float32 result is quantized by itself under that stream.

    Not of a batch norm with a residual, whose scale may be larger than that of quantize.
    """
    problem = Producer.of(form, variant_of(), (70, 33), subject.device, 16)
    kernels, shape = problem.kernels(subject), (tuple(problem.x.shape),)
    quantize = subject.kernels(Op.QUANTIZE, problem.variant, shape)[0]
    for kernel in kernels:
        written = problem.run(kernel, outputs, seed=21, offset=22)
        q, scale = outputs.empty(shape[0], torch.int8), outputs.empty((1,), torch.float32)
        out = written["out"]
        of_out = 22 + (int(checksum(problem.x)) - int(checksum(out))) * (0x9E3779B9 << 32)
        quantize(out, q, scale, None, 21, (of_out + (1 << 63)) % (1 << 64) - (1 << 63))
        moved = (q != written["q"]).float().mean().item()  # rounding errors of a quotient may decide now and then
        assert moved < 0.01, f"{moved:.1%} of the values are not those of quantize"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("saved", KEPT, ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", ON_IMAGES)
def test_a_gradient_in_two_parts(subject: Subject, outputs: Outputs, form: str, saved: Precision, dtype: Precision) -> None:
    """Two parts of a gradient give, to the bit, what their sum gives, rounded to the format of both; the copy is the same too."""
    variant = variant_of(saved=saved if saved.needs_scale else dtype, output=dtype)
    for shape in COPIED:
        parts = copying_call(form, variant, shape, False, 2, 40, subject.device)
        for grad_copy in (False, True):
            parts = parts.changed(chain=attrs.evolve(parts.chain, grad_copy=grad_copy))
            assert parts.other is not None
            whole = parts.changed(chain=attrs.evolve(parts.chain, grad_sum=False), grad=parts.grad + parts.other, other=None)
            for expected, found in zip(whole.put_to(subject, outputs), parts.put_to(subject, outputs), strict=True):
                for name, value in expected.items():
                    assert torch.equal(found[name], value), f"{name} from two parts is not that from their sum"


def test_a_residual_that_needs_no_gradient(subject: Subject, outputs: Outputs) -> None:
    """None is an output that is not wanted."""
    call = Producer.of("batch_norm+add", variant_of(), (28, 16), subject.device, 13).backward()
    alone = call.changed(wanted=("x",))
    for whole, found in zip(call.put_to(subject, outputs), alone.put_to(subject, outputs), strict=True):
        assert torch.equal(found["x"], whole["x"]), "the gradient of x depends on which others are wanted"


def test_backward_follows_its_own_forward(subject: Subject, outputs: Outputs) -> None:
    """z is worked out again where no bits were kept, from statistics that the forward kernel wrote."""
    subject.skip_unless_offered(Op.BATCH_NORM_OUTPUT)
    problem = Producer.of("batch_norm+relu", variant_of(), (84, 24), subject.device, 14)
    call = attrs.evolve(problem.backward(), grad=torch.ones_like(problem.x))
    for forward, backward in zip(problem.kernels(subject), call.kernels(subject), strict=False):
        written = problem.run(forward, outputs)
        found = call.changed(mean=written["mean"], spread=written["spread"]).run(backward, outputs)
        opened = (written["out"] > 0).sum(0).float()
        assert torch.equal(found["bias"], opened), "backward opens ReLU where forward did not, or the other way round"

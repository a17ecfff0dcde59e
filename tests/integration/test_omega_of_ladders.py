"""Ω of a variant does not depend on what was observed beside it: variants share noise only where their noise is the same."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
import torch.nn.functional as F
from bench.indicator.published import named
from hypothesis import example, given
from hypothesis import strategies as st
from qsync_indicators_example.observing_hessian import HessianCollector
from qsync_indicators_example.observing_paper import PaperCollector
from torch import nn

from hypothesis_profiles import tries
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate
from qsync_torch.job import Batch, Job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

INT8, BF16, FP16, FP32 = Precision.INT8, Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32
COLLECTORS = (HutchinsonCollector, LossVarCollector, PaperCollector, HessianCollector)

FLOATS = st.sampled_from([BF16, FP16, FP32])
QUANTIZED = st.builds(
    Variant,
    compute=st.shared(st.sampled_from([INT8, Precision.FLOAT8_E4M3FN]), key="format"),
    output=FLOATS,
    saved=st.shared(st.sampled_from([INT8, Precision.FLOAT8_E4M3FN]), key="format"),
    grad_input=st.sampled_from([INT8, BF16, FP16, FP32]),
    grad_weight=st.sampled_from([INT8, BF16, FP16, FP32]),
    w_granularity=st.sampled_from([Granularity.PER_TENSOR, Granularity.PER_CHANNEL]),
    rounding=st.sampled_from(Rounding),
)
VARIANTS = QUANTIZED | st.builds(Variant.of, st.sampled_from([BF16, FP16]), output=st.none() | FLOATS)


@functools.cache
def _job() -> Job:
    torch.manual_seed(0)
    x, target = torch.randn(4, 2, 5, 5), torch.randn(4, 3)
    return Job(
        "net",
        nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Tanh(), nn.Linear(16, 3)),
        lambda step, size: Batch((x[:size],), target=target[:size]),
        lambda output, batch: F.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


@functools.cache
def _dag():
    return trace(_job())


@functools.lru_cache(maxsize=256)
def _observed(*variants: Variant):
    collectors = [collector() for collector in COLLECTORS]
    return observe(_job(), _dag(), ObserveRequest(variants, warmup=0, steps=1, batch_size=4, collectors=collectors, settled=None))


def _omega(observed, variant: Variant) -> dict[str, dict[str, float]]:
    found = {c.name: indicate(observed, _dag(), [variant], named(c.name)).omega for c in COLLECTORS}
    return {name: {str(op_id): by[variant] for op_id, by in omega.items() if variant in by} for name, omega in found.items()}


LADDER = Variant.of(INT8), Variant.of(BF16)
EIGHT_BIT_GRADIENT = attrs.evolve(LADDER[0], grad_input=INT8)
WIDE_WEIGHT = attrs.evolve(LADDER[0], grad_weight=FP32)
EIGHT_BIT_WEIGHT_GRADIENT = attrs.evolve(LADDER[0], grad_weight=INT8)
"""Which convolutions do not run in."""


@tries(60)
@given(VARIANTS, VARIANTS)
@example(*LADDER)
@example(LADDER[0], Variant.of(FP16))
@example(EIGHT_BIT_GRADIENT, attrs.evolve(EIGHT_BIT_GRADIENT, w_granularity=Granularity.PER_TENSOR))
@example(WIDE_WEIGHT, attrs.evolve(WIDE_WEIGHT, grad_input=FP32))
@example(LADDER[0], EIGHT_BIT_WEIGHT_GRADIENT)
def test_what_is_observed_together_is_rated_as_alone(one: Variant, other: Variant) -> None:
    together = _observed(*dict.fromkeys((one, other)))
    for variant in (one, other):
        alone = _omega(_observed(variant), variant)
        for name, omega in _omega(together, variant).items():
            assert omega == pytest.approx(alone[name], rel=1e-6), f"{name} of {variant}"
    back = _observed(*dict.fromkeys((other, one)))
    assert _omega(back, one) == _omega(together, one)


def test_a_gradient_of_the_input_that_is_rounded_alone_counts() -> None:
    """The product for the input's gradient writes 16 bits though both read a float32 copy."""
    narrow, exact = WIDE_WEIGHT, attrs.evolve(WIDE_WEIGHT, grad_input=FP32)
    observed = _observed(narrow, exact)
    rounded, unrounded = (_omega(observed, variant)["hutchinson"] for variant in (narrow, exact))
    first, *others = rounded
    assert rounded[first] == unrounded[first]  # nothing wants the gradient of the batch
    assert all(rounded[op_id] > unrounded[op_id] for op_id in others)

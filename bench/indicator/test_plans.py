"""Whole plans are measured as single operators are, and what is computed from them is what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from indicator.additivity import Fit
from indicator.equal_time import _linear_around
from indicator.measuring import BFLOAT16, FLOAT32, INT8
from indicator.plans import PlanErrors, drawn_plans
from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.sensitivity import Sensitivity
from qsync_planner.allocator.verdict import plan_error
from qsync_torch.job import Batch, Job
from qsync_torch.observing.montecarlo import MonteCarloCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

A, B = OpId("a"), OpId("b")


def job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def batch(step: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, 6, generator=generator),), target=torch.randint(3, (size,), generator=generator))

    return Job(
        "small", model, batch, lambda out, b: nn.functional.cross_entropy(out, b.target), lambda p: torch.optim.SGD(p, 0.1), 8
    )


def test_plans_of_one_kind_are_what_montecarlo_measures() -> None:
    """All operators in one variant, and one operator alone; a plan of nothing moves nothing."""
    dag = trace(job())
    names = [operator.op_id for operator in dag.adjustable]
    plans = [dict.fromkeys(names, BFLOAT16), {names[1]: BFLOAT16, names[0]: FLOAT32}, {}, dict.fromkeys(names, INT8)]
    found = observe(
        job(),
        dag,
        ObserveRequest(
            [BFLOAT16, INT8], warmup=1, steps=2, settled=None, collectors=[PlanErrors(plans, 4), MonteCarloCollector(4)]
        ),
    )
    values = [found.values(PlanErrors.name, f"plan {i}") for i in range(len(plans))]
    assert values[0] == pytest.approx(found.values(terms.MONTECARLO, terms.FIRST_HALF, None, BFLOAT16))
    assert values[1] == pytest.approx(found.values(terms.MONTECARLO, terms.FIRST_HALF, names[1], BFLOAT16))
    assert values[2] == (0.0, 0.0)
    halves = [found.values(terms.MONTECARLO, term, None, INT8) for term in (terms.FIRST_HALF, terms.SECOND_HALF)]
    assert values[3] == pytest.approx([(a + b) / 2 for a, b in zip(*halves, strict=True)])


def test_drawn_plans() -> None:
    dag = trace(job())
    plans = drawn_plans(dag, 12, seed=0)
    assert plans == drawn_plans(dag, 12, seed=0)
    assert plans != drawn_plans(dag, 12, seed=1)
    assert len(plans) == 12
    assert [set(plan.values()) for plan in plans[:2]] == [{INT8}, {BFLOAT16}]
    assert all(plan and set(plan.values()) <= {INT8, BFLOAT16} for plan in plans)


def test_fit() -> None:
    fit = Fit.of([1.0, 2.0, 12.0], [2.0, 2.0, 4.0])
    assert (fit.median, fit.worst, fit.tau) == (1.0, 3.0, pytest.approx(2 / math.sqrt(6)))
    assert fit.scatter == pytest.approx(math.sqrt((math.log(0.5) ** 2 + math.log(3) ** 2) / 3 - (math.log(1.5) / 3) ** 2))


def rated(part: float = 9.0) -> Sensitivity:
    omega = {A: {INT8: 9.0, BFLOAT16: 1.0, FLOAT32: 0.0}, B: {INT8: 10.0, BFLOAT16: 2.0, FLOAT32: 0.0}}
    flips = {A: {INT8: 4.0}, B: {INT8: part, BFLOAT16: 1.0}}
    return Sensitivity("m", "", "", "by hand", omega, flips=flips, masks={A: 5.0, B: 3.0})


def test_the_linear_objective_around_a_plan_has_the_slope_of_the_whole() -> None:
    """Moving B's flips by a little changes both alike."""
    plan, step = {A: INT8, B: INT8}, 1e-6
    slope = (plan_error(rated(9.0 - step), plan) - plan_error(rated(), plan)) / step  # B's smooth part rises by as much
    linear = _linear_around(rated(), plan)
    weight = (linear.omega[B][INT8] - 1.0) / 9.0**2  # per unit of B²
    assert slope == pytest.approx(1 - weight * 2 * 9.0, rel=1e-4)
    assert linear.omega[A][FLOAT32] == 0.0

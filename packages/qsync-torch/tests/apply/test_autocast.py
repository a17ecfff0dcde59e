"""Autocast around and inside of a model under a plan: the plan's own, another, and none."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_torch import apply_
from qsync_torch.caller import BY_HAND
from qsync_torch.integrations.planned_training import TrainerSettings
from qsync_torch.integrations.planned_training import _check_autocast as check_trainers_autocast

from .small_models import BFLOAT16, FLOAT32, INT8, named
from .test_apply import plan_of
from .two_layers import BOTH, TwoLayers, equal, gradients_of


@pytest.mark.parametrize("variants", [BOTH, named(a=FLOAT32, b=FLOAT32)])
def test_an_autocast_that_is_not_the_plans_is_refused(x, variants):
    model = TwoLayers()
    apply_(model, plan_of(variants))
    sentence = r"runs under torch.autocast to bfloat16, but its plan is for a job in float32.*amp='bfloat16'"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match=sentence):
        model(x)
    model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.eval()(x).dtype is torch.bfloat16


def test_variants_that_are_all_float32_refuse_autocast_in_parts_and_inside(x):
    class Inside(TwoLayers):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x):
            return self.body(x)

    model = Inside()
    apply_(model, named(a=FLOAT32, b=FLOAT32))
    with pytest.raises(PlanError, match=r"operator a#0 runs under torch.autocast to bfloat16, but its plan is for"):
        model(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match=r"operator a#0 runs under torch\.autocast to"):
        model.a(x)


def test_an_autocast_inside_the_model_is_refused_by_operator(x):
    class Inside(TwoLayers):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    model = Inside()
    apply_(model, BOTH)
    with pytest.raises(PlanError, match=r"operator a#0 runs under torch.autocast to bfloat16, but its plan is for"):
        model(x)


def under_amp(variants):
    plan = plan_of(variants)
    groups = tuple(attrs.evolve(group, base=Precision.BFLOAT16) for group in plan.groups)
    return attrs.evolve(plan, base=Precision.BFLOAT16, groups=groups)


def test_a_plan_for_a_job_under_autocast(x):
    model = TwoLayers()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients_of(model, model(x).float().square().sum())
    apply_(model, under_amp(named(a=BFLOAT16, b=BFLOAT16)))
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(gradients_of(model, model(x).float().square().sum()), expected)
    with pytest.raises(PlanError, match=r"without torch.autocast, but its plan is for a job under autocast to bfloat16"):
        model(x)


class Loss(nn.Module):
    def forward(self, y, labels):
        return F.cross_entropy(y, labels)


@pytest.mark.parametrize("variants", [named(a=INT8, b=BFLOAT16), named(a=BFLOAT16, b=BFLOAT16)])
def test_a_loss_that_is_a_child_of_the_model_may_run_outside_of_autocast(x, variants):
    model = TwoLayers()
    model.loss = Loss()
    apply_(model, under_amp(variants))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    labels = torch.arange(len(y))
    assert torch.equal(model.loss(y.float(), labels), F.cross_entropy(y.float(), labels))
    with pytest.raises(PlanError, match=r"runs without torch\.autocast, but its plan is for a job under autocast to bfloat16"):
        model.a(x)


def test_low_precision_under_autocast(x):
    model = TwoLayers()
    with torch.autocast("cpu", torch.bfloat16):
        exact = model(x)
    apply_(model, under_amp(named(a=INT8, b=BFLOAT16)))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    assert 0 < (y - exact).norm() / exact.norm() < 0.05
    y.float().sum().backward()
    assert model.a.weight.grad.dtype is torch.float32


def test_a_trainer_without_autocast_may_train_a_model_that_holds_the_base():
    settings = TrainerSettings("the trainer", "bf16=False", Precision.FLOAT32, {Precision.BFLOAT16: "bf16=True"})
    held, cast = torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16(), torch.nn.Sequential(torch.nn.Linear(4, 4))
    check_trainers_autocast(apply_(held, {"0": "bfloat16"}, base=Precision.BFLOAT16), settings, BY_HAND)
    with pytest.raises(PlanError, match="the trainer is set to bf16=False and trains without autocast, but the plan is for a job"):
        check_trainers_autocast(apply_(cast, {"0": "bfloat16"}, base=Precision.BFLOAT16), settings, BY_HAND)

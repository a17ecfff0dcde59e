"""One entry of core's table of casts decides for all three who act on it: ``apply_``, the cost mapper and observing."""

from __future__ import annotations

import copy
import functools
import itertools

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir import semantics
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, DeviceKind, DeviceType, OpCost, Profile
from qsync_core.ir.semantics import CastSite, CastTarget
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel
from qsync_torch import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.kernels.binding import operator_binding
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

INT8, BF16 = Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16)
FP16 = CastTarget(Precision.FLOAT16)


@functools.cache
def _job():
    torch.manual_seed(0)
    x, target = torch.randn(4, 6), torch.randn(4, 2)
    return Job(
        "net",
        nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
        lambda step, size: Batch((x[:size],), target=target[:size]),
        lambda output, batch: F.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


@functools.cache
def _dag():
    return trace(_job())


def _variants(variant):
    return {operator.op_id: variant for operator in _dag().adjustable}


def _trained(variant):
    """Of a forward and backward after ``apply_``: output, gradients, and the dtypes that autograd saves."""
    model, batch = copy.deepcopy(_job().model), _job().batch(0, 4)
    apply_(model, _variants(variant))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(str(t.dtype)) or t, lambda t: t):
        output = model(*batch.args)
        _job().loss(output, batch).backward()
    return output.tolist(), [parameter.grad.tolist() for parameter in model.parameters()], saved


def _charged(variant):
    """Every cast that the cost mapper charges for, with its time."""
    variants = [INT8, *(Variant.plain(p) for p in (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32))]
    index = {operator.op_id: dict.fromkeys(variants, 0) for operator in _dag().operators if operator.kind != "input"}
    keys = itertools.starmap(CastKey, itertools.product(Precision, Precision, Granularity, Rounding))
    models = tuple(CastModel(key, 0, 10.0 * number, 1.0, 1.0) for number, key in enumerate(keys, 1))
    profile = Profile(DeviceType("cpu", DeviceKind.CPU), {}, _dag().model, "", (OpCost(0, 0, 0, 0),), index, models, 0, 0)
    mapper = CostMapper(_dag(), CostModel(_dag(), profile), _variants(variant))
    return [(priced.cast.site, priced.cast.key, priced.work) for casts in mapper.charged for priced in casts]


def _noise(variant):
    """What each collector sums up at the first update, by operator and term."""
    collectors = [HutchinsonCollector(), LossVarCollector()]
    found = observe(_job(), _dag(), ObserveRequest([variant], warmup=0, steps=1, batch_size=4, collectors=collectors, settled=None))
    return {
        (series.collector, series.term, series.op_id): series.values[0] for series in found.series if series.variant is not None
    }


@functools.cache
def _right(variant):
    return _trained(variant), _charged(variant), _noise(variant)


@pytest.fixture
def change(monkeypatch):
    """Replaces entries of the table until the test ends."""

    def forget():
        semantics.steps_of.cache_clear()
        operator_binding.cache_clear()

    def replace(**entries):
        monkeypatch.setattr(semantics, "TABLE", attrs.evolve(semantics.TABLE, **entries))
        forget()

    yield replace
    monkeypatch.undo()
    forget()


def _always(target):
    return lambda variant: target


WRONG = {
    "the activation rounds down": (INT8, {"input": _always(CastTarget(Precision.INT8, rounding=Rounding.FLOOR))}),
    "the weight has one scale": (INT8, {"weight": _always(CastTarget(Precision.INT8, rounding=Rounding.STOCHASTIC))}),
    "the gradient is float16": (INT8, {"grad_output": lambda variant, products: (FP16,)}),
    "a float operator is float16": (BF16, dict.fromkeys(("input", "weight", "bias"), _always(FP16))),
}


@pytest.mark.parametrize(("variant", "entries"), WRONG.values(), ids=WRONG)
def test_a_wrong_entry_changes_what_runs_what_is_charged_and_what_is_observed(variant, entries, change):
    trained, charged, noise = _right(variant)
    change(**entries)
    assert _trained(variant) != trained
    observed = _noise(variant)
    # LossVar has no term for the gradient's rounding.
    collectors = {HutchinsonCollector.name} if "grad_output" in entries else {HutchinsonCollector.name, LossVarCollector.name}
    assert {key[0] for key in noise if observed.get(key) != noise[key]} == collectors
    now = _charged(variant)
    sites = {CastSite(name) for name in entries} - {CastSite.BIAS}  # a part of the operator, which is not charged by itself
    for site in CastSite:
        before, after = ([row for row in rows if row[0] is site] for rows in (charged, now))
        assert (before != after) is (site in sites), site


@pytest.mark.parametrize("variant", [INT8, BF16], ids=lambda variant: variant.label)
def test_the_same_table_gives_the_same(variant, change):
    right = _right(variant)
    change()
    assert (_trained(variant), _charged(variant), _noise(variant)) == right

"""Statistics by hand, plans within their limits, runs that differ in nothing but their precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from indicator.accuracy.fake_quantization import FakeQuantized, rounded
from indicator.accuracy.methods import FULL, QSYNC, SETTINGS, UNIFORM, Task, tasks
from indicator.accuracy.page import BEGIN, END, write_page
from indicator.accuracy.paired import holm, paired
from indicator.accuracy.plans import Planned
from indicator.accuracy.rows import Finished, rows
from indicator.accuracy.store import Store, plan_digest
from indicator.accuracy.training import train
from indicator.measuring import FLOAT32, INT8
from indicator.models import SUBJECTS
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Rounding
from qsync_torch.tracing.trace import trace


def test_interval_worked_by_hand() -> None:
    # Differences 1, 2, 3, 6: mean 3; squares of what is left 4 + 1 + 0 + 9 = 14, variance 14/3, error √(14/3/4) = 1.0801;
    # t of 3 degrees at 97.5% is 3.1824 (any table), so ± 3.4374.
    found = paired({0: 1.0, 1: 5.0, 2: 9.0, 3: 7.0, 9: 99.0}, {0: 0.0, 1: 3.0, 2: 6.0, 3: 1.0})
    assert found is not None
    assert (found.mean, found.pairs) == (3.0, 4)  # the seed that only one of them has is no pair
    assert found.half_width == pytest.approx(3.4374, abs=1e-3)
    assert not found.excludes_zero
    # t = 3 / 1.0801 = 2.7775; P(|t| > x) of 3 degrees = 1 − 2/π·(θ + sin θ cos θ) with tan θ = x/√3
    theta = math.atan(2.7775 / math.sqrt(3))
    assert found.p == pytest.approx(1 - 2 / math.pi * (theta + math.sin(theta) * math.cos(theta)), abs=1e-4)
    assert found.text(digits=1) == "+3.0 [-0.4, +6.4]"


def test_intervals_of_few_pairs() -> None:
    assert paired({0: 1.0}, {1: 1.0}) is None
    one = paired({0: 2.0}, {0: 1.5})
    assert one is not None
    assert math.isinf(one.half_width)
    assert not one.excludes_zero
    equal = paired({0: 2.0, 1: 3.0}, {0: 2.0, 1: 3.0})
    assert equal is not None
    assert (equal.mean, equal.half_width, equal.p) == (0.0, 0.0, 1.0)


def test_holm_worked_by_hand() -> None:
    # Sorted .01, .02, .03, .6 times 4, 3, 2, 1; none smaller than the one before.
    assert holm([0.03, 0.01, 0.6, 0.02]) == pytest.approx([0.06, 0.04, 0.6, 0.06])


def test_an_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 5, generator=generator).tolist()
    inside = sum(not paired(dict(enumerate(row)), dict.fromkeys(range(5), 0.0)).excludes_zero for row in draws)
    assert 0.93 < inside / 2000 < 0.97


@pytest.mark.parametrize("rounding", Rounding)
def test_four_bits_have_fifteen_values(rounding) -> None:
    x = torch.randn(6, 500, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = rounded(x, 4, rounding, torch.Generator().manual_seed(2), per_channel=True)
    scale = x.detach().abs().amax(1, keepdim=True) / 7
    steps = (y / scale).detach()
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert float(steps.abs().max()) <= 7 + 1e-4
    error = ((y - x) / scale).detach()
    assert float(error.abs().max()) <= (0.5 if rounding is Rounding.NEAREST else 1.0) + 1e-4
    assert float(error.mean()) == pytest.approx(-0.5 if rounding is Rounding.FLOOR else 0.0, abs=0.05)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_fake_quantization_is_taken_back_and_leaves_dropout_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(16, 8)
    torch.manual_seed(3)
    before = model(x)
    changed = FakeQuantized(model, ["0", "2"], 8, Rounding.STOCHASTIC, 0)
    torch.manual_seed(3)
    during = model(x)
    changed.remove()
    torch.manual_seed(3)
    assert torch.equal(model(x), before)
    assert not torch.equal(during, before)
    assert torch.allclose(during, before, atol=0.1)  # another mask would change it by more


def test_all_of_a_seed_comes_before_the_next() -> None:
    found = tasks(["relu-cnn"], list(SETTINGS), range(2))
    assert [task.seed for task in found] == sorted(task.seed for task in found)
    assert len(set(found)) == len(found) == 2 * sum(len(setting.methods) for setting in SETTINGS.values())


def test_runs_are_kept_by_what_they_run(tmp_path) -> None:
    op_id = OpId("a", 0)
    low, full = plan_digest({op_id: INT8}), plan_digest({op_id: FLOAT32})
    int8, other, stress = (Task("relu-cnn", s, m, 0) for s, m in (("int8", UNIFORM), ("int8", QSYNC), ("int4", UNIFORM)))
    store = Store(tmp_path / "runs")
    store.add(Store.key(int8, 5, low), {"loss": 1.0})
    (tmp_path / "runs" / "cut.jsonl").write_text('{"key": "a", "lo', encoding="utf-8")
    again = Store(tmp_path / "runs")
    assert again.get(Store.key(int8, 5, low)) == {"loss": 1.0}
    assert again.get(Store.key(other, 5, low)) == {"loss": 1.0}  # another method's equal plan
    for key in (Store.key(int8, 6, low), Store.key(int8, 5, full), Store.key(stress, 5, low)):
        assert again.get(key) is None


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_runs_repeat_and_differ_by_precision_alone(setting) -> None:
    dag = trace(SUBJECTS["transformer"].job(0))
    plans = {FULL: dict.fromkeys((o.op_id for o in dag.adjustable), FLOAT32)}
    plans[UNIFORM] = dict.fromkeys(plans[FULL], INT8)
    runs = {
        (method, i): train(Task("transformer", setting if method == UNIFORM else "int8", method, 1), plans[method], 3)
        for method in plans
        for i in range(2)
    }
    for method in plans:
        assert runs[method, 0]["loss"] == runs[method, 1]["loss"]
    full, low = runs[FULL, 0], runs[UNIFORM, 0]
    assert full["loss_as_trained"] != low["loss_as_trained"]
    assert full["loss"] == full["loss_as_trained"]  # no plan to take back, and no BatchNorm
    assert full["loss"] == pytest.approx(low["loss"], abs=0.05)  # other dropout masks or batches would change it by more


def test_rows_and_page(tmp_path) -> None:
    losses = {(FULL, "int8"): (1.0, 2.0, 3.0), (UNIFORM, "int8"): (1.1, 2.2, 3.3), (QSYNC, "int8"): (1.0, 2.1, 3.1)}
    losses[UNIFORM, "floor"] = (1.2, 2.3, 3.4)
    runs = {
        Task("relu-cnn", setting, method, seed): {"loss": value, "loss_as_trained": value, "accuracy": 1 - value / 10}
        for (method, setting), values in losses.items()
        for seed, value in enumerate(values)
    }
    plan = Planned({OpId("a", 0): INT8}, 0.5, 0.75, 1.0)
    finished = Finished(runs, dict.fromkeys(runs, plan))
    found = {row["id"]: row for row in rows(finished)}
    assert found["C-relu-cnn-float32"]["value"] == 2.0
    assert found["C-relu-cnn-int8-uniform"]["value"] == pytest.approx(0.2)
    # .1 and .2 and .3: standard deviation .1, error .1/√3, times 4.3027 (t of 2 degrees)
    assert "95% CI +0.20000 [-0.04841, +0.44841], 3 pairs" in found["C-relu-cnn-int8-uniform"]["spread"]
    assert "less QSync's plan +0.13333" in found["C-relu-cnn-int8-uniform"]["spread"]
    assert found["C-relu-cnn-rounding-floor-int8"]["value"] == pytest.approx(0.1)
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nstale\n{END}\n\nafter\n", encoding="utf-8")
    write_page(finished, 300, page)
    text = page.read_text(encoding="utf-8")
    assert "| int8 | all low | +0.20000 [-0.04841, +0.44841] |" in text
    assert "stale" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    write_page(finished, 300, page)
    assert page.read_text(encoding="utf-8") == text

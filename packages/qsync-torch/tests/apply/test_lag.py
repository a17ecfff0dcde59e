"""The warning that training is slower than its plan: who says it, what of whom, and when nobody does."""

from __future__ import annotations

import json
import warnings

import attrs
import pytest
import torch
import torch.distributed as dist

from qsync_core.ir.plan import PrecisionPlan
from qsync_torch import apply_
from qsync_torch.apply import lag
from qsync_torch.apply.lag import Pace, lag_warning
from qsync_torch.watching import moments

from .communicating_plans import plan_with, small_model
from .test_refusals_among_ranks import run

MS = 1_000_000
ON_TIME = Pace("train", 40 * MS, 36 * MS, 40 * MS, 36 * MS, 0.05)
BEHIND = attrs.evolve(ON_TIME, group="infer", step_ns=60 * MS, own_ns=58 * MS)
WAITING = attrs.evolve(ON_TIME, step_ns=60 * MS)


def test_the_rank_that_is_behind_says_by_how_much_and_that_it_is_itself():
    said = lag_warning(1, {0: WAITING, 1: BEHIND, 2: WAITING})
    assert "a step takes 60.00 ms on rank 1 (group 'infer'), 50% more than the 40.00 ms that were predicted" in said
    assert "It is this rank: its own part, with the optimizer and loading data, takes 58.00 ms instead of 36.00 ms" in said
    assert "'torchrun … -m qsync doctor'" in said


def test_rank_0_names_the_rank_that_it_waits_for_and_the_others_are_silent():
    paces = {0: WAITING, 1: BEHIND, 2: WAITING}
    assert "waits for the rest of the step for rank 1 (group 'infer'), whose own part takes 58.00 ms instead" in lag_warning(
        0, paces
    )
    assert lag_warning(2, paces) == ""


def test_where_no_rank_is_behind_it_is_the_way_between_them():
    said = lag_warning(0, {0: WAITING, 1: WAITING})
    assert "the own part of all 2 ranks that told theirs is as predicted: it is the way between them" in said
    assert lag_warning(1, {0: WAITING, 1: WAITING}) == ""


@pytest.mark.parametrize(
    "pace",
    [
        ON_TIME,
        attrs.evolve(ON_TIME, step_ns=41.9 * MS, own_ns=37.9 * MS),  # within 5%
        attrs.evolve(ON_TIME, step_ns=2.9 * MS, own_ns=2.9 * MS, predicted_step_ns=MS, predicted_own_ns=MS),  # below 2 ms
        attrs.evolve(ON_TIME, step_ns=20 * MS),
    ],
)
def test_within_the_error_of_predictions_nothing_is_said(pace):
    assert lag_warning(0, {0: pace}) == ""


class Clock:
    """Moves only when told."""

    ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns


@pytest.fixture
def train(monkeypatch):
    """Trains the small model for some steps of so many milliseconds; the warnings on lag."""
    monkeypatch.setattr(lag, "FIRST_SAMPLE", 3)
    monkeypatch.setattr(lag, "STEPS", 6)
    monkeypatch.setattr(lag, "EVERY", 10)
    monkeypatch.setattr(lag, "_LATE", 1)
    clock = Clock()
    monkeypatch.setattr(moments, "time", clock)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def run_steps(plan: PrecisionPlan, ms: float, steps: int = 60, *, batch: int = 4, watched: bool = True) -> list[str]:
        model = small_model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            applied = apply_(model, plan, group="train")
        if not watched:
            applied.watch_lag(False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                clock.ns += round(ms * MS)
                model(torch.randn(batch, 3, 8, 8)).sum().backward()
            applied.remove()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        return [str(one.message) for one in caught if "slower than its plan" in str(one.message)]

    yield run_steps
    dist.destroy_process_group()


def plan_of_one(predicted_ms: int = 10, **change: object) -> PrecisionPlan:
    """For a job of one rank, which takes batches of four."""
    plan = plan_with(None)
    group = attrs.evolve(plan.groups[0], predicted_busy_ns=predicted_ms * MS)
    return attrs.evolve(
        plan, groups=(group,), predicted_iteration_ns=predicted_ms * MS, **{"local_batches": {"train": 4}, **change}
    )


def test_it_is_said_once_in_a_run(train):
    (said,) = train(plan_of_one(), 15)
    assert "a step takes 15.00 ms on rank 0 (group 'train'), 50% more than the 10.00 ms that were predicted" in said
    assert "It is this rank" in said


def test_steps_as_predicted_are_sampled_again_and_say_nothing(train):
    assert train(plan_of_one(), 10.5) == []


def test_few_slow_steps_do_not_count(train):
    assert train(plan_of_one(), 15, steps=8) == []


@pytest.mark.parametrize(
    "plan",
    [
        plan_of_one(0),  # says nothing of times
        plan_of_one(estimated={"train": "H200"}),
        attrs.evolve(plan_of_one(local_batches={}), groups=(attrs.evolve(plan_of_one().groups[0], count=2),)),
    ],
)
def test_a_plan_whose_times_do_not_hold_or_are_not_there_is_not_watched(train, plan):
    assert train(plan, 15) == []


def test_other_batches_than_planned_make_other_steps(train):
    assert train(plan_of_one(), 15, batch=8) == []


def test_other_settings_than_profiled_were_said_before(train):
    assert train(plan_of_one(software={"train": {"threads": "1024"}}), 15) == []


def test_it_is_off_where_the_script_says_so(train):
    assert train(plan_of_one(), 15, watched=False) == []


@pytest.mark.distributed
def test_among_ranks_the_slow_one_and_rank_0_say_it(tmp_path):
    ended = run("lagging_ranks.py", [[str(rank), str(tmp_path / "store")] for rank in range(3)], [{}] * 3)
    assert [status for status, _, _ in ended] == [0] * 3, ended
    said = [json.loads(out) for _, out, _ in ended]
    assert [len(texts) for texts in said] == [1, 1, 0], said
    assert "it waits for the rest of the step for rank 1 (group 'infer'), whose own part takes" in said[0][0]
    assert "It is this rank: its own part" in said[1][0]

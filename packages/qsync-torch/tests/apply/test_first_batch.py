"""The first batch of training beside the one that was planned."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.units import format_bytes
from qsync_torch import apply_
from qsync_torch.batch_axes import axes_of_calls, batch_axes

from .communicating_plans import plan_with, small_model
from .test_ranks import run_ranks

MIB = 2**20
PARTS = {"parameters": 10 * MIB, "batch": 1 * MIB, "activations": 6 * MIB, "workspace": 1 * MIB}
"""Of a batch of four: a batch of eight takes 26 MiB, one of nine 28 MiB."""


def plan_of_fours(budget_mib: int = 0, **axes: int) -> PrecisionPlan:
    """For batches of four samples, of which ``axes`` says where they are; the argument of ``small_model`` by default."""
    plan = plan_with(None)
    groups = tuple(attrs.evolve(group, memory_budget_bytes=budget_mib * MIB) for group in plan.groups)
    return attrs.evolve(
        plan, groups=groups, local_batches={"train": 4, "infer": 4}, batch_axes=axes or {"input": 0}, memory={"infer": PARTS}
    )


def warnings_of(plan: PrecisionPlan, *batches: int, **options: object) -> list[str]:
    """What training on batches of such sizes says of them."""
    applied = apply_(small_model(), plan, group="infer", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in batches:
            applied.model(torch.randn(size, 3, 8, 8)).sum().backward()
    return [str(one.message) for one in caught if "batch" in str(one.message)]


def test_a_larger_batch_is_said_once():
    assert warnings_of(plan_of_fours(), 8, 8) == [
        "the first batch has 8 samples, and the plan was made for 4 on each rank of group 'infer': predicted times and memory do "
        "not hold; take batches of 4, or trace this model, called as it is in training, and plan again, with this batch size"
    ]


def test_a_smaller_batch_changes_times_alone():
    (said,) = warnings_of(plan_of_fours(budget_mib=1), 3)
    assert "has 3 samples, and the plan was made for 4 on each rank of group 'infer': predicted times do not hold" in said


def test_only_the_first_batch_is_looked_at():
    assert warnings_of(plan_of_fours(), 4, 3, 8) == []


def test_evaluation_is_no_first_batch():
    applied = apply_(small_model(), plan_of_fours(), group="infer", lower_eval=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied.model.eval()(torch.randn(64, 3, 8, 8))
        with torch.no_grad():
            applied.model.train()(torch.randn(64, 3, 8, 8))
    with pytest.warns(UserWarning, match="the first batch has 5 samples"):
        applied.model(torch.randn(5, 3, 8, 8))


def test_a_batch_without_room_is_refused():
    with pytest.raises(PlanError) as refused:
        warnings_of(plan_of_fours(budget_mib=27), 9)
    assert str(refused.value) == (
        "the first batch has 9 samples, and the plan was made for 4 on each rank of group 'infer', with which a process would take "
        f"{format_bytes(28 * MIB)} of the {format_bytes(27 * MIB)} that the group has: take batches of 4, or trace this model, "
        "called as it is in training, and plan again, with this batch size; apply_(..., allow_flags=['batch_size']) trains all the "
        "same"
    )


def test_a_larger_batch_with_room_is_not_refused():
    assert len(warnings_of(plan_of_fours(budget_mib=27), 8)) == 1


def test_a_script_that_knows_is_not_told():
    assert warnings_of(plan_of_fours(budget_mib=27), 64, allow_flags=["batch_size"]) == []


def test_parts_of_a_batch_are_smaller():
    applied = apply_(small_model(), plan_of_fours(), group="infer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in applied.micro_batches(applied.model, 3):
            applied.model(torch.randn(8, 3, 8, 8)[part.rows])


class Recurrent(nn.Module):
    """Its batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 6), nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(tokens)[0]) * scale


class OfDictionary(nn.Module):
    def forward(self, batch: Mapping[str, object], *more: object, **rest: object) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "axes", "other", "found"),
    [
        (Recurrent(), (torch.ones(7, 4, 5),), {"scale": torch.ones(2)}, {"tokens": 1}, ((torch.ones(9, 6, 5),), {}), 6),
        (Recurrent(), (torch.ones(7, 4, 5),), {}, {"tokens": 1}, ((), {"tokens": torch.ones(9, 4, 5)}), 4),
        (
            OfDictionary(),
            ({"pixels": torch.ones(4, 3), "names": ["a"] * 4, "boxes": [torch.ones(2), torch.ones(4)]},),
            {},
            {"batch.pixels": 0, "batch.boxes.1": 0},
            (({"pixels": torch.ones(6, 3)},), {}),
            6,
        ),
        (OfDictionary(), (0, torch.ones(3, 4)), {"x": torch.ones(4)}, {"*1": 1, "x": 0}, ((0, torch.ones(3, 5)), {}), 5),
        (OfDictionary(), (0,), {"x": torch.ones(4)}, {"x": 0}, ((0,), {"x": torch.ones(8)}), 8),
        (OfDictionary(), (0, [torch.ones(3, 5)] * 4), {}, {}, ((0, [torch.ones(3, 5)] * 8), {}), None),
        (OfDictionary(), (torch.ones(4),), {}, {"batch": 0}, ((None,), {}), None),
    ],
)
def test_samples_are_found_where_they_were_when_the_job_was_traced(model, args, kwargs, axes, other, found):
    assert batch_axes(model, args, kwargs, 4) == axes
    samples = [axis.samples(*other) for axis in axes_of_calls(model, axes)]
    assert next((size for size in samples if size is not None), None) == found


def test_a_job_whose_samples_are_no_dimension_is_left_alone():
    assert warnings_of(plan_of_fours(other=0), 64) == []


@pytest.fixture
def compiled():
    """What makes a compiled model under a plan, and forgets the code of other tests."""
    torch._dynamo.reset()
    yield lambda plan, **how: torch.compile(apply_(small_model(), plan, group="infer").model, backend="aot_eager", **how)
    torch._dynamo.reset()


def test_compiled_steps_say_it_as_well(compiled):
    model = compiled(plan_of_fours(), fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (8, 8, 6, 4, 3):
            model(torch.randn(size, 3, 8, 8)).sum().backward()
    (said,) = (str(one.message) for one in caught if "batch" in str(one.message))
    assert said.startswith("the first batch has more than 4 samples, and the plan was made for 4 on each rank of group 'infer'")


def test_a_compiled_step_without_room_is_refused(compiled):
    with pytest.raises(PlanError, match=r"the first batch has 9 samples.* 28 MiB of the 27 MiB that the group has"):
        compiled(plan_of_fours(budget_mib=27))(torch.randn(9, 3, 8, 8))


TRAINING = """
import json, sys
sys.path.insert(0, {folder!r})
import attrs
from communicating_plans import plan_with, small_model
from qsync_core.errors import PlanError
from qsync_torch import apply_
plan = plan_with(None)
groups = tuple(attrs.evolve(group, memory_budget_bytes=27) for group in plan.groups)
parts = {{"infer": {{"activations": 8}}}}
plan = attrs.evolve(plan, groups=groups, local_batches={{"train": 4, "infer": 4}}, batch_axes={{"input": 0}}, memory=parts)
def train(**flags):
    ddp = DistributedDataParallel(apply_(small_model(), plan, group=("train", "infer")[rank], **flags).model)
    try:
        ddp(torch.randn(16, 3, 8, 8)).sum().backward()
    except PlanError as error:
        return str(error)
    return "trained"

allowed_by_the_other = train(allow_flags=["batch_size"] if rank == 0 else [])
print(json.dumps([train(), allowed_by_the_other, train(allow_flags=["batch_size"])]))
"""


@pytest.mark.distributed
def test_what_one_rank_has_no_room_for_all_refuse(tmp_path, request):
    said = [json.loads(out.splitlines()[-1]) for out in run_ranks(tmp_path, TRAINING.format(folder=str(request.path.parent)))]
    assert [trained for *_, trained in said] == ["trained", "trained"]
    for case in range(2):
        assert said[0][case].startswith("rank 1 refuses: the first batch has 16 samples, and the plan was made for 4 on each rank")
        assert said[1][case].startswith("the first batch has 16 samples")

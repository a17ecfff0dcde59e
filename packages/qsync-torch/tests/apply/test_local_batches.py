"""A plan with local batches of different sizes, in scripts that honour it and in scripts that do not."""

from __future__ import annotations

import json
import warnings

import attrs
import pytest

from qsync_core.errors import PlanError
from qsync_torch import apply_

from .communicating_plans import plan_with, small_model
from .test_ranks import run_ranks

UNEVEN = attrs.evolve(plan_with(None), local_batches={"train": 5, "infer": 3})

TRAINING = """
import json, attrs, sys
sys.path.insert(0, {folder!r})
from communicating_plans import plan_with, small_model
from torch.utils.data import DataLoader, TensorDataset
from qsync_core.errors import PlanError
from qsync_torch import apply_
plan = attrs.evolve(plan_with(None), local_batches={{"train": 5, "infer": 3}})
group = ("train", "infer")[rank]
data = TensorDataset(torch.randn(20, 3, 8, 8), torch.randint(0, 3, (20,)))

def train(samples=None, weights=True, plan=plan, options={{}}, compiled=False, **flags):
    applied = apply_(small_model(), plan, group=group, **flags)
    ddp = DistributedDataParallel(applied.model)
    if weights:
        applied.weight_gradients(ddp, **options)
    if compiled:
        ddp = torch.compile(ddp, backend="aot_eager")
    loader = DataLoader(data, samples) if samples else DataLoader(data, batch_sampler=applied.batch_sampler(data))
    try:
        for _, (x, y) in zip(range(3), loader):
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
    except PlanError as error:
        return str(error)
    return [applied.local_batch, applied.batch_sizes, applied.batch_weight, len(loader)]

found = {{
    "honoured": train(),
    "unweighted": train(weights=False),
    "equal batches": train(samples=4),
    "compiled, unweighted": train(weights=False, compiled=True),
    "weighted on one rank": train(weights=rank == 0),
    "by the script": train(samples=5 if rank == 0 else 3, weights=False, allow_flags=["local_batch"]),
    "equal plan": train(weights=False, plan=attrs.evolve(plan, local_batches={{"train": 4, "infer": 4}})),
}}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """What each of two ranks found."""
    body = TRAINING.format(folder=str(request.path.parent))
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(tmp_path_factory.mktemp("training"), body)]


@pytest.mark.distributed
def test_a_script_that_takes_the_plan_s_batches_and_weights_them_trains(trained):
    assert [rank["honoured"] for rank in trained] == [[5, [5, 3], 5 / 8, 3], [3, [5, 3], 3 / 8, 3]]


@pytest.mark.distributed
def test_a_script_that_does_not_weight_is_refused_on_every_rank(trained):
    for said in (rank[case] for rank in trained for case in ("unweighted", "compiled, unweighted")):
        assert "refuses as well" not in said
        assert said.startswith(
            "the plan has local batches of different sizes (5 samples a rank of 'train', 3 samples a rank of 'infer'), and this "
            "script would average gradients as if they were equal: call applied.weight_gradients(ddp)"
        )


@pytest.mark.distributed
def test_ranks_of_which_one_weights_are_refused(trained):
    for rank in trained:
        assert rank["weighted on one rank"].startswith(
            "the ranks of this job differ in whether gradients are weighted (yes on rank 0; no on rank 1)"
        )


@pytest.mark.distributed
def test_a_script_with_other_batches_is_refused_on_every_rank(trained):
    for rank in trained:
        assert rank["equal batches"].startswith(
            "rank 0 trained on 4 of the 8 samples of the first step, and the plan's local batches (5 + 3) give it 5: take "
            "batches of applied.local_batch samples"
        )


@pytest.mark.distributed
def test_a_script_may_weight_by_itself_and_equal_batches_need_no_weights(trained):
    assert [rank["by the script"][0] for rank in trained] == [5, 3]
    assert [rank["equal plan"] for rank in trained] == [[4, [4, 4], 0.5, 3]] * 2


def test_a_process_alone_knows_its_batch_and_needs_no_weights():
    applied = apply_(small_model(), UNEVEN, group="infer")
    assert (applied.local_batch, applied.batch_sizes, applied.batch_weight) == (3, (3,), 1.0)
    assert [len(batch) for batch in applied.batch_sampler(range(7))] == [3, 3, 1]


def test_without_a_plan_or_batches_in_it_nothing_is_known():
    for entries in ({"6": "bfloat16"}, plan_with(None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            applied = apply_(small_model(), entries, group=None if isinstance(entries, dict) else "train")
        assert (applied.local_batch, applied.batch_sizes, applied.batch_weight) == (None, (), None)
        with pytest.raises(
            PlanError, match=r"no plan says how large local batches are: .* UnevenBatchSampler\(dataset, batch_sizes\)"
        ):
            applied.batch_sampler(range(7))
        applied.remove()

"""The global batch of a job that has other ranks than planned: refused, kept by accumulation, or smaller by choice."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan, RecommendedWay
from qsync_torch import apply_
from qsync_torch.caller import Caller
from qsync_torch.elastic.job_ranks import JobRanks
from qsync_torch.elastic.resizing import MicroBatch, micro_batches, step_batches

from .communicating_plans import PLANNED, plan_with, small_model
from .run_folders import make_run_folder, plan_for
from .test_ranks import run_ranks

WHOLE = plan_for(("train", "infer", "spare"), batches=True)
"""19 samples a step: 6 + 6 + 7."""


def batches_of(groups: dict[int, str], choice: str | None, whole: PrecisionPlan = WHOLE):
    plan = plan_for(set(groups.values()), batches=True)
    return step_batches(plan, whole, JobRanks.of(plan, groups), choice)


@pytest.mark.parametrize(
    "choice, by_rank, passes", [("keep-global", (9, 10), 2), ("keep-local", (6, 6), 1)], ids=["keep-global", "keep-local"]
)
def test_what_stays_is_the_choice(choice, by_rank, passes):
    found = batches_of({0: "infer", 1: "train"}, choice)
    assert (found.planned, found.at_once, found.by_rank, found.most_passes) == (19, (6, 6), by_rank, passes)


def test_shares_follow_the_groups_and_not_the_numbers_of_ranks():
    assert batches_of({0: "train", 1: "infer"}, "keep-global").by_rank == (10, 9)
    assert batches_of({0: "infer", 1: "train"}, "keep-global").by_rank == (9, 10)


def test_without_a_choice_another_global_batch_is_refused():
    with pytest.raises(PlanError) as refused:
        batches_of({0: "train"}, None)
    assert str(refused.value).startswith(
        "this job has other ranks than planned (1 of 1 in 'train', 0 of 1 in 'infer', 0 of 1 in 'spare'), so that a step would "
        "have 6 samples instead of 19: say what is to stay, with apply_(..., resize='keep-global') and the loop over "
    )
    assert "a learning rate of your choice for 0.316 of the batch" in str(refused.value)


def test_a_trainers_loop_is_not_to_be_changed():
    trainer = Caller("HybridStrategy", None, "plan_options=dict({})", "{}", own_loop=False)
    plan = plan_for({"train"}, batches=True)
    with pytest.raises(PlanError) as refused:
        step_batches(plan, WHOLE, JobRanks.of(plan, {0: "train"}), None, trainer)
    assert "say what is to stay, with HybridStrategy(..., plan_options=dict(resize='keep-local')) and a" in str(refused.value)


def test_a_job_of_the_groups_that_the_plan_recommends_needs_no_choice(monkeypatch):
    whole = attrs.evolve(WHOLE, recommended_groups=("train", "infer"))
    with pytest.warns(UserWarning, match="trains without") as said:
        found = batches_of({0: "infer", 1: "train"}, None, whole)
    assert (found.planned, found.by_rank, found.is_resized) == (12, (6, 6), False)
    assert str(said[0].message) == (
        "this job trains without 'spare', as the plan recommends: a step has 12 samples, and not the 19 of all groups; where "
        "the learning rate is for 19, keep them with apply_(..., resize='keep-global') and the loop over "
        "applied.micro_batches(ddp) (docs/coming-and-going.md)"
    )
    assert batches_of({0: "infer", 1: "train"}, "keep-global", whole).by_rank == (9, 10)
    for others in ({0: "train"}, {0: "train", 1: "train", 2: "infer"}, {0: "spare", 1: "train"}):
        with pytest.raises(PlanError, match="other ranks than planned"):
            batches_of(others, None, whole)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")  # the ranks may have been others a moment ago
    with pytest.raises(PlanError, match="a step would have 12 samples instead of 19"):
        batches_of({0: "infer", 1: "train"}, None, whole)


def test_a_job_of_the_groups_of_the_best_way_needs_no_choice_either():
    best = RecommendedWay(("train", "infer"), {"train": 7, "infer": 5}, 1, 1.0, "--solver dynamic-batch")
    whole = attrs.evolve(WHOLE, recommended_groups=("train",), recommended_way=best)
    for groups, samples in (({0: "train", 1: "infer"}, 12), ({0: "train"}, 6)):
        with pytest.warns(UserWarning, match=f"as the plan recommends: a step has {samples} samples"):
            batches_of(groups, None, whole)
    with pytest.raises(PlanError, match="other ranks than planned"):
        batches_of({0: "infer"}, None, whole)


def test_samples_of_a_step_are_those_of_all_its_micro_batches():
    whole = attrs.evolve(WHOLE, recommended_groups=("train", "infer"), accumulate=4)
    with pytest.warns(UserWarning, match="a step has 48 samples, and not the 76 of all groups; where the learning rate is for 76,"):
        assert batches_of({0: "infer", 1: "train"}, None, whole).by_rank == (6, 6)
    with pytest.raises(PlanError, match=r"would have 24 samples instead of 76: .* for 0\.316 of the batch"):
        batches_of({0: "train"}, None, whole)


def test_more_ranks_than_planned_are_refused_too_and_share_the_planned_batch():
    everyone = {0: "train", 1: "train", 2: "infer", 3: "spare"}
    with pytest.raises(PlanError, match=r"\(2 of 1 in 'train', .* a step would have 25 samples instead of 19"):
        batches_of(everyone, None)
    assert sum(batches_of(everyone, "keep-global").by_rank) == 19


def test_a_whole_job_is_as_planned_whatever_was_chosen():
    for choice in (None, "keep-global", "keep-local"):
        found = batches_of({0: "spare", 1: "train", 2: "infer"}, choice)
        assert (found.by_rank, found.is_resized, found.most_passes) == ((7, 6, 6), False, 1)


def test_choices_that_cannot_be_carried_out_are_refused():
    with pytest.raises(PlanError, match="resize is 'keep-local' or 'keep-global', got 'shrink'"):
        batches_of({0: "train"}, "shrink")
    with pytest.raises(PlanError, match="planned 19 samples a step are too few for 20 ranks"):
        batches_of(dict.fromkeys(range(20), "train"), "keep-global")
    silent = plan_for(["train"])
    with pytest.raises(PlanError, match="does not say what batches it is for, so 'keep-global' cannot be carried out"):
        step_batches(silent, silent, JobRanks.of(silent, {0: "train"}), "keep-global")
    assert step_batches(silent, attrs.evolve(silent), JobRanks.of(silent, {0: "train"}), None) is None


def test_a_job_that_accumulates_does_not_promise_a_static_graph():
    plan = attrs.evolve(plan_with(PLANNED), local_batches={"train": 4, "infer": 4})
    alone = apply_(small_model(), plan, group="train", resize="keep-global")
    assert (alone.local_batch, alone.ddp_options()["static_graph"]) == (8, False)
    assert apply_(small_model(), plan, group="train", resize="keep-local").ddp_options()["static_graph"] is True


@given(samples=st.integers(1, 500), passes=st.integers(1, 9), weighted=st.booleans())
def test_parts_are_the_batch_and_their_weighted_means_its_mean(samples, passes, weighted):
    parts = micro_batches(samples, passes, weighted=weighted)
    assert [row for part in parts for row in range(samples)[part.rows]] == list(range(samples))
    sizes = [part.rows.stop - part.rows.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.weight for part in parts) == pytest.approx(1)
    if not weighted:
        assert sum(
            part.weight * sum(range(samples)[part.rows]) / size for part, size in zip(parts, sizes, strict=True) if size
        ) == (pytest.approx(sum(range(samples)) / samples))


def test_a_job_as_planned_takes_its_batch_at_once():
    assert micro_batches(6, 1, weighted=False) == [MicroBatch(slice(0, 6), 1.0)]


TWO_OF_THREE = (
    f"HERE = {str(Path(__file__).parent)!r}"
    + """
import copy, json
from qsync_core.errors import PlanError
from qsync_torch import apply_
sys.path.insert(0, HERE)
from run_folders import model

FOLDER = "FOLDER"
groups = ("infer", "train")
data = [torch.randn(19, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
found = {}

def attempt(name, run):
    try:
        found[name] = run()
    except PlanError as error:
        found[name] = str(error)

def wrapped(**options):
    torch.manual_seed(0)
    inner = model()
    applied = apply_(inner, FOLDER, group=groups[rank], **options)
    return inner, applied, DistributedDataParallel(inner)

def accumulate():
    inner, applied, ddp = wrapped(resize="keep-global")
    applied.weight_gradients(ddp)
    reference = copy.deepcopy(inner).double()
    torch.nn.functional.mse_loss(reference(data[0].double()), data[1].double()).backward()
    [rows] = list(applied.batch_sampler(range(19), shuffle=False))
    x, y = data[0][rows], data[1][rows]
    sizes = []
    for part in applied.micro_batches(ddp, len(x)):
        loss = torch.nn.functional.mse_loss(ddp(x[part.rows]), y[part.rows])
        (loss * part.weight).backward()
        sizes.append(len(x[part.rows]))
    worst = max(
        float((mine.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max())
        for mine, theirs in zip(inner.parameters(), reference.parameters())
    )
    return {"error": worst, "sizes": sizes, "batch": applied.local_batch,
            "batches": [applied.global_batch, applied.planned_batch], "rows": rows, "place": applied.place}

def keep_local():
    inner, applied, ddp = wrapped(resize="keep-local")
    sizes = [part.rows for part in applied.micro_batches(ddp)]
    return [applied.global_batch, applied.planned_batch, [[rows.start, rows.stop] for rows in sizes]]

def not_in_parts():
    _, applied, ddp = wrapped(resize="keep-global")
    ddp(data[0][:9])

def not_weighted():
    _, applied, ddp = wrapped(resize="keep-global")
    for part in applied.micro_batches(ddp):
        ddp(data[0][part.rows])

attempt("unchosen", wrapped)
attempt("differing", lambda: wrapped(resize=("keep-global", "keep-local")[rank]))
attempt("kept", accumulate)
attempt("keep-local", keep_local)
attempt("not in parts", not_in_parts)
attempt("not weighted", not_weighted)
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def resized(tmp_path_factory):
    """What two ranks found, of the groups infer and train, in a job that was planned with a third."""
    folder = tmp_path_factory.mktemp("resizing")
    run = make_run_folder(folder / "run", batches=True)
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(folder, TWO_OF_THREE.replace('FOLDER"', f'{run.path}"', 1))]


@pytest.mark.distributed
def test_accumulated_gradients_are_those_of_one_process_with_the_planned_batch(resized):
    infer, train = (one["kept"] for one in resized)
    assert max(infer["error"], train["error"]) < 1e-6
    assert (infer["sizes"], train["sizes"]) == ([5, 4], [5, 5])
    assert (infer["batch"], train["batch"]) == (9, 10)
    assert sorted(infer["rows"] + train["rows"]) == list(range(19))
    assert train["rows"][0] == 0  # the plan's first group takes the first sample, whatever its rank is
    assert (infer["place"], train["place"]) == ("infer/0", "train/0")
    assert infer["batches"] == train["batches"] == [19, 19]


@pytest.mark.distributed
def test_kept_local_batches_say_by_how_much_the_global_one_is_smaller(resized):
    assert [one["keep-local"] for one in resized] == [[12, 19, [[0, 6]]]] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case, sentence",
    [
        ("unchosen", "this job has other ranks than planned (1 of 1 in 'train', 1 of 1 in 'infer', 0 of 1 in 'spare'), "),
        (
            "differing",
            "the ranks of this job differ in resize (keep-global on rank 0; keep-local on rank 1); give ",
        ),
        (
            "not in parts",
            "resize is 'keep-global', and this script does not take its 9 + 10 samples a step in parts",
        ),
        (
            "not weighted",
            "with resize='keep-global' the ranks of this job take 9 + 10 samples a step, and this",
        ),
    ],
)
def test_what_a_script_does_not_honour_is_refused_on_all_ranks(resized, case, sentence):
    assert [one[case].startswith(sentence) for one in resized] == [True, True], resized

"""What ranks have of their GPUs against a plan: facts by hand."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.errors import CompatibilityError, PlanError
from qsync_core.ir.plan import GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch.sharing.job_check import RankFacts, job_problem, job_warning

H200 = "NVIDIA H200"


def plan_of(train: float = 1.0, infer: float = 0.5, counts: tuple[int, int] = (1, 1)) -> PrecisionPlan:
    group = GroupPlan("train", Role.TRAIN, counts[0], DeviceType(H200, DeviceKind.CUDA, train), Precision.FLOAT32, {})
    other = attrs.evolve(group, group="infer", role=Role.INFER, count=counts[1], device=DeviceType(H200, DeviceKind.CUDA, infer))
    return PrecisionPlan("m", "", (), {}, "by hand", "", 1, 1, 0.0, None, (group, other), "train")


TRAIN = RankFacts("train", H200, "GPU-a", 132, nccl="2.28.9")
INFER = RankFacts("infer", H200, "GPU-b", 66, nccl="2.28.9")


def text(found: Exception | None, kind: type[Exception] = PlanError) -> str:
    assert type(found) is kind
    return str(found)


def test_ranks_as_they_were_planned():
    assert job_problem(plan_of(), {0: TRAIN, 1: INFER}) is None
    assert job_warning(plan_of(), {0: TRAIN, 1: INFER}) == ""


def test_ranks_that_say_nothing_of_a_gpu_are_not_compared():
    assert job_problem(plan_of(), {0: RankFacts("train"), 1: RankFacts("infer")}) is None


def test_two_versions_of_nccl():
    found = job_problem(plan_of(), {0: TRAIN, 1: attrs.evolve(INFER, nccl="2.27.5")})
    assert "different versions of NCCL (2.28.9 on rank 0; 2.27.5 on rank 1); install the same" in text(found, CompatibilityError)


def test_two_ranks_on_one_gpu_under_nccl():
    found = text(job_problem(plan_of(), {0: TRAIN, 1: INFER, 2: attrs.evolve(INFER, gpu="GPU-a")}))
    assert found.startswith(f"ranks 0, 2 are on one GPU ({H200}, GPU-a), which NCCL does not allow")


def test_two_ranks_on_one_gpu_under_gloo_need_shares_that_it_has():
    first, second = attrs.evolve(TRAIN, nccl=""), attrs.evolve(INFER, nccl="", gpu="GPU-a")
    found = text(job_problem(plan_of(), {0: first, 1: second}))
    assert "the shares of their groups ('train', 'infer') add up to 1.5 of it: move a rank" in found
    assert job_problem(plan_of(0.5, 0.5), {0: first, 1: second}) is None
    both = {0: attrs.evolve(first, allow_share=True), 1: attrs.evolve(second, allow_share=True)}
    assert job_problem(plan_of(), both) is None


def test_a_share_that_is_not_in_force_shows_in_the_sms():
    found = text(job_problem(plan_of(), {0: TRAIN, 1: attrs.evolve(INFER, sms=132)}))
    assert found.startswith(f"rank 1 may use 132 of the 132 SMs of its {H200}, but its group 'infer' has share 0.5")
    for change in ({"green": True}, {"allow_share": True}, {"device": "Tesla T4"}):
        assert job_problem(plan_of(), {0: TRAIN, 1: attrs.evolve(INFER, sms=132, **change)}) is None


@given(st.integers(1, 100), st.integers(16, 160), st.integers(-7, 7))
def test_a_percentage_that_mps_rounds_to_a_few_sms_is_in_force(percentage, sms, rounded):
    whole = attrs.evolve(TRAIN, sms=sms)
    mine = max(1, min(sms, round(sms * percentage / 100) + round(rounded * sms / 160)))
    assert job_problem(plan_of(infer=percentage / 100), {0: whole, 1: attrs.evolve(INFER, sms=mine)}) is None


def test_other_numbers_of_ranks_and_groups_without_a_rank_give_a_warning():
    found = job_warning(plan_of(counts=(2, 2)), {0: TRAIN, 1: TRAIN})
    assert "(0 instead of 2 of 'infer'); plan again from the stored profiles" in found
    assert "(1 instead of 2 of 'train', 3 instead of 2 of 'infer')" in job_warning(
        plan_of(counts=(2, 2)), {0: TRAIN, 1: INFER, 2: INFER, 3: INFER}
    )

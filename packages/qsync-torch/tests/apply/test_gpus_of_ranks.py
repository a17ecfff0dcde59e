"""What ranks say of their GPUs is refused on all, in the same words: in two processes over gloo, with facts by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_ranks import run_ranks

pytestmark = pytest.mark.distributed
BODY = """
import warnings
import attrs
from refusing_ranks import group_of, model, plan_of
from qsync_core.errors import PlanError, QSyncError
from qsync_torch import apply_
from qsync_torch.sharing import job_check, share
from qsync_torch.sharing.job_check import RankFacts

whole = RankFacts(group_of(rank), "NVIDIA H200", f"GPU-{rank}", 132, nccl="2.28.9")
CASES = {
    "nccl": attrs.evolve(whole, nccl=f"2.2{rank}"),
    "one GPU": attrs.evolve(whole, gpu="GPU-a"),
    "shares": attrs.evolve(whole, gpu="GPU-a", nccl=""),
    "sms": attrs.evolve(whole, sms=132 - 66 * rank),
    "agreed": whole,
}
plan = plan_of()
if rank:
    share._deferred.append(PlanError("CUDA has started before"))
try:
    apply_(model(), plan, group=group_of(rank))
except PlanError as error:
    print(error)
share._deferred.clear()
for case, facts in CASES.items():
    job_check.rank_facts = lambda *_: facts
    mine = model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            applied = apply_(mine, plan, group=group_of(rank))
            applied.remove()
            print(case, "applied;", *(warning.message for warning in caught if "ranks" in str(warning.message)))
        except QSyncError as error:
            assert "_qsync_applied" not in mine.__dict__
            print(case, type(error).__name__, error)
"""


def test_both_ranks_say_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    (heard, *first), (own, *second) = (out.splitlines() for out in run_ranks(tmp_path, BODY))
    assert (heard, own) == ("rank 1 refuses: CUDA has started before", "CUDA has started before")
    assert first[:-1] == second[:-1]
    begins = (
        "nccl CompatibilityError the ranks of this job run different versions of NCCL (2.20 on rank 0; 2.21 on rank 1)",
        "one GPU PlanError ranks 0, 1 are on one GPU (NVIDIA H200, GPU-a), which NCCL does not allow",
        "shares PlanError ranks 0, 1 are on one GPU (NVIDIA H200, GPU-a), and the shares of their groups (",
        "sms PlanError rank 1 may use 66 of the 132 SMs of its NVIDIA H200, but its group 'infer' has share 1",
    )
    assert all(line.startswith(begin) for line, begin in zip(first[:-1], begins, strict=True)), first
    assert first[-1].startswith("agreed applied; the plan's times do not hold: this job has other ranks than it was made for")
    assert second[-1] == "agreed applied;"

"""Ranks that do not agree end at start-up, before the first step, with a sentence; nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import EXAMPLES, run_ranks, train

from processes import Ended
from qsync_core.ir.precision import Precision

pytestmark = pytest.mark.distributed
OTHER_VERSION = Path(__file__).with_name("other_version_on_rank1.py")


def check_refused(ended: list[Ended], sentence: str, *, by: int | None = None) -> None:
    """All ranks ended before the first step with the sentence, which names the rank that refuses it, and without a traceback."""
    for rank, end in enumerate(ended):
        heard = sentence if by in (None, rank) else f"rank {by} refuses: {sentence}"
        assert end.status != 0, ended
        assert "epoch 0" not in end.output
        assert f"error: {heard}" in end.output, end
        assert "Traceback" not in end.output.partition("error: ")[0], end


def test_different_plans(make_plan):
    plans = [make_plan(), make_plan({"conv2": Precision.BFLOAT16}, "other")]
    check_refused(train(plans), "the ranks of this job hold different plans")


def test_different_versions(make_plan):
    script = [str(OTHER_VERSION), str(EXAMPLES / "train_ddp.py"), "--plan", str(make_plan())]
    ended = run_ranks([script, script], [{"QSYNC_GROUP": "train"}, {"QSYNC_GROUP": "infer"}])
    check_refused(ended, "the ranks of this job run different versions of QSync")


def test_a_group_that_the_plan_does_not_have(make_plan):
    ended = train([make_plan()] * 2, groups=("train", "inference"))
    check_refused(ended, "QSYNC_GROUP is 'inference', but the plan's groups are train, infer; set it to one of them", by=1)


def test_a_rank_that_could_be_of_either_group(make_plan):
    check_refused(train([make_plan()] * 2, groups=("train", "")), "groups train, infer all match this device", by=1)

"""Ranks and machines are killed, and the job goes on: nothing is lost but steps since a checkpoint, which run again as they ran."""

from __future__ import annotations

import pytest
from elastic_job import GROUPS, ElasticJob, differences, make_run_folder

pytestmark = pytest.mark.distributed(seconds=60)
STEPS, SAVE_EVERY = 12, 2
MORE_STEPS_THAN_RUN = 100_000
"""A rank that is left alone does not come to the end before the other is back: 400 steps took one five seconds."""
KILLS = {"infer": "forward:3 checkpoint:8", "train": "all-reduce:6 checkpoint:8"}
"""The weak group in a step, the strong group's rank 0 in an all-reduce, both in a checkpoint."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("elastic") / "run")


@pytest.fixture(scope="module")
def unbroken(run, tmp_path_factory):
    """A job that nobody disturbs: its last checkpoint, and the losses of both groups."""
    with ElasticJob(run, tmp_path_factory.mktemp("unbroken"), STEPS, SAVE_EVERY, least=2) as job:
        return job.finish(), {group: job.last_losses(group) for group in GROUPS}


def test_killed_ranks_start_again_and_the_run_is_that_of_one_that_nobody_disturbed(run, unbroken, tmp_path):
    with ElasticJob(run, tmp_path, STEPS, SAVE_EVERY, KILLS, least=2) as job:
        last = job.finish()
        starts = {group: [start.step for start in job.starts(group)] for group in GROUPS}
        assert {group: job.last_losses(group) for group in GROUPS} == unbroken[1]
    assert differences(last, unbroken[0]) == []
    assert sorted(path.name for path in tmp_path.glob("*:*")) == [
        f"{group}.{kill}" for group in sorted(GROUPS) for kill in sorted(KILLS[group].split())
    ]
    assert starts["train"] == starts["infer"]
    # The newest whole checkpoint each time.  Where one rank dies in the last checkpoint before the other has begun it, the other's
    # kill comes after the restart; by then the checkpoint may be whole.
    assert starts["train"] in ([0, 2, 4, 6], [0, 2, 4, 6, 6], [0, 2, 4, 6, 8])
    assert not list((tmp_path / "checkpoints").glob(".*.tmp"))


def test_a_machine_goes_and_comes_back_while_the_other_keeps_the_global_batch(run, tmp_path):
    with ElasticJob(run, tmp_path, MORE_STEPS_THAN_RUN, SAVE_EVERY, torchrun=True) as job:
        job.wait(lambda: len(job.losses("train")) >= 3, "the first steps")
        job.kill_machine("infer")
        job.wait(lambda: any(line["ranks"] == 1 for line in job.losses("train")), "steps of the survivor")
        job.start("infer")
        job.wait(lambda: len(job.starts("infer")) == 2 and job.losses("train")[-1]["ranks"] == 2, "steps of both")
        starts = job.starts("train")
    assert [start.ranks for start in starts] == [2, 1, 2]
    assert starts[0].step == 0 < starts[1].step < starts[2].step
    places = {line["place"] for line in job.losses("train")}
    assert places == {"train/0"}

"""``qsync doctor`` in the processes of a job: it ends, says which rank is at fault, and fails on all ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
from launching import run_machines

from forked import Forked
from processes import Ended, free_port

pytestmark = pytest.mark.distributed(seconds=40)
FAULTY = str(Path(__file__).with_name("doctor_with_fault.py"))
TIMEOUT_S = 120


def run_ranks(
    fault: str,
    rank: int,
    *arguments: str,
    world: int = 2,
    absent: int | None = None,
    leave: Collection[int] = (),
    **variables: str,
) -> list[Ended]:
    """One process per rank without torchrun, which would end those that are left; ranks to ``leave`` are not waited for."""
    port = free_port()
    processes = {}
    for own in range(world):
        place = {"RANK": str(own), "LOCAL_RANK": str(own), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        environment = os.environ | place | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | variables
        if own != absent:
            processes[own] = Forked([FAULTY, fault, str(rank), *arguments], env=environment, stderr=subprocess.STDOUT)
    try:
        outputs = {own: process.communicate(timeout=TIMEOUT_S)[0] for own, process in processes.items() if own not in leave}
    finally:
        for process in processes.values():
            process.kill()
    return [Ended(processes[own].returncode, " ".join(output.split())) for own, output in outputs.items()]


def check_blamed(ended: list[Ended], *sentences: str) -> None:
    """Rank 0 says it, and all ranks that are left fail."""
    for sentence in sentences:
        assert sentence in ended[0].output
    assert all(end.status != 0 for end in ended), ended
    assert not any("Traceback" in end.output for end in ended), ended


def test_a_slow_rank_is_named_and_the_others_wait_for_it():
    ended = run_ranks("slow", 1, "--json", QSYNC_GROUP="infer")
    found = json.loads(ended[0].output)
    assert [(rank["rank"], rank["group"]) for rank in found["ranks"]] == [(0, "infer"), (1, "infer")]
    assert found["ranks"][1]["product_ns"] > 4e8
    assert found["ranks"][1]["late_by_ns"] > found["ranks"][0]["late_by_ns"]
    assert [entry["bytes"] for entry in found["all_reduce"]] == [mib << 20 for mib in (1, 4, 25, 100)]
    lines = {line["topic"]: line for line in found["lines"]}
    assert "products take" in lines["speed: rank 1"]["finding"]
    assert "the others wait for rank 1" in lines["last to all-reduces"]["finding"]
    assert [end.status for end in ended] == [0, 0]
    assert ended[1].output == ""


def test_a_rank_ends_where_another_program_has_the_port_and_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = os.environ | place | {"MASTER_PORT": str(silent.getsockname()[1]), "QSYNC_RANK_TIMEOUT_S": "1"}
        ended = Forked(["-m", "qsync", "doctor"], env=environment)
        _, said = ended.communicate(TIMEOUT_S)
    assert ended.returncode == 1
    waited = "rank 1 waited 1 s for rank 0, which keeps the store there (what listens there says nothing, as another program would"
    assert said.startswith(f"error: the ranks of this job did not meet at 127.0.0.1:{environment['MASTER_PORT']}: {waited}")


def test_a_rank_that_stops_in_an_all_reduce_is_named():
    ended = run_ranks("stops", 1, "--timeout", "4")
    check_blamed(
        ended, "an all-reduce of 1 MiB over gloo failed because of rank 1", "its probe is stopped, and gives no sign of life"
    )


@pytest.mark.nightly
def test_a_rank_that_is_frozen_before_it_has_said_what_it_has_is_named():
    ended = run_ranks("stops whole", 1, QSYNC_RANK_TIMEOUT_S="8", leave=(1,))
    check_blamed(ended, "saying what it has", "failed because of rank 1", "has ended or is stopped, and gives no sign of life")


def test_a_rank_that_is_frozen_while_its_probe_measures_on_is_named():
    ended = run_ranks("stops its rank", 1, QSYNC_RANK_TIMEOUT_S="4", leave=(1,))
    check_blamed(ended, "saying that all was measured failed because of rank 1", "is stopped, and gives no sign of life")


@pytest.mark.nightly
def test_an_all_reduce_that_hangs_between_ranks_that_live():
    ended = run_ranks("hangs", 1, "--timeout", "4")
    check_blamed(ended, "an all-reduce of 1 MiB over gloo did not end within 4 s on any rank; all began it and live")


@pytest.mark.nightly
def test_a_probe_that_dies_is_named_with_its_signal():
    ended = run_ranks("dies", 1)
    check_blamed(ended, "failed because of rank 1: on ", "its probe was ended by SIGKILL")


def test_a_rank_that_never_comes_is_named():
    ended = run_ranks("none", 2, world=3, absent=1, QSYNC_RANK_TIMEOUT_S="6")
    check_blamed(ended, "rank 1 of 3 did not come within 6 s", "has not come")


def test_other_versions_of_qsync_end_it_before_anything_else():
    ended = run_ranks("other version", 1)
    check_blamed(ended, "qsync-core 0.1.0, qsync-torch 9.9.9 on rank 1", "install the same versions everywhere")


@pytest.mark.nightly
def test_under_torchrun_a_rank_that_is_killed_whole_is_named_before_all_end():
    (ended,) = run_machines([[FAULTY, "ends whole", "1", "--timeout", "20"]], [{}], per_machine=2)
    assert ended.status != 0
    output = " ".join(ended.output.split())
    assert "failed because of rank 1: on " in output
    assert "its process has ended or is stopped, and gives no sign of life" in output

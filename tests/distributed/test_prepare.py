"""``qsync prepare`` on two gloo ranks with a disk each, and whatever may interrupt it."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from forked import Forked
from processes import free_port
from qsync_core.artifacts.files import load
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.timeline import Timeline
from qsync_core.run_folder import RunFolder

pytestmark = pytest.mark.distributed(seconds=80)

JOB = f"{Path(__file__).with_name('tiny_job.py')}:make_job"
TIMEOUT_S = 180
GROUPS = ("strong", "weak")


@attrs.frozen
class Ended:
    """How a rank's process ended."""

    status: int
    out: str
    error: str

    @property
    def sentence(self) -> str:
        """The error that it ends with."""
        return self.error.strip().splitlines()[-1]


@contextmanager
def started(
    folders: Sequence[Path],
    environments: Sequence[Mapping[str, str]] = (),
    port: int = 0,
    roles: bool = True,
    options: Sequence[str] = (),
) -> Iterator[list[Forked]]:
    """A rank for each folder, as torchrun starts it; those that are left are killed."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": str(len(folders))}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "QSYNC_RANK_TIMEOUT_S": "20"}
    processes = []
    for rank, folder in enumerate(folders):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "QSYNC_GROUP": GROUPS[min(rank, 1)]}
        command = ["-m", "qsync", "prepare", JOB, "-o", str(folder), "--device", "cpu", "--json"]
        command += ["--group", "strong=role:train"] if roles else []
        command += options
        environment = {**os.environ, **shared, **own, **(environments[rank] if environments else {})}
        processes.append(Forked(command, env=environment))
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def prepare(folders: Sequence[Path], environments: Sequence[Mapping[str, str]] = (), **options: Any) -> list[Ended]:
    with started(folders, environments, **options) as processes:
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    return [Ended(process.returncode, out, error) for process, (out, error) in zip(processes, said, strict=True)]


def made(ended: Sequence[Ended]) -> set[str]:
    """What a run that went well has made anew."""
    assert [one.status for one in ended] == [0] * len(ended), ended
    return set(json.loads(ended[0].out)["made"])


@pytest.fixture
def disks(tmp_path) -> list[Path]:
    return [tmp_path / "disk0" / "run", tmp_path / "disk1" / "run"]


def test_every_disk_gets_the_same_folder_and_only_what_changed_is_made_again(disks):
    unequal = [{}, {"STEP_S": "0.03", "LENGTH": "3"}]
    ended = prepare(disks, unequal, roles=False)
    first = made(ended)
    assert {"probe strong", "probe weak", "reprobe strong", "reprobe weak"} <= first
    assert "what depends on the roles is made again" not in ended[0].error
    assert "#0 has activations of [4, 3, 6], and of [4, 2, 6] in the graph): here operators" in ended[0].error
    assert {"graph", "communication strong+weak", "profile strong", "profile weak", "observations", "plan strong+weak"} <= first
    assert ended[1].out == ""
    run = RunFolder(disks[0])
    assert run.planned_groups() == [("strong", "weak"), ("strong",), ("weak",)]
    cluster = run.read_cluster()
    assert [(group.name, group.role, group.count) for group in cluster.groups] == [
        ("strong", Role.TRAIN, 1),
        ("weak", Role.INFER, 1),
    ]
    assert {frozenset(link.between) for link in cluster.links} == {frozenset(GROUPS)}
    plan = run.load_plan(GROUPS)
    lines = [line.strip() for line in run.start.read_text().splitlines() if line.startswith("  ")]
    assert lines == json.loads(ended[0].out)["commands"]
    assert len(lines) == len(plan.recommended_groups)
    assert all(line in run.report.read_text(encoding="utf-8") for line in lines)
    assert load(run.timeline("predicted", GROUPS), Timeline).iteration_ns == plan.predicted_iteration_ns
    assert [group.role for group in run.load_plan(["weak"]).groups] == [Role.TRAIN], "alone, a group has no other to keep up with"
    assert "share cores of" in ended[0].error
    assert re.search(r"^\[ *\d+ s\] weak, ", ended[0].error, re.MULTILINE), "rank 0 shows how far the others are, every second"
    files = sorted(str(path.relative_to(disks[0])) for path in disks[0].rglob("*") if path.is_file() and path.name != "lock")
    assert filecmp.cmpfiles(*disks, files, shallow=False)[0] == files
    assert not [name for name in files if "partial" in name or "tmp" in name]

    assert made(prepare(disks, unequal, roles=False)) == set()

    # A person's word on one disk goes to the other; measurements stay.
    text = run.cluster.read_text()
    changed = text.replace('role = "infer"\n', 'role = "infer"\nmemory = "1 GiB"\n')
    RunFolder(disks[1]).cluster.write_text(changed)
    again = made(prepare(disks, roles=False))
    assert "plan strong+weak" in again
    assert not {name for name in again if name.startswith(("profile", "observations", "communication", "probe"))}
    assert run.cluster.read_text() == changed
    assert run.load_plan(GROUPS).group("weak").memory_budget_bytes == 1 << 30

    # So does a file that is named in the command, whatever the disks have.
    named = disks[0].parent / "named.toml"
    named.write_text(changed.replace("1 GiB", "2 GiB"))
    assert "plan strong+weak" in made(prepare(disks, roles=False, options=["--cluster", str(named)]))
    assert [RunFolder(disk).cluster.read_text() for disk in disks] == [named.read_text()] * 2
    assert run.load_plan(GROUPS).group("weak").memory_budget_bytes == 2 << 30

    # One for which there is no plan leaves the file that the plans are for.
    narrow = named.with_name("narrow.toml")
    narrow.write_text(changed.replace("1 GiB", "1 KiB"))
    refused = prepare(disks, roles=False, options=["--cluster", str(narrow)])
    assert [one.status for one in refused] == [1, 1], refused
    assert "1 KiB" in refused[0].sentence
    assert [RunFolder(disk).cluster.read_text() for disk in disks] == [named.read_text()] * 2


def test_two_ranks_in_each_group_measure_among_all_and_among_themselves(tmp_path):
    groups = ("strong", "strong", "weak", "weak")
    first = made(prepare([tmp_path / "run"] * 4, [{"QSYNC_GROUP": group} for group in groups]))
    run = RunFolder(tmp_path / "run")
    assert {(group.name, group.count) for group in run.read_cluster().groups} == {("strong", 2), ("weak", 2)}
    for names, ranks in ((GROUPS, 4), (["strong"], 2), (["weak"], 2)):
        assert f"communication {'+'.join(names)}" in first
        costs = load(run.communication(names), CollectiveCosts)
        assert costs.ranks == dict.fromkeys(names, 2)
        assert [entry.all_reduce.world_size for entry in costs.measured] == [ranks]
        assert run.load_plan(names).communication is not None
    alone = run.load_plan(["strong"]).predicted_iteration_ns
    assert run.load_plan(GROUPS).verdict.training_only_ns == alone, "the verdict's job without others is that of the plan for it"


def test_what_interrupts_one_rank_ends_both_with_a_sentence_and_the_folder_continues(disks):
    """One after the other in one folder: a job that fails, a full disk, a power cut; then nothing."""
    ended = prepare(disks, [{}, {"FAIL": "1"}])
    assert [one.status for one in ended] == [1, 1], ended
    assert "make_job failed: FileNotFoundError: there is no data set on this machine" in ended[1].sentence
    assert ended[0].sentence.startswith("error: rank 1 refuses: ")

    ended = prepare(disks, [{}, {"MOST_BYTES": "3000"}])
    assert [one.status for one in ended] == [1, 1], ended
    assert f"cannot write {disks[1]}" in ended[1].sentence
    assert "File too large; make room or name another folder with -o, and start 'qsync prepare' again" in ended[1].sentence
    assert ended[0].sentence.startswith(f"error: rank 1 refuses: cannot write {disks[1]}")

    dying = {"DIE_AT": str(disks[1] / "profiles" / "strong.qsync"), "QSYNC_RANK_TIMEOUT_S": "3"}
    lost, died = prepare(disks, [{"QSYNC_RANK_TIMEOUT_S": "3"}, dying])
    assert died.status == -signal.SIGKILL
    assert lost.status == 1
    assert "error: rank 1 gave no sign of life for 3 s while rank 0 waited for it in qsync prepare" in lost.sentence

    again = made(prepare(disks))
    assert {"profile weak", "plan strong+weak"} <= again
    assert not {"graph", "communication strong+weak", "probe strong", "probe weak", "observations"} & again
    assert load(RunFolder(disks[1]).plan(GROUPS), PrecisionPlan).model == "tiny"


def test_ranks_with_different_jobs_are_told_so(disks):
    ended = prepare(disks, [{}, {"WIDTH": "9"}])
    assert [one.status for one in ended] == [1, 1], ended
    assert ended[0].sentence == ended[1].sentence
    assert ended[0].sentence.startswith("error: the ranks of this job differ in optimizer (")

    ended = prepare(disks, [{}, {"BATCH": "2"}])
    assert [one.status for one in ended] == [1, 1], ended
    assert "batch size 4 and the job has 2; give --batch-size 4, or give this rank the job of rank 0, which " in ended[1].sentence


def test_two_in_one_folder_and_a_lock_that_the_dead_do_not_hold(tmp_path):
    run, go = tmp_path / "run", tmp_path / "go"
    with started([run], [{"WAIT_FOR": str(go)}]) as (first,):
        end = time.monotonic() + TIMEOUT_S
        while not (run / ".prepare" / "lock").exists():
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        (refused,) = prepare([run])
        assert refused.status == 1
        assert f"another 'qsync prepare' works in {run} (process {first.pid} on {socket.gethostname()})" in refused.sentence
        first.kill()
        first.wait()
    assert "plan strong" in made(prepare([run]))


def test_a_folder_that_cannot_be_written_and_a_port_in_use(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (ended,) = prepare([file / "run"])
    assert (ended.status, ended.sentence.startswith(f"error: cannot write {file / 'run'}")) == (1, True), ended
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started([tmp_path / "run", tmp_path / "run"], port=port) as (first, _):
            _, error = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 1
    assert f"cannot meet at 127.0.0.1:{port}: another process has that port" in error

"""What rank 0 says of facts and times that are made up."""

from __future__ import annotations

import json

import attrs
import pytest

from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_torch.doctor.advice import what_to_try
from qsync_torch.doctor.findings import job_findings, lags_ns, transfer_ns
from qsync_torch.doctor.rank_facts import RankFacts, find_facts
from qsync_torch.doctor.seen import Seen, Trouble

H200 = RankFacts(
    rank=0,
    host="a",
    group="train",
    device="NVIDIA H200",
    gpu="GPU-0",
    capability=(9, 0),
    arch_list=("sm_75", "sm_80", "sm_90"),
    versions={"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "driver": "580.1", "python": "3.12.1"},
    cores=16,
    memory_free_bytes=140 << 30,
    memory_bytes=141 << 30,
    share="",
    mps="no MPS daemon answers at /tmp/nvidia-mps",
    shared_memory_bytes=64 << 30,
    container=False,
    infiniband=(),
    interfaces=("eth0",),
    loopback_name=False,
    settings={},
    problems=(),
)
QUIET = Trouble("all-reduce 1", 30.0, told=False, missing=(0, 1), not_entered=(), gone=(), stopped=(), died={}, warnings={})


def gpus(*changes: dict[str, object]) -> dict[int, RankFacts]:
    """Ranks on machines ``a``, with a GPU each, and what is other about each."""
    return {rank: attrs.evolve(H200, **{"rank": rank, "gpu": f"GPU-{rank}", **change}) for rank, change in enumerate(changes)}


def seen(facts: dict[int, RankFacts], **more: object) -> Seen:
    hosts = {rank: found.host for rank, found in facts.items()}
    values = {"speeds": {rank: [1e6, 1e6] for rank in facts}, "all_reduces": {}, "rounds": {}, "trouble": None, **more}
    return Seen(len(facts), hosts, dict.fromkeys(facts, "qsync-core 0.1.0"), facts, "nccl", **values)


def lines_of(found: Seen) -> dict[str, DoctorLine]:
    return {line.topic: line for line in job_findings(found).lines}


def test_ranks_in_order_are_one_line_and_all_is_well():
    found = job_findings(seen(gpus({}, {})))
    assert [line.finding for line in found.lines] == ["all 2 ranks have the same versions, reach each other, and keep step"]
    assert not found.failed


@pytest.mark.parametrize(
    ("name", "status", "advice"),
    [
        ("nccl", Status.ERROR, "NCCL of different versions may hang or fail"),
        ("torch", Status.ERROR, "install the same version everywhere"),
        ("cuda", Status.WARNING, "does not matter to collectives as long as NCCL is the same"),
        ("driver", Status.INFO, "does not matter, as long as each serves its machine's CUDA"),
    ],
)
def test_a_version_that_differs_is_told_with_its_ranks_and_whether_it_matters(name, status, advice):
    found = seen(gpus({}, {"versions": {**H200.versions, name: "1.0"}}, {}))
    line = lines_of(found)[f"ranks: {name}"]
    here = H200.versions[name].partition("+")[0]
    assert (line.finding, line.status) == (f"{here} on ranks 0, 2; 1.0 on rank 1", status)
    assert line.advice.startswith(advice)
    assert job_findings(found).failed is (status is Status.ERROR)


def test_builds_of_one_torch_for_two_cudas_are_one_release():
    versions = {**H200.versions, "torch": "2.13.0+cu126", "cuda": "12.6"}
    assert set(lines_of(seen(gpus({}, {"versions": versions})))) == {"ranks: cuda"}


def test_a_v100_among_h200s_needs_the_wheel_that_serves_both():
    old = {"device": "Tesla V100-SXM2-32GB", "capability": (7, 0)}
    line = lines_of(seen(gpus({}, old)))["ranks: kernels"]
    assert line.finding == "the torch on rank 1 has none for Tesla V100-SXM2-32GB (sm_70); it has sm_75, sm_80, sm_90"
    assert line.advice.endswith("pip install torch --index-url https://download.pytorch.org/whl/cu126")
    assert line.status is Status.ERROR


def test_two_ranks_on_one_gpu_are_refused_by_nccl():
    line = lines_of(seen(gpus({"gpu": "GPU-x"}, {"gpu": "GPU-x"})))["ranks: one GPU"]
    assert line.finding == "ranks 0, 1 are on one GPU of a, which NCCL refuses, so gloo was timed"


def test_a_rank_is_slow_beside_its_own_kind_only():
    weak = {"device": "Tesla T4", "capability": (7, 5)}
    facts = gpus({}, weak, weak, {})
    speeds = {0: [1e6, 1e6], 1: [9e6, 3e6], 2: [9e6, 6e6], 3: [1e6, 1e6]}
    lines = lines_of(seen(facts, speeds=speeds))
    assert set(lines) == {"speed: rank 2"}
    assert lines["speed: rank 2"].finding == "on a, copies take 2.0 times as long as on rank 1, which has the same device"


def test_fewer_cores_explain_a_slow_cpu():
    facts = gpus({"gpu": "", "versions": {"torch": "2.13.0"}}, {"gpu": "", "versions": {"torch": "2.13.0"}, "cores": 4})
    line = lines_of(seen(facts, speeds={0: [1e6, 1e6], 1: [4e6, 1e6]}))["speed: rank 1"]
    assert line.advice.startswith("it may use 4 cores, others 16")


@pytest.mark.parametrize(
    ("product_ns", "status", "says"),
    [
        (6e6, Status.INFO, "after work that takes 1.00 ms on the fastest rank and 6.00 ms on this one"),
        (1.1e6, Status.WARNING, "and no more than 1.10 ms on this one when it was timed by itself"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_and_whether_its_device_explains_it(product_ns, status, says):
    slow = {"device": "Tesla T4"}
    found = seen(
        gpus({}, slow, slow),
        speeds={0: [1e6, 1e6], 1: [product_ns, 1e6], 2: [product_ns, 1e6]},
        rounds={0: [5_100_000, 5_200_000], 1: [100_000, 200_000], 2: [4_000_000, 4_100_000]},
    )
    line = lines_of(found)["last to all-reduces"]
    assert line.status is status
    assert line.finding.startswith("the others wait for rank 1 (a): it comes 5.00 ms after the first")
    assert says in line.finding


def test_lags_come_from_durations_alone():
    assert lags_ns({0: [10, 30, 10], 1: [4, 4, 4], 2: [10, 10, 12]}) == {0: 0, 1: 8, 2: 0}
    assert transfer_ns({0: [10, 30, 10], 1: [4, 5, 6]}) == 5


def test_a_hang_between_machines_says_what_to_try_with_what_is_there():
    facts = gpus({}, {"host": "b", "infiniband": ("mlx5_0",), "interfaces": ("docker0", "eth0")})
    lines = job_findings(seen(facts, trouble=QUIET)).lines
    assert lines[0].finding == (
        "an all-reduce of 4 MiB over nccl did not end within 30 s on any rank; all began it and live, so it hangs between them"
    )
    assert [line.finding.partition(":")[0] for line in lines if line.topic == "try"] == [
        "NCCL_SOCKET_IFNAME=eth0",
        "NCCL_IB_DISABLE=1",
        "NCCL_DEBUG=INFO",
    ]


def test_a_hang_inside_a_container_asks_for_shared_memory_and_leaves_out_what_is_set():
    facts = gpus(*[{"container": True, "shared_memory_bytes": 64 << 20, "settings": {"NCCL_DEBUG": "INFO"}}] * 2)
    advice = what_to_try(facts, "nccl")
    assert [text.partition(":")[0] for text in advice] == ["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"]
    assert "too small (64 MiB on a): start the container with --shm-size=8g" in advice[1]


def test_gloo_is_told_its_interface_where_a_name_leads_to_the_loopback():
    facts = gpus({"loopback_name": True}, {"host": "b", "interfaces": ("eth0", "ib0")})
    assert what_to_try(facts, "gloo") == ["GLOO_SOCKET_IFNAME=eth0: on a the machine's own name leads to its loopback address"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gone": (1,)}, "failed because of rank 1: on a, its process has ended or is stopped, and gives no sign of life"),
        ({"stopped": (1,)}, "failed because of rank 1: on a, its probe is stopped, and gives no sign of life"),
        ({"not_entered": (0,)}, "failed because of rank 0: on a, it lives, but did not begin it"),
        (
            {"died": {0: "ended with status 1: RuntimeError: Connection closed by peer", 1: "was ended by SIGKILL"}},
            "failed because of rank 1: on a, its probe was ended by SIGKILL",
        ),
        (
            {"died": {0: "ended with status 1: Connection reset by peer"}, "gone": (1,)},
            "failed because of rank 1: on a, its process has ended or is stopped, and gives no sign of life",
        ),
        ({"missing": (1,)}, "did not end within 30 s on rank 1, which live"),
    ],
)
def test_the_rank_to_blame_is_told_from_those_that_suffer(change, says):
    line = job_findings(seen(gpus({}, {}), trouble=attrs.evolve(QUIET, **change))).lines[0]
    assert line.finding == f"an all-reduce of 4 MiB over nccl {says}"
    assert line.status is Status.ERROR


def test_a_rank_that_did_not_come_has_its_row():
    came = gpus({}, {})
    trouble = attrs.evolve(QUIET, step="here", missing=(2,))
    found = Seen(3, {0: "a", 1: "a"}, {0: "q", 1: "q"}, came, "", {}, {}, {}, trouble, master="node0:29500")
    findings = job_findings(found)
    assert findings.lines[0].finding == "rank 2 of 3 did not come within 30 s"
    assert "the same MASTER_ADDR and MASTER_PORT (node0:29500)" in findings.lines[0].advice
    assert findings.tables[0].rows[2][:3] == ["2", "has not come", "?"]


def test_a_machines_own_warning_is_printed_once_with_its_ranks():
    warning = DoctorLine("mps", "a server is in the state FAULT", Status.WARNING, "wait")
    lines = job_findings(seen(gpus({"problems": (warning,)}, {}, {"problems": (warning,)}))).lines
    assert [(line.topic, line.finding) for line in lines] == [("mps (ranks 0, 2)", "a server is in the state FAULT")]


def test_facts_of_this_machine_survive_json():
    facts = find_facts(3)
    assert RankFacts.from_data(json.loads(json.dumps(facts.data()))) == attrs.evolve(
        facts, capability=[*facts.capability], problems=[*facts.problems]
    )
    assert facts.memory_bytes > facts.memory_free_bytes > 0
    assert facts.cores >= 1

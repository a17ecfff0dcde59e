"""What communication costs, measured by three processes over gloo; compute of given times stands for a GPU's."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forked import Forked
from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.artifacts.files import load
from qsync_core.cluster_file import read_cluster
from qsync_core.errors import ClusterError, JobError, RankError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts, buckets_under
from qsync_core.ir.dag import Bucket, OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch.distributed.ranks import naming_lost_ranks, which_group_of_cluster
from qsync_torch.load_job import load_job
from qsync_torch.profiling import communication, contention
from qsync_torch.profiling.communication import bucket_sizes, measure_communication
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.trace import trace

SCRIPT = Path(__file__).with_name("communicating_ranks.py")
EXAMPLES = Path(__file__).parents[4] / "examples"
SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "QSYNC_RANK_TIMEOUT_S": "6", "OMP_NUM_THREADS": "1"}
MODEL_BYTES = 4 * (6 * 5 + 5 + 5 * 3 + 3)


def run(commands: list[list[str]], variables: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """Status, standard output and standard error of each process."""
    environment = {name: value for name, value in os.environ.items() if name != "QSYNC_GROUP"} | SETTINGS
    processes = [Forked(command, env=environment | added) for command, added in zip(commands, variables, strict=True)]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """By case, what each of the three ranks found or raised."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = run([[str(SCRIPT), str(rank), str(folder)] for rank in range(3)], [{}] * 3)
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    found = [json.loads(out) for _, out, _ in ended]
    return {case: [one[case] for one in found] for case in found[0]}


@pytest.mark.distributed
@pytest.mark.parametrize("case, buffers", [("with_buffers", True), ("without_buffers", False)])
def test_every_rank_gets_the_same_costs(ranks, case, buffers):
    costs = [from_plain(plain, CollectiveCosts) for plain in ranks[case]]
    assert costs == [costs[0]] * 3
    found = costs[0]
    assert found.ranks == {"train": 1, "infer": 2}
    assert {device.name for device in found.devices.values()} == {"cpu"}
    assert found.software["infer"]["torch"] == str(torch.__version__)
    assert [(entry.max_ctas, entry.slowdown) for entry in found.measured] == [(0, {"train": 0.0, "infer": 0.0})]
    model = found.measured[0].all_reduce
    assert (model.world_size, model.backend) == (3, "gloo")
    own_bytes = MODEL_BYTES + (4 * 2 * 5 if buffers else 0)  # a norm has a weight and a bias for each of 5 channels
    assert own_bytes in dict(model.measured)
    assert all(rate > 0 for rate in found.copy_ns_per_byte.values())
    assert (found.broadcast_ns > 0) is buffers


@pytest.mark.distributed
def test_some_ranks_measure_what_a_job_of_them_alone_would_pay(ranks):
    """Two of the three, while the third is elsewhere."""
    absent, *costs = ranks["pair"]
    assert absent is None
    first, second = (from_plain(plain, CollectiveCosts) for plain in costs)
    assert first == second
    assert first.ranks == {"infer": 2}
    model = first.measured[0].all_reduce
    assert (model.world_size, model.backend) == (2, "gloo")
    assert first.broadcast_ns > 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case, kind, text",
    [
        ("other_graph", "PlanError", "the ranks of this job differ in graph ("),
        (
            "other_counts",
            "ClusterError",
            "group 'train' of the cluster file has 2 ranks, and 1 of this job's 3 processes are",
        ),
        (
            "no_such_group_here",
            "ClusterError",
            "group 'more' of the cluster file has 1 ranks, and 0 of this job's 3 processes are",
        ),
        (
            "other_shares",
            "PlanError",
            "group 'infer' has devices of different types (cpu at 100% and cpu at 50%, ranks 1, 2)",
        ),
        (
            "other_channels",
            "PlanError",
            "in NCCL's channels (its own on ranks 0, 2; NCCL_MAX_CTAS=2 on rank 1)",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_say_the_same(ranks, case, kind, text):
    assert text in ranks[case][0][1]
    assert ranks[case] == [[kind, ranks[case][0][1]]] * 3


SAMPLE = ["prepare", "alone", "prepare", "open"]


def holds(said: list[str]) -> list[int]:
    return [int(text.removeprefix("hold ")) for text in said]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case, measuring, share", [("one_computes", [0], 1 - 1000 / 1250), ("two_compute", [1, 2], 1 - 1000 / 2000)]
)
def test_the_slowest_rank_of_a_group_decides_while_the_others_hold(ranks, case, measuring, share):
    for rank, (found, is_bound, said) in enumerate(ranks[case]):
        assert (found, is_bound) == (share, False)
        if rank in measuring:
            assert said == SAMPLE * 3
        else:
            assert len(set(holds(said))) == 1
            assert len(said) == 3
            assert holds(said)[0] > 2 * 1000


@pytest.mark.distributed
def test_a_collective_that_ended_too_early_is_held_for_longer(ranks):
    (_, is_bound, said), *others = ranks["too_short_once"]
    assert not is_bound
    assert said == SAMPLE * 4
    for _, _, said in others:
        first, *rest = holds(said)
        assert first < rest[0]
        assert rest == [rest[0]] * 3


@pytest.mark.distributed
def test_where_none_stays_open_the_share_is_said_to_be_a_bound(ranks):
    (share, is_bound, said), *others = ranks["never_held"]
    assert (share, is_bound, said) == (1 - 1000 / 1250, True, SAMPLE * 3)
    for _, _, said in others:
        assert sorted(set(holds(said))) == holds(said)


@pytest.mark.distributed
@pytest.mark.parametrize("case, factor, repeats", [("all_compute", 5.0 / 2.0, 2), ("compute_does_not_matter", 1.0, 1)])
def test_all_reduces_beside_compute(ranks, case, factor, repeats):
    """Of the medians of 4, 6 and 10 ms, each without its first sample, for the all-reduces that fit in half of 10 ms.

    Compute takes 2 ms of 4 longer, nothing of 6, and more than all of 10.
    """
    sample = ["prepare", f"hold {10 + 100_000 * repeats}", "time", "on the side:", "wait for it", "all-reduce of 1", "time"]
    sample += ["all-reduce of 8"] * repeats + ["time", "beside it:", "issue", "time"]
    said = ["all-reduce of 1", *sample * 3, "all-reduce of 1"]  # which find the shortest pass, and the slowest
    assert ranks[case] == [[factor, pytest.approx(lost), said] for lost in (0.5, 0.0, 1.0)]


@pytest.mark.distributed
def test_no_group_of_the_same_ranks_reads_what_an_earlier_one_left_in_the_store(ranks):
    assert ranks["groups_again_and_again"] == [[False] * 5 * groups for groups in (1, 4, 3)]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["fails_alone", "fails_while_open", "no_memory_to_prepare"])
def test_a_rank_that_fails_ends_the_others_and_leaves_the_process_group_in_step(ranks, case):
    heard = ["RankError", "rank 1 fails with RuntimeError in communicate: no memory is left"]
    assert ranks[case] == [heard, ["RuntimeError", "no memory is left"], heard]
    assert [one[0] for one in ranks["one_computes_again"]] == [1 - 1000 / 1250] * 3


LEAVES = """
import os, signal, sys, torch, torch.distributed as dist
from qsync_core.errors import QSyncError
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.ranks import naming_lost_ranks
from qsync_torch.distributed.watch import watched
os.environ["QSYNC_RANK_TIMEOUT_S"] = "4"
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
try:
    with watched("qsync communicate", Mailbox.of_group(None)) as gone, naming_lost_ranks("qsync communicate", gone):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
except QSyncError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.mark.distributed
def test_a_rank_that_dies_in_a_collective_is_named_in_a_sentence(tmp_path):
    (status, out, _), (died, _, _) = run([["-c", LEAVES, str(rank), str(tmp_path / "store")] for rank in range(2)], [{}] * 2)
    assert (status, died) == (0, -signal.SIGKILL)
    sentence = "rank 1 of this job has failed, or cannot be reached any more, while this one was in qsync communicate: see what"
    assert out.startswith(f"RankError {sentence} was printed there last (")


def test_errors_of_this_rank_are_not_those_of_another():
    with pytest.raises(RuntimeError, match=r"^no memory is left$"), naming_lost_ranks("qsync communicate"):
        raise RuntimeError("no memory is left")


def test_the_command_says_at_once_that_it_is_alone(tmp_path):
    [(status, out, error)] = run([["-mqsync_core.cli", "communicate", "no-such-job", "-o", str(tmp_path / "costs.qsync")]], [{}])
    assert (status, out) == (1, "")
    assert "error: communication is measured among all ranks of a job, and this process is alone" in " ".join(error.split())


def test_alone_there_is_nothing_to_measure():
    job = load_job("resnet18:image=32", 2)
    with pytest.raises(RankError, match="this process is alone: start it with torchrun on every machine"):
        measure_communication(job, trace(job), group="train")


@pytest.fixture
def without_a_gpu(monkeypatch):
    """What is asked of a GPU is answered in its place."""
    monkeypatch.setattr(contention, "_device_ns", lambda work: contention._CALIBRATION_CYCLES)
    monkeypatch.setattr(contention.Backward, "wait", lambda backward: None)


def runner_with_memory_for(samples: int, asked: list[int], monkeypatch) -> StepRunner:
    """A step whose forward runs out of memory above a batch size; the sizes that it is asked for are written down."""
    runner = StepRunner.start(load_job("resnet18:image=64", 8), torch.device("cpu"), batches=1)
    inner = StepRunner.forward

    def forward(self, step):
        asked.append(self.batches[0].size)
        if asked[-1] > samples:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(self, step)

    monkeypatch.setattr(StepRunner, "forward", forward)
    return runner


@pytest.mark.parametrize("samples, asked", [(8, [8, 8]), (3, [8, 4, 2, 2]), (1, [8, 4, 2, 1, 1])])
def test_a_batch_that_does_not_fit_in_the_base_precision_is_halved(without_a_gpu, monkeypatch, samples, asked):
    sizes: list[int] = []
    runner = runner_with_memory_for(samples, sizes, monkeypatch)
    backward = contention.Backward(runner, torch.device("cpu"))
    assert sizes == asked
    assert backward.spin_ns > 0


def test_a_single_sample_that_does_not_fit_is_an_error(without_a_gpu, monkeypatch):
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        contention.Backward(runner_with_memory_for(0, [], monkeypatch), torch.device("cpu"))


def with_parameters(sizes: list[int], cap: int) -> PrecisionDag:
    """A graph of parameters alone, in buckets of a number of parameters."""
    names = [f"p{index}" for index in range(len(sizes))]
    parameters = tuple(Parameter(name, (size,)) for name, size in zip(names, sizes, strict=True))
    starts = range(0, len(sizes), cap)
    buckets = tuple(Bucket(tuple(names[at : at + cap]), 4 * sum(sizes[at : at + cap])) for at in starts)
    return PrecisionDag("m", (Operator(OpId("x"), "input", OpClass.FIXED, (), (), (1,)),), parameters, buckets)


@given(st.lists(st.integers(1, 40 << 20), min_size=1, max_size=30), st.integers(1, 5))
def test_sizes_are_those_of_some_buckets_with_the_least_and_the_whole_model(sizes, cap):
    dag = with_parameters(sizes, cap)
    found = bucket_sizes(dag)
    assert list(found) == sorted(set(found))
    assert len(found) <= 8
    assert found[-1] == 4 * sum(sizes)
    possible = {bucket.nbytes for cap_mb in (None, 50, 100) for bucket in buckets_under(dag, cap_mb)} | {4 * sum(sizes)}
    assert found[0] == min(possible)
    assert set(found) <= possible
    assert len(found) == min(8, len(possible))


def test_a_model_without_gradients_has_nothing_to_reduce():
    with pytest.raises(JobError, match="m has no gradients to reduce: none of its parameters is trained"):
        bucket_sizes(with_parameters([], 1))


def started(tmp_path: Path, groups: list[str], *more: str) -> list[tuple[int, str, str]]:
    """``qsync communicate`` on the example's job, in two processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    job = [f"{EXAMPLES / 'digits_net.py'}:job", "--batch-size", "32", "--device", "cpu", *more]
    commands = [["-mqsync_core.cli", "communicate", *job, "-o", str(tmp_path / f"{rank}.qsync")] for rank in range(2)]
    variables = [rendezvous | {"RANK": str(rank)} | ({"QSYNC_GROUP": group} if group else {}) for rank, group in enumerate(groups)]
    return run(commands, variables)


@pytest.mark.distributed
def test_the_command_writes_one_file_on_rank_0(tmp_path):
    ended = started(tmp_path, ["train", "infer"], "--cluster", str(EXAMPLES / "cluster.toml"), "--json")
    assert [status for status, _, _ in ended] == [0, 0], ended
    costs = load(tmp_path / "0.qsync", CollectiveCosts)
    assert not (tmp_path / "1.qsync").exists()
    assert ended[1][1] == ""
    printed = json.loads(ended[0][1])
    assert printed["ranks"] == costs.ranks == {"train": 1, "infer": 1}
    assert printed["broadcast_ns"] == costs.broadcast_ns
    assert printed["measured"][0]["all_reduce"] == [
        {"bytes": size, "ns": duration} for size, duration in costs.measured[0].all_reduce.measured
    ]


@pytest.mark.distributed
def test_a_process_whose_group_is_not_known_ends_both(tmp_path):
    ended = started(tmp_path, ["train", ""])
    sentence = "this process's group is not known: set QSYNC_GROUP for every process, or give --cluster"
    assert [(status, out) for status, out, _ in ended] == [(1, "")] * 2
    # c10d may have logged a connection that the other has closed by then.
    other, own = (" ".join(error[error.index("error: ") :].split()) for _, _, error in ended)
    assert own == f"error: {sentence}"
    # The second where rank 0 is too busy for long to hear rank 1's own words.
    assert other in (
        f"error: rank 1 refuses: {sentence}",
        f"error: rank 1 has failed in qsync communicate (ClusterError: {sentence}): see what it printed last",
    )


@pytest.mark.parametrize(
    "environment, sentence",
    [
        (
            {"QSYNC_GROUP": "inference"},
            "QSYNC_GROUP is 'inference', but the cluster file's groups are train, infer; set it to one of them",
        ),
        (
            {},
            "groups train, infer all match this device (cpu, cpu); the cluster file's groups are train, infer: set QSYNC_GROUP to",
        ),
        (
            {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"},
            "no group matches this device (cpu, cpu); the cluster file's groups are train",
        ),
    ],
)
def test_a_group_that_the_cluster_file_does_not_tell_is_refused(monkeypatch, environment, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ClusterError) as refused:
        which_group_of_cluster(read_cluster(EXAMPLES / "cluster.toml"), environment)
    assert str(refused.value).startswith(sentence)


def test_the_group_is_the_one_that_the_environment_names_or_whose_share_is_this_processs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train, infer = read_cluster(EXAMPLES / "cluster.toml").groups
    cluster = Cluster("two shares", (train, attrs.evolve(infer, share=0.5)))
    assert which_group_of_cluster(cluster, {"QSYNC_GROUP": "infer"}) == "infer"
    assert which_group_of_cluster(cluster, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}) == "infer"
    assert which_group_of_cluster(cluster, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}) == "train"
    assert which_group_of_cluster(Cluster("one", (train,)), {}) == "train"


def test_ranks_on_one_gpu_are_refused_over_nccl_alone(monkeypatch):
    device = DeviceType("NVIDIA H200", DeviceKind.CUDA, 0.25)
    mine = communication._Member("a", device, {}, gpu="GPU-1")
    said = {"member": json.dumps(to_plain(mine))}
    monkeypatch.setattr(communication, "told_by_all", lambda *_: {0: said, 1: said})
    assert len(communication._heard(mine, None, None, one_rank_a_gpu=False)) == 2
    with pytest.raises(RankError, match=r"ranks 0, 1 have the same GPU, which NCCL refuses: .* or communicate over gloo"):
        communication._heard(mine, None, None, one_rank_a_gpu=True)

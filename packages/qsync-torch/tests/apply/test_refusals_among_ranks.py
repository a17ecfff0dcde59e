"""What is wrong on one rank ends all ranks, each with a sentence that names the culprit: in real processes over gloo."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from forked import Forked
from nightly import nightly
from qsync_core.errors import PlanError
from qsync_torch.distributed.ranks import rank_timeout_s, together

pytestmark = pytest.mark.distributed
HERE = Path(__file__).parent
NO_SUCH_GROUP = "QSYNC_GROUP is 'inference', but the plan's groups are train, infer; set it to one of them"
DID_NOT_REACH = "rank 1 did not reach {} within 10 s of rank "
JOB = """
import torch
from qsync_torch.job import Batch, Job

def tiny():
    return Job(
        "tiny",
        torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)),
        lambda step, size: Batch((torch.randn(size, 6),), target=torch.arange(size) % 3),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
"""
LONGER = "where a rank takes longer to come there, set QSYNC_RANK_TIMEOUT_S to more seconds"


def run(script: str, arguments: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> list[tuple[int, str, str]]:
    """Status, standard output and standard error of each rank."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "QSYNC_RANK_TIMEOUT_S": "10", "OMP_NUM_THREADS": "1"}
    processes = [
        Forked([script if script[0] == "-" else str(HERE / script), *own], env=environment | added)
        for own, added in zip(arguments, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """By case, what each of the three ranks raised: class and text."""
    for _ in range(2):  # gloo may find no way from one process to another of the same machine, which is none of these cases
        folder = tmp_path_factory.mktemp("ranks")
        ended = run("refusing_ranks.py", [[str(rank), str(folder)] for rank in range(3)], [{}] * 3)
        if not any("Connect timeout" in error for *_, error in ended):
            break
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    found = [json.loads(out) for _, out, _ in ended]
    return {case: [one[case] for one in found] for case in found[0]}


def test_ranks_that_agree_may_apply_again_and_to_several_models(raised):
    assert raised["agreed"] == [["", "keys 0"]] * 3  # and the store keeps nothing of earlier rounds


def test_parameters_that_a_model_leaves_to_its_ranks_may_differ(raised):
    assert raised["local_parameters"] == [["", None]] * 3


@pytest.mark.parametrize(
    "case, culprit, kind, text",
    [
        ("wrong_group", 1, "PlanError", NO_SUCH_GROUP),
        ("no_plan_file", 1, "ArtifactError", "kept1.qsync: No such file or directory"),
        ("other_model", 1, "PlanError", "the plan was made for another model (m): Sequential has no linear or convolution 0"),
        ("missing_backend", 1, "BackendError", "kernel backend 'nowhere' is not installed here"),
    ],
)
def test_a_refusal_of_one_rank_is_heard_by_all_in_its_words_and_class(raised, case, culprit, kind, text):
    own = raised[case][culprit][1]
    assert text in own
    assert raised[case] == [[kind, own if rank == culprit else f"rank {culprit} refuses: {own}"] for rank in range(3)]


DIFFERENCES = {
    "other_plan": ("PlanError", "hold different plans (digests ", " on rank 1); give every rank the same plan file"),
    "other_parameters": (
        "PlanError",
        "differ in parameters (3 trained with 24 elements in float32 on ranks 0, 2; ",
        "3 trained with 22 elements in float32 on rank 1); give every rank the same",
    ),
    "other_formats": (
        "PlanError",
        "differ in parameters (2 trained with 20 elements in float32, 1 frozen with 12 elements in float32 on ranks 0, 2; ",
        "2 trained with 20 elements in float32, 1 frozen with 12 elements in bfloat16 on rank 1); give every rank the same",
    ),
    "other_versions": (
        "CompatibilityError",
        "run different versions of QSync (",
        "qsync-torch 0.0 on ranks 0, 2; qsync-torch 0.1 on rank 1); install the same on all",
    ),
    "other_fact": ("PlanError", "differ in matrix products (", "float32 on ranks 0, 2; tf32 on rank 1); give every rank the same"),
    "other_call": (
        "RankError",
        "are in different calls (",
        "apply_ on ranks 0, 2; check_ranks_agree on rank 1); make the same calls on every rank",
    ),
    "other_scale": ("PlanError", "differ in loss scaling (scale 4096, ", " on rank 1); give every rank the same"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_differ_say_the_same(raised, case):
    kind, begins, ends = DIFFERENCES[case]
    text = raised[case][0][1]
    assert text.startswith(f"the ranks of this job {begins}")
    assert text.endswith(ends)
    assert raised[case] == [[kind, text]] * 3


def test_a_failure_that_is_not_ours_reaches_the_others_and_leaves_their_model_as_it_was(raised):
    heard = ["RankError", "rank 1 fails with RuntimeError in apply_, building kernels: the disk is full"]
    assert raised["build_fails"] == [heard, ["RuntimeError", "the disk is full\nand more"], heard]


def test_ranks_that_refuse_for_different_reasons_hear_each_other(raised):
    (healthy, first, second) = raised["two_refuse"]
    other_model, no_group = first[1].split(" (rank 2 refuses as well: ")
    assert no_group == "the plan has no group 'elsewhere'; its groups are train, infer)"
    assert second == ["PlanError", f"{no_group[:-1]} (rank 1 refuses as well: {other_model})"]
    assert healthy == ["PlanError", f"rank 1 refuses: {other_model}; rank 2 refuses: {no_group[:-1]}"]


def test_a_reason_that_ranks_share_is_said_once(raised):
    no_group = "the plan has no group 'elsewhere'; its groups are train, infer"
    assert raised["two_refuse_alike"] == [
        ["PlanError", f"ranks 1, 2 refuse: {no_group}"],
        ["PlanError", f"{no_group} (rank 2 refuses as well)"],
        ["PlanError", f"{no_group} (rank 1 refuses as well)"],
    ]


@pytest.mark.parametrize("case, call", [("no_apply", "apply_"), ("comes_late", "apply_"), ("no_scale", "InStepGradScaler.step")])
def test_a_rank_that_does_not_come_is_named(raised, case, call):
    heard = [one for rank, one in enumerate(raised[case]) if rank != 1 or case == "comes_late"]
    assert all(kind == "RankError" for kind, _ in heard)
    assert len({text for _, text in heard}) == 1
    assert heard[0][1].startswith(DID_NOT_REACH.format(call))
    assert heard[0][1].endswith(LONGER)


def test_a_rank_that_never_calls_us_fails_in_its_own_collective_and_answers_none_of_ours(raised):
    assert raised["no_apply"][1][0] == "RuntimeError"


def test_a_rank_that_is_stopped_says_so(raised):
    heard = ["RankError", "rank 1 fails with SystemExit in building: 3"]
    assert raised["stopped"] == [heard, ["SystemExit", "3"], heard]


def test_a_rank_may_build_for_longer_than_the_others_wait_for_a_sign_of_life(raised):
    assert raised["slow_to_build"] == [["", "built"]] * 3


def test_only_the_ranks_of_a_group_compare_and_are_named_by_their_rank_in_the_job(raised):
    outside, *members = raised["subgroups"]
    assert outside == ["", "went on"]
    assert members[0] == members[1]
    assert members[0][0] == "PlanError"
    assert " on rank 1; " in members[0][1]
    assert " on rank 2); " in members[0][1]


BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


def run_script(backend: str, who: int = -1, where: str = "") -> list[tuple[int, str, str]]:
    """A script with two ranks, of which one is wrong somewhere."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL between two ranks needs two CUDA devices")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    arguments = [str(who), where, backend]
    return run("script_of_two_ranks.py", [arguments] * 2, [{**rendezvous, "RANK": str(rank)} for rank in range(2)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "who, where, sentence",
    [
        (1, "in apply_", "rank 1 gave no sign of life for 10 s while rank 0 waited for it in apply_, building kernels: "),
        *nightly(
            (1, "before apply_", "rank 1 did not reach apply_ within 10 s of rank 0: see what was printed there last"),
            (0, "in apply_", "the process that holds the process group's store has ended while this rank was in apply_, building "),
        ),
    ],
)
def test_a_rank_that_died_is_named_by_the_one_that_lives(backend, who, where, sentence):
    ended = run_script(backend, who, where)
    (dead, _, last_words), (living, out, error) = ended[who], ended[1 - who]
    assert dead == (1 if where == "before apply_" else -signal.SIGKILL)
    assert where == "in apply_" or "ValueError: the data are not there" in last_words
    assert (living, out) == (1, "")
    assert f"qsync_core.errors.RankError: {sentence}" in error


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_ends_on_both_ranks_with_the_sentence_of_one(backend):
    healthy, wrong = run_script(backend, 1, "in its group")
    sentence = "the plan has no group 'inference'; its groups are train, infer"
    assert (healthy[:2], wrong[:2]) == ((1, ""), (1, ""))
    assert f"qsync_core.errors.PlanError: rank 1 refuses: {sentence}" in healthy[2]
    assert f"qsync_core.errors.PlanError: {sentence}" in wrong[2]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_with_nothing_wrong_trains(backend):
    assert [ended[:2] for ended in run_script(backend)] == [(0, "trained\n")] * 2


@pytest.mark.nightly
def test_profile_ends_on_all_ranks_when_one_cannot_read_its_graph(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    command = ["profile", f"{tmp_path / 'job.py'}:tiny", "--device", "cpu", "-o", str(tmp_path / "out.qsync")]
    graph = ["--dag", str(tmp_path / "none.qsync")]
    ended = run("-mqsync_core.cli", [command, command + graph], [{**rendezvous, "RANK": str(rank)} for rank in range(2)])
    sentence = f"cannot read {tmp_path / 'none.qsync'}: No such file or directory"
    assert [status for status, _, _ in ended] == [1, 1], ended
    assert [" ".join(error.split()) for _, _, error in ended] == [f"error: rank 1 refuses: {sentence}", f"error: {sentence}"]


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("QSYNC_RANK_TIMEOUT_S", text)
    with pytest.raises(PlanError, match=f"QSYNC_RANK_TIMEOUT_S is '{text}'; set it to a number of seconds above 0"):
        rank_timeout_s()


def test_alone_there_is_nothing_to_agree_on():
    with together("apply_", {"plan": "a"}) as facts:
        assert facts == {"plan": "a"}

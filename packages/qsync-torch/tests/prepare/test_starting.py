"""What to type to train with the groups that the verdict recommends."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch.distributed.run import parse_args

from qsync_core.artifacts.files import save
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, ChainAssignment, GroupPlan, PrecisionPlan, RecommendedWay, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_core.run_folder import RunFolder
from qsync_torch.caller import Caller
from qsync_torch.capturing.hybrid import HYBRID
from qsync_torch.prepare.participants import Group, Participant
from qsync_torch.prepare.starting import Start, how_to_start

CPU = DeviceType("cpu", DeviceKind.CPU)
H200 = DeviceType("NVIDIA H200", DeviceKind.CUDA, 1.0, 0, "9.0")
HOSTS = ("one", "two", "three")
HALF = attrs.evolve(H200, share=0.5)
FLOAT32 = Variant.plain(Precision.FLOAT32)


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for variable in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)


def group(name: str, device: DeviceType, *places: tuple[str, str]) -> Group:
    """Of a rank for each host and GPU."""
    return Group(
        name, tuple(Participant(rank, host, host, (), device, 0, name, {}, gpu) for rank, (host, gpu) in enumerate(places))
    )


def plan_of(groups: list[Group], recommended: tuple[str, ...] = (), accumulate: int = 1) -> PrecisionPlan:
    entries = tuple(
        GroupPlan(group.name, Role.INFER if number else Role.TRAIN, len(group.ranks), group.first.device, Precision.FLOAT32, {})
        for number, group in enumerate(groups)
    )
    batches = {group.name: 16 for group in groups}
    return PrecisionPlan(
        "m",
        "",
        (),
        {},
        "",
        "",
        1,
        1,
        0.0,
        None,
        entries,
        "",
        local_batches=batches,
        recommended_groups=recommended,
        accumulate=accumulate,
    )


def found(folder: Path, groups: list[Group], kept: tuple[str, ...], *script: str, accumulate: int = 1, **options: Any) -> Start:
    run = RunFolder(folder)
    (folder / "plans").mkdir()
    save(plan_of([group for group in groups if group.name in kept], accumulate=accumulate), run.plan(kept))
    start = how_to_start(run, plan_of(groups, kept, accumulate), groups, script or ("train.py",), **options)
    assert start is not None
    return start


def test_on_one_machine_it_is_one_line(tmp_path):
    groups = [group("a", CPU, ("here", "")), group("b", CPU, ("here", ""), ("here", ""))]
    fewer = found(tmp_path, groups, ("b",), "my train.py", "--lr", "1e-3", caller=HYBRID)
    line = "QSYNC_GROUP=b torchrun --standalone --nproc-per-node=2 -- "
    assert fewer.commands == (("here", f"{line}'my train.py' --lr 1e-3"),)
    assert fewer.sentences(Path("run")) == [
        "a is better left out; train without, by:",
        f"  {line}'my train.py' --lr 1e-3",
        "a step then has 32 samples, each rank its own batch, and not the 48 of all groups; where the learning rate is for 48, "
        "keep them with qsync.hybrid(..., resize='keep-global') and the loop over applied.micro_batches(ddp) "
        "(docs/coming-and-going.md)",
        "the line of the script is qsync.hybrid(..., run='run')",
    ]


def test_a_step_of_several_micro_batches_has_the_samples_of_all(tmp_path):
    groups = [group("a", CPU, ("here", "")), group("b", CPU, ("here", ""))]
    said = found(tmp_path, groups, ("b",), caller=HYBRID, accumulate=3).sentences(Path("run"))[2]
    assert said.startswith(
        "a step then has 48 samples, each rank its own 3 batches, and not the 96 of all groups; where the learning rate is for 96, "
    )


@pytest.mark.parametrize("hosts", [("here", "here"), ("one", "two")])
@pytest.mark.parametrize("arguments", [(), ("--run", "x", "--log=y"), ("a", "--rdzv", "--", "--nnodes=3"), ("-r", "3", "plain")])
def test_torchrun_leaves_the_scripts_arguments_alone(tmp_path, hosts, arguments):
    groups = [group(name, CPU, (host, "")) for name, host in zip("ab", hosts, strict=True)]
    start = found(tmp_path, groups, ("a", "b"), "lm.py", *arguments)
    for _, line in start.commands:
        words = shlex.split(line)
        read = parse_args(words[words.index("torchrun") + 1 :])
        assert (read.training_script, tuple(read.training_script_args)) == ("lm.py", arguments)


def test_a_trainers_script_has_its_adapters_line_and_no_loop_of_its_own(tmp_path):
    groups = [group("a", CPU, ("here", "")), group("b", CPU, ("here", ""))]
    trainer = Caller("hybrid", arguments="trainer, run={}", own_loop=False)
    assert found(tmp_path, groups, ("b",), caller=trainer).sentences(Path("run"))[2:] == [
        "a step then has 16 samples, each rank its own batch, and not the 32 of all groups; where the learning rate is for 32, "
        "change it in the script",
        "the line of the script is hybrid(trainer, run='run')",
    ]


def started(folder: Path, kept: tuple[str, ...], way: RecommendedWay, variant: Variant = FLOAT32) -> list[str]:
    """What is said where a verdict recommends this way, and operators run in this variant under the plan of the kept groups."""
    groups = [group("a", CPU, ("here", "")), group("b", CPU, ("here", ""))]
    whole = attrs.evolve(plan_of(groups, kept), recommended_way=way)
    chosen = plan_of([one for one in groups if one.name in kept])
    runs = {OpId("0"): Assignment(variant, "aten", "", "")}
    parts = tuple(attrs.evolve(entry, assignments=runs) for entry in chosen.groups)
    (folder / "plans").mkdir()
    save(attrs.evolve(chosen, groups=parts, operator_ids=(OpId("0"),)), RunFolder(folder).plan(kept))
    start = how_to_start(RunFolder(folder), whole, groups, ("train.py",), caller=HYBRID)
    assert start is not None
    return start.sentences(Path("run"))


def test_a_way_that_another_plan_takes_is_told_from_this_plan_as_it_is(tmp_path):
    uneven = RecommendedWay(("a", "b"), {"a": 20, "b": 12}, 1, 1.0, "--solver dynamic-batch")
    first, *_, line = started(tmp_path, ("a",), uneven)
    assert first == (
        "what the verdict recommends is planned by qsync prepare … --solver dynamic-batch; as it is, b is better left out; "
        "train without, by:"
    )
    assert line == "the line of the script is qsync.hybrid(..., run='run')"


@pytest.mark.parametrize(("step_ns", "recommended"), [(1000, True), (1100, False)])
def test_uneven_batches_of_fewer_groups_that_are_planned_already_are_what_is_started(tmp_path, step_ns, recommended):
    groups = [group(name, CPU, ("here", "")) for name in "abc"]
    way = RecommendedWay(("a", "b"), {"a": 20, "b": 12}, 1000, 1.0, "--solver dynamic-batch")
    (tmp_path / "plans").mkdir()
    uneven = attrs.evolve(plan_of(groups[:2]), local_batches=way.local_batches, predicted_iteration_ns=step_ns)
    save(uneven, RunFolder(tmp_path).plan(["a", "b"]))
    save(plan_of(groups[:1]), RunFolder(tmp_path).plan(["a"]))
    whole = attrs.evolve(plan_of(groups, ("a",)), recommended_way=way)
    start = how_to_start(RunFolder(tmp_path), whole, groups, ("train.py",))
    assert start.groups == (("a", "b") if recommended else ("a",))
    assert start.better == ("" if recommended else way.options)
    assert start.local_batches == (way.local_batches if recommended else {})
    assert not start.lowers_nothing, "the script needs its batches"


@pytest.mark.parametrize(("precision", "lowers"), [(Precision.FLOAT32, False), (Precision.BFLOAT16, True)])
def test_where_nothing_is_to_gain_the_line_may_be_left_out_unless_the_plan_lowers_something(tmp_path, precision, lowers):
    plain = RecommendedWay(("a", "b"), {"a": 16, "b": 16}, 1, 1.0, "--solver full")
    first, *_, line = started(tmp_path, ("a", "b"), plain, Variant.plain(precision))
    better = "what the verdict recommends is planned by qsync prepare … --solver full; as it is, "
    assert first == (f"{better}train by:" if lowers else "train by:")
    assert ("under this plan it lowers nothing, and the script may leave it out" in line) is not lowers


def test_a_plan_that_fuses_is_for_a_compiled_model(tmp_path):
    cpu = group("cpu", CPU, ("here", ""))
    whole = plan_of([cpu])
    chain = ChainAssignment(ChainVariant(), "aten", "", "by hand")
    fused = attrs.evolve(whole, groups=(attrs.evolve(whole.groups[0], chains={OpId("0+1"): chain}),))
    (tmp_path / "plans").mkdir()
    save(fused, RunFolder(tmp_path).plan(["cpu"]))
    start = how_to_start(RunFolder(tmp_path), whole, [cpu], ("train.py",))
    assert start is not None
    assert start.sentences(Path("run"))[-1] == "the line of the script is qsync.compile(model, 'run')"


def test_each_machine_has_its_line_and_the_training_groups_is_the_first(tmp_path):
    groups = [
        group("fast", H200, ("one", "0"), ("one", "1"), ("two", "0")),
        group("half", HALF, ("three", "0")),
        group("slow", CPU, ("four", "")),
    ]
    fewer = found(tmp_path, groups, ("fast", "half"))
    assert (fewer.left_out, fewer.samples, fewer.of_all) == (("slow",), 64, 80)
    line, rest = "torchrun --nnodes=3 --node-rank=", "--master-addr=one --master-port=29500 train.py"
    assert fewer.commands == (
        ("one", f"QSYNC_GROUP=fast {line}0 --nproc-per-node=2 {rest}"),
        ("two", f"QSYNC_GROUP=fast {line}1 --nproc-per-node=1 {rest}"),
        (
            "three",
            f"QSYNC_GROUP=half CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 {line}2 --nproc-per-node=1 {rest}",
        ),
    )
    assert [sentence.split(": ")[0].strip() for sentence in fewer.sentences(tmp_path)[1:4]] == [
        "one",
        "two",
        "three",
    ]


def test_the_gpus_of_a_machine_that_has_others_too_are_named(tmp_path):
    groups = [group("old", H200, ("here", "0"), ("here", "1")), group("new", attrs.evolve(H200, name="B200"), ("here", "5"))]
    fewer = found(tmp_path, groups, ("new",))
    assert fewer.commands[0][1].startswith("QSYNC_GROUP=new CUDA_VISIBLE_DEVICES=5 torchrun --standalone ")


@pytest.mark.parametrize(
    ("environment", "kept", "place"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, ("a", "b"), "--master-addr=10.0.0.1 --master-port=29777"),
        ({}, ("a", "b"), "--master-addr=10.0.0.1 --master-port=29777"),  # of another launcher
        ({"TORCHELASTIC_RUN_ID": "5f0c"}, ("a", "b"), "--master-addr=one --master-port=29500"),  # a port of this one time
        ({"TORCHELASTIC_RUN_ID": "none"}, ("b", "c"), "--master-addr=two --master-port=29777"),  # node 0 is another machine
        ({"TORCHELASTIC_RUN_ID": "5f0c"}, ("a",), "--standalone"),
    ],
)
def test_training_meets_where_the_preparing_torchruns_met(tmp_path, monkeypatch, environment, kept, place):
    for variable, value in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29777", **environment}.items():
        monkeypatch.setenv(variable, value)
    ranks = [
        Participant(rank, host, host, (), CPU, 0, name, {}) for rank, (name, host) in enumerate(zip("abc", HOSTS, strict=True))
    ]
    start = found(tmp_path, [Group(rank.group, (rank,)) for rank in ranks], kept)
    assert {host for host, line in start.commands if f" {place} " in line} == {HOSTS["abc".index(name)] for name in kept}


def test_where_all_train_each_group_has_its_line_and_batches_that_differ_are_said(tmp_path):
    groups = [group("a", CPU, ("here", "")), group("b", CPU, ("here", ""))]
    start = found(tmp_path, groups, ("a", "b"))
    lines = [
        f"  QSYNC_GROUP={name} torchrun --nnodes=2 --node-rank={node} --nproc-per-node=1 --master-addr=127.0.0.1 "
        "--master-port=29500 train.py"
        for node, name in enumerate("ab")
    ]
    line = "the line of the script is qsync.apply_(model, 'run')"
    assert start.sentences(Path("run")) == ["train by:", *lines, line]
    uneven = attrs.evolve(start, local_batches={"a": 20, "b": 12}).sentences(Path("run"))
    assert uneven[-2].startswith("local batches differ (20 a rank of a, 12 a rank of b): the script takes applied.local_batch ")


def test_one_process_without_torchrun_is_started_by_python(tmp_path):
    start = found(tmp_path, [group("cpu", CPU, ("here", ""))], ("cpu",), "train.py", "--lr", "1e-3", torchrun=False)
    assert start.sentences(Path("run"))[:2] == ["train by:", "  python train.py --lr 1e-3"]


def test_of_groups_that_are_not_here_or_have_no_plan_nothing_is_said(tmp_path):
    a, b = group("a", CPU, ("here", "")), group("b", CPU, ("here", ""))
    run, whole = RunFolder(tmp_path), plan_of([a, b])
    assert how_to_start(run, whole, [a, b], ("train.py",)) is None
    (tmp_path / "plans").mkdir()
    save(whole, run.plan(["a", "b"]))
    assert how_to_start(run, whole, [a], ("train.py",)) is None

"""How a plan wants its job to communicate: what DistributedDataParallel and NCCL are told, and that no number changes by it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qsync_core.artifacts.files import save
from qsync_core.errors import ArtifactError
from qsync_core.ir.communication import CommunicationSettings
from qsync_torch import apply_, process_group_options
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.distributed import communication
from qsync_torch.distributed.communication import BUFFERS
from qsync_torch.distributed.nccl import max_ctas_of

from .communicating_plans import PLANNED, plan_with, small_model
from .test_ranks import run_ranks


def test_a_plan_says_what_ddp_is_told():
    applied = apply_(small_model(), plan_with(PLANNED), group="infer")
    assert applied.ddp_options() == {
        "bucket_cap_mb": 0.002,
        BUFFERS: False,
        "gradient_as_bucket_view": True,
        "static_graph": True,
    }


def test_without_a_cap_ddp_keeps_its_own():
    applied = apply_(small_model(), plan_with(CommunicationSettings(max_ctas=4)), group="train")
    assert applied.ddp_options() == {BUFFERS: True, "gradient_as_bucket_view": False, "static_graph": False}


@pytest.mark.parametrize("entries", [plan_with(None), {"0": "int8"}], ids=["a plan without a word of it", "variants by operator"])
def test_where_nothing_is_said_ddp_is_told_nothing(entries):
    assert apply_(small_model(), entries, group="infer").ddp_options() == {}


@pytest.fixture
def with_nccl(monkeypatch):
    """A machine with a GPU and NCCL, as far as options go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    made = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=-(2**31))))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)


def test_the_process_group_is_told_the_planned_ctas(with_nccl, tmp_path):
    plan = plan_with(CommunicationSettings(max_ctas=4))
    save(plan, tmp_path / "plan.qsync")
    assert process_group_options(plan).config.max_ctas == 4
    assert process_group_options(tmp_path / "plan.qsync").config.max_ctas == 4
    assert process_group_options(str(tmp_path / "plan.qsync")).config.max_ctas == 4


@pytest.mark.parametrize("settings", [None, CommunicationSettings(), PLANNED])
def test_where_the_plan_leaves_it_to_nccl_the_process_group_is_told_nothing(with_nccl, settings):
    assert process_group_options(plan_with(settings)) is None


def test_without_a_gpu_the_process_group_is_told_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process_group_options(plan_with(CommunicationSettings(max_ctas=4))) is None


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"none\.qsync: No such file or directory"):
        process_group_options(tmp_path / "none.qsync")


CUDA = torch.device("cuda", 0)


def nccl_group(monkeypatch, max_ctas: int) -> SimpleNamespace:
    """A process group of NCCL's with such options."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    backend = SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(max_ctas=max_ctas)))
    return SimpleNamespace(_get_backend=lambda device: backend)


@pytest.mark.parametrize(
    "max_ctas, variable, seen", [(-(2**31), "", 0), (4, "", 4), (4, "2", 2), (-(2**31), "16", 16), (4, "all", 4)]
)
def test_the_environment_stands_above_a_process_groups_options(monkeypatch, max_ctas, variable, seen):
    monkeypatch.setenv("NCCL_MAX_CTAS", variable)
    assert max_ctas_of(nccl_group(monkeypatch, max_ctas), CUDA) == seen


def test_what_cannot_be_seen_of_a_process_group_is_not_compared(monkeypatch):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    group = nccl_group(monkeypatch, 4)
    assert max_ctas_of(group, torch.device("cpu")) is None
    assert max_ctas_of(SimpleNamespace(_get_backend=lambda device: object()), CUDA) is None
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert max_ctas_of(group, CUDA) is None


@pytest.mark.parametrize(
    "variable, has, advice",
    [
        ("", "NCCL's own number of CTAs", "write init_process_group("),
        ("2", "at most 2 CTAs", "unset NCCL_MAX_CTAS, and write init_process_group("),
    ],
)
def test_another_number_of_ctas_is_named_with_the_line_to_write(monkeypatch, variable, has, advice):
    monkeypatch.setenv("NCCL_MAX_CTAS", variable)
    wrapper = SimpleNamespace(
        gradient_as_bucket_view=False,
        static_graph=False,
        bucket_bytes_cap=25 << 20,
        process_group=nccl_group(monkeypatch, -(2**31)),
        **{BUFFERS: True},
    )
    found = communication._differences(CommunicationSettings(max_ctas=4), wrapper, small_model(), CUDA, BY_HAND)
    assert found[0] == f"it is for collectives of at most 4 CTAs, and this job's process group is for {has}"
    assert found[1].startswith(advice)
    assert len(found) == 2


def test_the_wrapper_is_to_be_given_what_the_scripts_own_line_returned(monkeypatch):
    monkeypatch.setattr(communication, "max_ctas_of", lambda group, device: None)
    wrapper = SimpleNamespace(gradient_as_bucket_view=False, static_graph=False, bucket_bytes_cap=25, process_group=None)
    found = communication._differences(
        CommunicationSettings(static_graph=True), wrapper, torch.nn.Linear(2, 2), CUDA, Caller("qsync.hybrid")
    )
    assert found[1].endswith("**applied.ddp_options()), where applied is what qsync.hybrid returned")


TRAINING = (
    f"HERE = {str(Path(__file__).parent)!r}"
    + """
import json, warnings
from qsync_torch import apply_
sys.path.insert(0, HERE)
from communicating_plans import PLANNED, plan_with, small_model

def train(settings, options, steps=3, set_to_none=True, wrap=True, samples_first=False):
    torch.manual_seed(1)
    model = small_model()
    applied = apply_(model, plan_with(settings), group="infer" if rank else "train")
    with warnings.catch_warnings():
        if options is None:
            warnings.simplefilter("error")  # what a plan tells DistributedDataParallel is not deprecated
            options = applied.ddp_options()
        runs = DistributedDataParallel(model, **options) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if samples_first:
            with torch.no_grad():
                model(torch.randn(4, 3, 8, 8))
        for step in range(steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step * 2 + rank))
            runs(x).square().mean().backward()
            gradients += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
    state = [value.clone() for value in model.state_dict().values()]
    applied.remove()
    return gradients, state, [str(one.message) for one in said if "communic" in str(one.message) or "plan" in str(one.message)]

def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))

plain = train(None, {})
found = {}
for name, options in {
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "no_broadcast": {"broadcast_buffers": False},
    "one_bucket": {"bucket_cap_mb": 100},
    "many_buckets": {"bucket_cap_mb": 0.001},
}.items():
    gradients, state, _ = train(None, options)
    found[name] = [same(gradients, plain[0]), same(state, plain[1])]
gradients, state, _ = train(None, {"gradient_as_bucket_view": True}, set_to_none=False)
found["view_kept"] = [same(gradients, plain[0]), same(state, plain[1])]
gradients, state, found["as_planned"] = train(PLANNED, None)
found["planned"] = [same(gradients, plain[0]), same(state, plain[1])]
found["otherwise"] = train(PLANNED, {})[2]
found["one_otherwise"] = train(PLANNED, {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True, "static_graph": True})[2]
found["unwrapped"] = train(PLANNED, {}, wrap=False)[2]
found["sampled_first"] = train(PLANNED, None, samples_first=True)[2]
found["sampled_and_unwrapped"] = train(PLANNED, {}, wrap=False, samples_first=True)[2]
found["says_nothing"] = plain[2]
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of two ranks found; rank 1 trains in int8 and bfloat16."""
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(tmp_path_factory.mktemp("training"), TRAINING)]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["view", "view_kept", "static", "one_bucket", "many_buckets"])
def test_gradients_and_state_are_bit_for_bit_those_of_ddps_defaults(trained, case):
    assert [one[case] for one in trained] == [[True, True]] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["no_broadcast", "planned"])
def test_without_the_broadcast_of_buffers_only_other_ranks_statistics_differ(trained, case):
    assert [one[case] for one in trained] == [[True, True], [True, False]]


WRAP = "write DistributedDataParallel(model, **applied.ddp_options()), where applied is what apply_ returned"


@pytest.mark.distributed
def test_a_job_that_communicates_as_planned_is_not_warned(trained):
    assert [one[case] for one in trained for case in ("as_planned", "sampled_first", "says_nothing")] == [[]] * 6


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case, difference",
    [
        (
            "otherwise",
            f"it is for DistributedDataParallel with bucket_cap_mb=0.002, {BUFFERS}=False, gradient_as_bucket_view=True, "
            f"static_graph=True, and this job's has bucket_cap_mb=25.0, {BUFFERS}=True, gradient_as_bucket_view=False, "
            "static_graph=False",
        ),
        (
            "one_otherwise",
            f"it is for DistributedDataParallel with {BUFFERS}=False, and this job's has {BUFFERS}=True",
        ),
        ("unwrapped", "the model does not run in DistributedDataParallel"),
        ("sampled_and_unwrapped", "the model does not run in DistributedDataParallel"),
    ],
)
def test_a_job_that_communicates_otherwise_is_warned_once(trained, case, difference):
    assert [one[case] for one in trained] == [[f"the plan's times may not hold: {difference}; {WRAP}"]] * 2

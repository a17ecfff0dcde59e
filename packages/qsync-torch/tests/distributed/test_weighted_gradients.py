"""Weighted gradients of two and three gloo processes: those of one process with the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from forked import Forked
from qsync_core.errors import PlanError
from qsync_torch import weight_gradients

SCRIPT = Path(__file__).with_name("weighting_ranks.py")
EXACT = (
    "float64", "bucket views", "static graph", "unused parameters", "accumulated", "accumulated in views", "summed", "by token",
    "empty batch", "joined", "siamese", "scaled and clipped", "multiples", "compiled",
)  # fmt: skip


def run_ranks(folder: Path, sizes: tuple[int, ...]) -> list[dict[str, list[float]]]:
    arguments = [str(folder / "store"), ",".join(map(str, sizes))]
    processes = [Forked([str(SCRIPT), str(rank), *arguments]) for rank in range(len(sizes))]
    ended = [process.communicate(timeout=240) for process in processes]
    assert all(process.returncode == 0 for process in processes), ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.fixture(scope="module", params=[(7, 3), (2, 6, 3)], ids=str)
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """By rank and case the relative error of every step's gradient."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.distributed
@pytest.mark.parametrize("case", EXACT)
def test_in_float64_every_step_has_the_whole_batch_s_gradient(errors, case):
    for rank in errors:
        assert rank[case]
        assert max(rank[case]) <= 1e-12


@pytest.mark.distributed
def test_in_float32_the_error_is_that_of_rounding(errors):
    for rank in errors:
        assert 0 < max(rank["float32"]) <= 1e-6
        assert len(rank["float32"]) == 3  # the last of them of a partial batch


@pytest.mark.distributed
def test_without_weights_the_gradient_is_another(errors):
    for rank in errors:
        assert min(rank["unweighted"]) > 0.01


@pytest.mark.distributed
def test_a_second_hook_gets_every_bucket_and_may_compress(errors):
    for rank in errors:
        assert rank["buckets"][0] > 1
        assert 1e-4 < max(rank["compressed"]) < 2e-2


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["other batches", "past the output"])
def test_every_rank_refuses_in_the_same_words(errors, case):
    assert [rank[case] for rank in errors] == [[0.0]] * len(errors)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_a_wrapper_without_a_hook_is_taken(alone):
    with pytest.raises(PlanError, match="takes a model in DistributedDataParallel, got Linear"):
        weight_gradients(torch.nn.Linear(2, 2))
    taken = r"has a communication hook already, and takes only one: .* weight_gradients\(ddp, hook=\.\.\., state=\.\.\.\)"
    for register in (
        lambda ddp: ddp.register_comm_hook(None, allreduce_hook),
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
        weight_gradients,
    ):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        register(ddp)
        with pytest.raises(PlanError, match=taken):
            weight_gradients(ddp)


def test_what_mixes_samples_of_ranks_is_refused_under_a_mean(alone):
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    ddp.module[1] = torch.nn.SyncBatchNorm(2)
    with pytest.raises(
        PlanError, match=r"module '1' is a SyncBatchNorm, .*: use BatchNorm, .* or a loss that sums, with reduction='sum'"
    ):
        weight_gradients(ddp)
    weight_gradients(ddp, reduction="sum")


def test_a_reduction_and_arguments_without_samples_are_refused(alone):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(PlanError, match="the reduction of a loss is 'mean' or 'sum', got 'none'"):
        weight_gradients(ddp, reduction="none")
    with pytest.raises(PlanError, match="the state of weight_gradients is that of a hook, and there is none"):
        weight_gradients(ddp, state=dist.group.WORLD)

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.ones(()))

        def forward(self, factor: float) -> torch.Tensor:
            return factor * self.value

    ddp = DistributedDataParallel(Constant())
    weight_gradients(ddp)
    with pytest.raises(PlanError, match=r"no argument of the model is a tensor .* give weight_gradients a count"):
        ddp(2.0)


def test_no_step_after_the_first_makes_a_tensor_of_numbers_of_the_cpu(alone, monkeypatch):
    """On a GPU that copy, or a number that is read, has the CPU wait for all that was issued before it, in every step."""
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    weight_gradients(ddp, local_batch=4)
    ddp(torch.ones(4, 2)).mean().backward()

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a step waits for the device")

    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, refused)
    for name in ("item", "tolist", "cpu", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    ddp(torch.ones(3, 2)).mean().backward()

"""Gradient buckets: predicted against what DistributedDataParallel really forms, in one process over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job
from qsync_torch.tracing.gradient_order import form_buckets
from qsync_torch.tracing.trace import trace


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def real_buckets(job: Job, **options) -> tuple[bool, list[int], list[list[int]]]:
    """Whether DDP rebuilt its buckets after the first iteration, their sizes in bytes and the parameters in each."""
    model = DistributedDataParallel(job.model, **options)
    for batch in job.batches(3):
        job.compute_loss(batch, model).backward()
    data = model._get_ddp_logging_data()
    sizes = [int(size) for size in data["rebuilt_bucket_sizes"].split(",")] if data.get("rebuilt_bucket_sizes") else []
    members = [[int(i) for i in group.split()] for group in data.get("rebuilt_per_bucket_param_indices", "").split(",") if group]
    return bool(data["has_rebuilt_buckets"]), sizes, members


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("resnet18:image=32", None),
        ("vgg16_bn:image=32,hidden=64,pool_size=1", None),
        ("bert-base:layers=2,hidden=128,vocab=3000,seq=8", 0.5),
        ("bert-base:layers=2,hidden=128,vocab=3000,seq=8,head=mlm", 0.5),
        ("bert-base:layers=2,hidden=768,vocab=2000,seq=8,head=mlm", None),
        ("roberta-base:layers=2,hidden=64,vocab=500,seq=8", 0.05),
        ("resnet50:image=32,width=8", 0.1),
    ],
)
def test_buckets_are_ddps(text: str, cap: float | None) -> None:
    job = load_job(text, batch_size=2)
    dag = trace(job, bucket_cap_mb=cap)
    rebuilt, sizes, members = real_buckets(job, **({} if cap is None else {"bucket_cap_mb": cap}))
    assert rebuilt
    assert len(sizes) > 2
    assert [bucket.nbytes for bucket in dag.buckets] == sizes
    names = [name for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    assert [list(bucket.parameters) for bucket in dag.buckets] == [[names[i] for i in group] for group in members]


class Branches(torch.nn.Module):
    """Used out of the order of definition, twice, frozen in part, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.late = torch.nn.Linear(64, 64)
        self.early = torch.nn.Linear(64, 64)
        self.shared = torch.nn.Linear(64, 64)
        self.frozen = torch.nn.Linear(64, 64).requires_grad_(False)
        self.free = torch.nn.Parameter(torch.ones(64))
        self.unused = torch.nn.Linear(64, 64)
        self.use_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.early(x)).relu()
        x = self.frozen(x) * self.free + self.shared(x)
        x = self.late(x)
        return self.unused(x) if self.use_all else x


def branches_job(use_all: bool) -> Job:
    model = Branches()
    model.use_all = use_all
    return Job(
        "branches",
        model,
        lambda step, size: Batch((torch.randn(size, 64),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )


def test_buckets_of_a_model_used_in_another_order_than_defined() -> None:
    job = branches_job(use_all=True)
    dag = trace(job, bucket_cap_mb=0.02)
    rebuilt, sizes, members = real_buckets(job, bucket_cap_mb=0.02)
    assert rebuilt
    names = [name for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    assert [bucket.nbytes for bucket in dag.buckets] == sizes
    assert [list(bucket.parameters) for bucket in dag.buckets] == [[names[i] for i in group] for group in members]


def test_with_unused_parameters_the_first_buckets_stay() -> None:
    job = branches_job(use_all=False)
    dag = trace(job, bucket_cap_mb=0.02)
    rebuilt, _, _ = real_buckets(job, bucket_cap_mb=0.02, find_unused_parameters=True)
    assert not rebuilt
    trainable = [name for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    assert sorted(name for bucket in dag.buckets for name in bucket.parameters) == sorted(trainable)
    assert dag.buckets[0].parameters[-1] == "unused.bias"
    assert "free" in dag.buckets[-1].parameters


def test_the_first_bucket_is_smaller_and_no_bucket_is_split() -> None:
    mebibyte = 262_144  # float32 elements
    parameters = [(f"p{i}", torch.empty(mebibyte // 2, device="meta")) for i in range(60)]
    buckets = form_buckets(parameters, [name for name, _ in reversed(parameters)])
    assert [bucket.nbytes / 2**20 for bucket in buckets] == [1.0, 25.0, 4.0]
    assert buckets[0].parameters == ("p59", "p58")

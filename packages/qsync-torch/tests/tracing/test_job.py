"""Jobs by name and from a person's own file, and what is said when they cannot be loaded."""

import functools
import re
import textwrap
import types
from pathlib import Path

import pytest
import torch

from qsync_core.errors import JobError, QSyncError
from qsync_torch.job import Batch, Job, compare_as_rank
from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace

TINY_BERT = "layers=1,hidden=16,heads=2,vocab=50,seq=8"
TINY = {
    "resnet18": "resnet18:image=32,width=4,classes=7",
    "resnet50": "resnet50:image=32,width=4,classes=7",
    "vgg16": "vgg16:image=32,width=4,hidden=8,classes=7,pool_size=1",
    "vgg16_bn": "vgg16_bn:image=32,width=4,hidden=8,classes=7,pool_size=1",
    "bert-base": f"bert-base:{TINY_BERT}",
    "bert-large": f"bert-large:{TINY_BERT},head=mlm",
    "roberta-base": f"roberta-base:{TINY_BERT}",
    "roberta-mlm": f"roberta-base:{TINY_BERT},head=mlm",
}


@pytest.mark.parametrize("text", TINY.values(), ids=TINY.keys())
def test_a_named_job_trains(text: str) -> None:
    job = load_job(text, batch_size=2)
    assert job.batch_size == 2
    optimizer = job.optimizer(job.model.parameters())
    first = job.batch(0, 2)
    before = float(job.compute_loss(first).detach())
    for batch in job.batches(3):
        optimizer.zero_grad()
        job.compute_loss(batch).backward()
        assert all(torch.isfinite(p.grad).all() for p in job.model.parameters())
        optimizer.step()
    assert float(job.compute_loss(first).detach()) != before


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("vgg16:width=64", 138_357_544),
        ("vgg16_bn", 138_365_992),
    ],
)
def test_full_size_models_have_the_published_number_of_parameters(text: str, parameters: int) -> None:
    # The counts that torchvision documents for its weights.
    with torch.device("meta"):
        from qsync_torch.models.resnet import resnet18, resnet50
        from qsync_torch.models.vgg import VGG

        name = text.partition(":")[0]
        build = {"resnet18": resnet18, "resnet50": resnet50, "vgg16": VGG, "vgg16_bn": lambda: VGG(batch_norm=True)}
        model = build[name]()
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_state_dict_names_are_torchvisions() -> None:
    resnet = load_job(TINY["resnet50"]).model.state_dict()
    assert {"conv1.weight", "layer1.0.downsample.0.weight", "layer4.2.bn3.running_var", "fc.bias"} <= set(resnet)
    vgg = load_job(TINY["vgg16_bn"]).model.state_dict()
    assert {"features.0.weight", "features.41.running_mean", "classifier.6.bias"} <= set(vgg)
    assert len(resnet) == 320  # 53 convolutions, 53 × 5 of BatchNorm, weight and bias of fc


def test_the_same_step_gives_the_same_batch_and_the_same_seed_the_same_weights() -> None:
    one, two = load_job(TINY["bert-base"]), load_job(TINY["bert-base"])
    for a, b in zip(one.batch(5, 3).tensors, two.batch(5, 3).tensors, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.batch(5, 3).kwargs["input_ids"], one.batch(6, 3).kwargs["input_ids"])
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_making_a_job_leaves_the_global_random_numbers_alone() -> None:
    state = torch.random.get_rng_state()
    load_job(TINY["resnet18"]).batch(0, 2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_batches_hold_padding_that_the_attention_mask_hides() -> None:
    batch = load_job(TINY["bert-base"]).batch(0, 4)
    mask, tokens = batch.kwargs["attention_mask"], batch.kwargs["input_ids"]
    assert mask[0, 6:].sum() == 0
    assert mask[1:].min() == 1
    assert (tokens[mask == 0] == 0).all()


def test_batch_size_and_bytes() -> None:
    batch = Batch((torch.zeros(3, 5),), {"mask": torch.zeros(3, dtype=torch.bool), "flag": True}, target=torch.zeros(3))
    assert batch.size == 3
    assert batch.nbytes == 3 * 5 * 4 + 3 + 3 * 4
    moved = batch.to("meta")
    assert all(tensor.is_meta for tensor in moved.tensors)
    assert moved.kwargs["flag"] is True


def test_channels_last_reaches_images_and_weights() -> None:
    job = load_job(TINY["resnet18"] + ",channels_last=true")
    assert job.batch(0, 2).args[0].is_contiguous(memory_format=torch.channels_last)
    assert job.model.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


JOB_FILE = """
    from neighbour import WIDTH
    import torch
    from qsync_torch.job import Batch, Job

    def parts(width=WIDTH):
        model = torch.nn.Linear(width, 1)
        return (
            model,
            lambda step, size: Batch((torch.ones(size, width),)),
            lambda output, batch: output.mean(),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
        )

    def whole():
        return Job("mine", *parts(), batch_size=3)

    def wrong():
        return 1, 2

    def fails():
        raise RuntimeError("no data here")

    def leaves():
        raise SystemExit(3)

    def needs(path):
        return path

    def batchless():
        model, batch, loss, optimizer = parts()
        return model, lambda: batch(0, 8), loss, optimizer

    def stepless():
        model, batch, loss, optimizer = parts()
        return Job("stepless", model, lambda size: batch(0, size), loss, optimizer)
"""


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "my_job.py"
    path.write_text(textwrap.dedent(JOB_FILE))
    return path


def test_a_function_may_return_a_job_or_its_parts(job_file) -> None:
    whole = load_job(f"{job_file}:whole")
    assert (whole.name, whole.batch_size, whole.model.in_features) == ("mine", 3, 4)
    parts = load_job(f"{job_file}:parts:width=6", batch_size=5)
    assert (parts.name, parts.batch_size, parts.model.in_features) == ("parts", 5, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet19", "no model is named 'resnet19'; known are resnet18, resnet50"),
        ("resnet18:depth=3", "the model 'resnet18' has no option 'depth=3'"),
        ("resnet18:image=big", "option image of the model 'resnet18' is an integer, got 'big'"),
        ("vgg16:dropout=x", "option dropout of the model 'vgg16' is a number, got 'x'"),
        ("resnet18:channels_last=perhaps", "is true or false, got 'perhaps'"),
        ("bert-base:head=poem", "bert-base has no head 'poem'; known heads: qa, mlm"),
        ("resnet18:image=-5", "image, in_channels and classes of resnet18 are at least 1, got -5, 3 and 1000"),
        ("bert-base:layers=-1", "option layers of bert-base is a count, or 0 for the model's own, got -1"),
        ("nowhere.py:job", "there is no file 'nowhere.py'"),
        ("no_such_module:job", "importing no_such_module failed: ModuleNotFoundError"),
        ("{file}:absent", "has no function 'absent'"),
        ("{file}:wrong", "must return a Job or the tuple (model, batch, loss, optimizer)"),
        ("{file}:fails", "failed: RuntimeError: no data here"),
        ("{file}:leaves", "failed: SystemExit: 3"),
        ("{file}:needs", "needs a value for path"),
        ("{file}:batchless", "batch function of batchless has the arguments (); it is called as batch(step, batch_size) and must"),
        ("{file}:stepless", "the batch function of stepless has the arguments (size); it is called as batch(step, batch_size)"),
    ],
)
def test_what_can_not_be_loaded_is_named(text: str, message: str, job_file) -> None:
    with pytest.raises(JobError) as error:
        load_job(text.format(file=job_file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["raise ValueError('twice')", ""])
def test_a_script_with_its_line_is_prepared_without_a_function(text: str, tmp_path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{text}\ndef train():\n    qsync.hybrid(model, optimizer, loss, loader)\n")
    with pytest.raises(JobError, match=r"(twice|no function 'make_job'); as a script .*: qsync prepare .*train\.py$"):
        load_job(f"{path}:make_job")


@pytest.mark.parametrize(
    "batch",
    [
        lambda *arguments: Batch((torch.ones(arguments[1]),)),
        lambda step, batch_size=4, seed=0: Batch((torch.ones(batch_size),)),
        functools.partial(lambda seed, step, size: Batch((torch.ones(size),)), 7),
    ],
    ids=["any", "defaults", "partial"],
)
def test_a_batch_function_may_have_any_arguments_that_can_be_called_with_two(batch) -> None:
    job = Job("mine", torch.nn.Identity(), batch, lambda y, _: y.sum(), lambda _: None)
    assert job.batch(0, 3).size == 3
    assert next(job.batches(1, batch_size=5)).size == 5


def test_the_readmes_job_is_one() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL) if "def job" in block]
    exec(compile(block, "README.md", "exec"), {})


def test_underscores_and_hyphens_in_a_models_name_are_the_same():
    jobs = [load_job(f"{spelling}:image=32,width=4,hidden=8,pool_size=1", 2) for spelling in ("vgg16-bn", "vgg16_bn")]
    assert jobs[0].name == jobs[1].name


class Tokens(torch.nn.Module):
    """Padded to its rank's longest sample, with what one rank alone does."""

    def __init__(self, alone: bool = False, activation: type[torch.nn.Module] = torch.nn.ReLU, twice: bool = False) -> None:
        super().__init__()
        self.embedding, self.hidden, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
        self.activation, self.alone, self.twice = activation(), alone, twice

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.hidden(self.embedding(tokens)))
        if self.alone:
            hidden = hidden + torch.zeros_like(hidden)
        return self.out(self.hidden(hidden) if self.twice else hidden)


def of_rank(length: int, model: torch.nn.Module, loss=torch.nn.functional.cross_entropy):
    def batch(step: int, size: int) -> Batch:
        return Batch((torch.zeros(size, length, dtype=torch.long),), target=torch.zeros(size * length, dtype=torch.long))

    return trace(
        Job(
            "tokens",
            model,
            batch,
            lambda output, batch: loss(output.flatten(0, 1), batch.target),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=2,
        )
    )


def test_a_rank_may_have_batches_of_other_sizes_and_operators_of_its_own_without_parameters() -> None:
    first = of_rank(50, Tokens())
    assert compare_as_rank(first, of_rank(50, Tokens()), "") == ""
    assert compare_as_rank(first, of_rank(53, Tokens()), "") == (
        "embedding#0 has activations of [2, 53, 4], and of [2, 50, 4] in the graph"
    )
    own = of_rank(50, Tokens(alone=True))
    assert compare_as_rank(own, first, "") == "only the graph has zeros_like#0"
    assert compare_as_rank(first, own, "") == "only this rank has zeros_like#0"


@pytest.mark.parametrize(
    "job, difference",
    [
        ((50, Tokens(twice=True)), "operator hidden#1 is not the same in both"),
        (
            (50, Tokens(), torch.nn.functional.multi_margin_loss),
            "its loss is cross_entropy (mean), and the job's multi_margin (mean)",
        ),
    ],
)
def test_a_rank_with_other_operators_that_train_or_another_loss_has_another_job(job, difference: str) -> None:
    with pytest.raises(QSyncError, match=re.escape(f"is not of this job as it is now: {difference}")):
        compare_as_rank(of_rank(50, Tokens()), of_rank(*job), "")


def test_a_copy_runs_its_own_modules_where_a_library_has_replaced_a_forward() -> None:
    """As TRL does: a bound closure that calls the forward that was there before, which is bound to the original."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)
            self.outer = torch.nn.Sequential(torch.nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x))

    def patched(model: torch.nn.Module) -> None:
        before = model.forward

        @functools.wraps(before)
        def forward(self: torch.nn.Module, x: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
            return before(x) if not fused else self.inner(x)

        model.forward = types.MethodType(forward, model)

    model = Two()
    patched(model)
    patched(model.outer)
    job = Job("patched", model, lambda step, size: Batch((torch.ones(size, 3),)), lambda y, _: y.sum(), torch.optim.SGD)
    copied = job.copy_model()
    ran: list[str] = []
    for name, one in (("copy", copied), ("original", model)):
        for module in one.modules():
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    x = torch.ones(2, 3)
    assert torch.equal(copied(x), copied.outer[0](copied.inner(x)))
    assert torch.equal(copied(x, fused=True), copied.inner(x))
    assert set(ran) == {"copy"}
    assert torch.equal(model(x), model.outer[0](model.inner(x)))
    assert "original" in ran

"""``capture``: a job of live objects, from which the script notices nothing."""

from __future__ import annotations

import copy
import random
import warnings
from collections import UserDict
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import qsync_torch as qsync
from qsync_core.errors import JobError
from qsync_torch.capturing.batches import begins_to_read
from qsync_torch.job import Batch, describe_optimizer
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.trace import trace

X, Y = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def captured(loader, model=None, optimizer=None, loss_fn=F.cross_entropy, **options):
    model = net() if model is None else model
    return qsync.capture(model, optimizer or sgd(model), loss_fn, loader, **options)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x, scale, *, shift=0.0):
        return self.fc(x) * scale[:, None] + shift


class OwnLoss(nn.Module):
    """As transformers' models: the loss comes with the output where labels are given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.fc(input_ids)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


def all_random_numbers():
    return torch.rand(1).item(), numpy.random.rand(), random.random()


class Drawing(Dataset):
    """Draws from every generator that a data set may draw from."""

    def __init__(self):
        self.own, self.numpys = torch.Generator().manual_seed(3), numpy.random.default_rng(4)

    def __len__(self):
        return 30

    def __getitem__(self, index):
        drawn = torch.rand(4, generator=self.own).sum() + self.numpys.random() + sum(all_random_numbers())
        return torch.full((5,), float(drawn)), index % 3


@pytest.mark.parametrize("workers", [0, 2], ids=["in this process", "two workers"])
@pytest.mark.parametrize("generator", [None, 5])
def test_a_script_goes_on_as_without_the_call(workers, generator):
    """Random numbers of every kind, the order and contents of the loader's batches, and the trained parameters."""

    def run(capture):
        random.seed(0)
        numpy.random.seed(0)
        model = net()
        optimizer = sgd(model)
        order = None if generator is None else torch.Generator().manual_seed(generator)
        options = {"num_workers": workers, "persistent_workers": workers > 0, "generator": order}
        loader = DataLoader(Drawing(), 4, shuffle=True, **options)
        if workers:
            next(iter(loader))  # its persistent workers are there already
        if capture:
            qsync.capture(model, optimizer, F.cross_entropy, loader)
        seen = []
        for x, y in loader:
            seen += [x, y]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *model.state_dict().values()], all_random_numbers()

    (with_call, drawn), (without, expected) = run(True), run(False)
    assert drawn == expected
    assert all(torch.equal(a, b) for a, b in zip(with_call, without, strict=True))


def test_what_a_loaders_functions_know_is_looked_at_without_warnings():
    def collate(samples):  # knows torch, which has objects that warn when they are looked at
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    model = nn.Linear(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        loader = DataLoader(TensorDataset(X, Y), 8, collate_fn=collate)
        qsync.capture(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, loader)


def test_the_model_is_the_live_one_and_measurements_leave_it_as_it_is():
    model = net()
    model[1].eval()  # frozen by the script
    optimizer = sgd(model)
    F.cross_entropy(model(X), Y).backward()
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    job = captured(DataLoader(TensorDataset(X, Y), 8), model, optimizer)
    assert job.model is model
    trace(job)
    runner = StepRunner.start(job, torch.device("cpu"))
    for step in range(3):
        runner.train_step(step)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(before[1], model.parameters(), strict=True))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not any(optimizer.state.values())


@pytest.mark.filterwarnings("ignore:3 of the 6 trainable parameters")
def test_the_job_trains_as_the_script_does():
    """Bit for bit, from the same weights: batches, loss, and the optimizer with its groups."""
    loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=torch.Generator().manual_seed(2))
    model = net()
    groups = [{"params": [model[0].weight, model[3].weight], "weight_decay": 0.1}, {"params": [model[0].bias], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    job = captured(loader, model, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1))
    runner = StepRunner.start(job, torch.device("cpu"), batches=5)
    for step in range(5):
        runner.train_step(step)
    for x, y in loader:
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), runner.model.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("make", "takes_closure"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), False),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True), False),
        (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3), False),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), False),
        (lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True), False),
        (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), True),
    ],
    ids=["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LBFGS"],
)
def test_an_optimizer_is_made_again_with_its_hyper_parameters(make, takes_closure):
    """It steps other parameters as the function that made it would, and neither the model's nor by the script's schedule."""
    model, other, reference = net(), net(), net()
    optimizer = make(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts itself around the optimizer's step
    again = captured([(X, Y)], model, optimizer).optimizer(list(other.parameters()))
    assert type(again) is type(optimizer)
    expected = make(reference.parameters())
    for stepped, by in ((other, again), (reference, expected)):
        for _ in range(3):

            def loss(stepped=stepped, by=by):
                by.zero_grad()
                value = F.cross_entropy(stepped(X), Y)
                value.backward()
                return value

            by.step(loss) if takes_closure else (loss(), by.step())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), reference.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net().parameters(), strict=True))


def test_an_optimizer_that_keeps_more_than_its_groups_keeps_it():
    class Scaled(torch.optim.SGD):
        def __init__(self, params, lr, scale):
            super().__init__(params, lr=lr)
            self.scale = scale

    model = net()
    again = captured([(X, Y)], model, Scaled(model.parameters(), 0.1, scale=7)).optimizer(list(net().parameters()))
    assert (again.scale, again.param_groups[0]["lr"]) == (7, 0.1)


def test_several_optimizers_step_as_the_loops_do_and_one_of_them_is_not_enough():
    def pair(model):
        weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
        return [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.2)]

    model, other, reference = net(), net(), net()
    job = captured([(X, Y)], model, pair(model))
    again, expected = job.optimizer(list(other.parameters())), pair(reference)
    for _ in range(3):
        F.cross_entropy(other(X), Y).backward()
        again.step()
        again.zero_grad()
        F.cross_entropy(reference(X), Y).backward()
        for one in expected:
            one.step()
            one.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), reference.parameters(), strict=True))
    assert len(again.state) == len(expected[1].state) > 0  # of plain SGD there is none
    described = describe_optimizer(job)
    assert "SGD(" in described
    assert " and torch.optim.adamw.AdamW(" in described
    with pytest.warns(UserWarning, match="4 of the 6 trainable parameters .* not the optimizer's.* pass all of them"):
        captured([(X, Y)], model, pair(model)[0])


def test_frozen_parameters_are_left_out():
    model = net()
    model[0].requires_grad_(False)
    other = copy.deepcopy(model)
    trainable = [p for p in other.parameters() if p.requires_grad]
    again = captured([(X, Y)], model).optimizer(trainable)
    assert [id(p) for p in again.param_groups[0]["params"]] == [id(p) for p in trainable]


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), step=st.integers(0, 9), size=st.integers(1, 12))
def test_batches_of_any_size_are_cut_from_the_loaders(sizes, step, size):
    """Against plain indexing of all samples behind each other."""
    total = sum(sizes)
    x, y = torch.arange(total * 2.0).reshape(total, 2), torch.arange(total)
    job = captured(list(zip(x.split(sizes), y.split(sizes), strict=True)), nn.Linear(2, 3))
    batch = job.batch(step, size)
    rows = [(step * size + place) % total for place in range(size)]
    assert torch.equal(batch.args[0], x[rows])
    assert torch.equal(batch.target, y[rows])
    assert job.batch_size == sizes[0]
    batch.args[0].zero_()  # a model may write into its input
    assert torch.equal(job.batch(step, size).args[0], x[rows])


def test_the_loaders_own_batches_come_in_its_order():
    loader = DataLoader(TensorDataset(X, Y), 8)
    job = captured(loader)
    for step, (x, y) in enumerate(loader):
        batch = job.batch(step, job.batch_size)
        assert torch.equal(batch.args[0], x)
        assert torch.equal(batch.target, y)


class LogitsAndLoss(OwnLoss):
    """As nanoGPT: a tuple, with the loss last."""

    def forward(self, idx, targets):
        output = super().forward(idx, labels=targets)
        return output.logits, output.loss


LABELLED, PLAIN = {"input_ids": X, "labels": Y}, {"input": X, "y": Y}


def ranked(output, rank, labels, smoothing=0.0):
    return (F.cross_entropy(output.logits, labels, reduction="none", label_smoothing=smoothing) * rank).mean()


def gapped(output, labels, smoothing=0.0, mask=None):
    """Of which a batch has ``mask`` and not what comes before it."""
    assert smoothing == 0.0
    assert mask is None
    return F.cross_entropy(output.logits, labels)


def two_targets(output, one, other):
    return F.cross_entropy(output, one) + F.cross_entropy(output, other)


@pytest.mark.parametrize(
    ("model", "loss_fn", "element", "args", "kwargs", "target"),
    [
        (net, F.cross_entropy, [X, Y], (X,), {}, Y),
        (net, nn.CrossEntropyLoss(), (X, Y), (X,), {}, Y),
        (TwoInputs, F.cross_entropy, (X, Y.float(), Y), (X, Y.float()), {}, Y),
        (net, two_targets, (X, Y, Y.flip(0)), (X,), {}, (Y, Y.flip(0))),
        (net, lambda output, *targets: two_targets(output, *targets), (X, Y, Y), (X,), {}, (Y, Y)),
        (lambda: nn.Linear(5, 5), F.mse_loss, X, (X,), {}, X),
        (lambda: nn.Linear(5, 5), nn.MSELoss(), (X,), (X,), {}, X),
        (lambda: nn.Linear(5, 5), lambda output: output.square().mean(), (X,), (X,), {}, None),
        (OwnLoss, None, {"input_ids": X, "labels": Y}, (), {"input_ids": X, "labels": Y}, None),
        (OwnLoss, None, UserDict(input_ids=X, labels=Y), (), {"input_ids": X, "labels": Y}, None),
        (OwnLoss, None, (X, None, Y), (X, None, Y), {}, None),
        (LogitsAndLoss, None, (X, Y), (X, Y), {}, None),
        (LogitsAndLoss, None, {"idx": X, "targets": Y}, (), {"idx": X, "targets": Y}, None),
        (OwnLoss, lambda o, y: F.cross_entropy(o.logits, y), {"input_ids": X, "labels": Y}, (), {"input_ids": X}, Y),
        (OwnLoss, lambda o, y: F.cross_entropy(o.logits, y), {"input_ids": X, "y": Y}, (), {"input_ids": X}, Y),
        (OwnLoss, F.cross_entropy, LABELLED, (), {"input_ids": X}, Y),
        (OwnLoss, nn.CrossEntropyLoss(), LABELLED, (), {"input_ids": X}, Y),
        (OwnLoss, lambda logits, labels: F.cross_entropy(logits, labels), LABELLED, (), {"input_ids": X}, Y),
        (OwnLoss, lambda output: output.loss, LABELLED, (), LABELLED, None),
        (OwnLoss, lambda output, batch: output.loss, LABELLED, (), LABELLED, LABELLED),
        (OwnLoss, lambda output, batch: F.cross_entropy(output.logits, batch["labels"]), LABELLED, (), LABELLED, LABELLED),
        (OwnLoss, lambda output, **batch: F.cross_entropy(output.logits, batch["labels"]), LABELLED, (), LABELLED, LABELLED),
        (
            net,
            lambda output, batch: F.cross_entropy(output, batch["y"]),
            {"input": X, "y": Y},
            (),
            {"input": X},
            {"input": X, "y": Y},
        ),
        (OwnLoss, ranked, LABELLED | {"rank": Y.float()}, (), {"input_ids": X}, (Y.float(), Y)),
        (OwnLoss, gapped, LABELLED | {"mask": Y}, (), {"input_ids": X}, Y),
        (OwnLoss, F.cross_entropy, LABELLED | {"index": Y.flip(0)}, (), {"input_ids": X}, Y),
        (
            TwoInputs,
            F.cross_entropy,
            Batch((X,), {"scale": Y.float(), "shift": 1.0}, Y),
            (X,),
            {"scale": Y.float(), "shift": 1.0},
            Y,
        ),
    ],
)
def test_what_the_model_and_the_loss_are_given(model, loss_fn, element, args, kwargs, target):
    job = captured([element], model(), loss_fn=loss_fn)
    batch = job.batch(0, 40)
    torch.testing.assert_close((batch.args, batch.kwargs, batch.target), (args, kwargs, target), rtol=0, atol=0)
    assert job.batch_size == 40
    loss = job.compute_loss(batch)
    assert loss.dim() == 0
    loss.backward()
    assert len(trace(job).adjustable) == sum(isinstance(module, nn.Linear) for module in job.model.modules())


def test_batches_of_several_lengths_are_those_of_the_largest():
    padded = [{"input_ids": torch.ones(2, length, 5), "labels": torch.zeros(2, 3).long()} for length in (3, 7, 5, 7)]
    with pytest.warns(UserWarning, match=r"the batches of OwnLoss differ in more than their number of samples .* for the largest"):
        job = captured(padded, OwnLoss(), loss_fn=None)
    assert [job.batch(step, size).kwargs["input_ids"].shape for step, size in ((0, 2), (1, 2), (0, 3))] == [
        (2, 7, 5),
        (2, 7, 5),
        (3, 7, 5),
    ]


def test_what_is_no_sample_stays_as_it_is():
    mask = torch.ones(3, 3)
    job = captured([Batch((X[:8], mask, torch.tensor(2.0), "text"), target=Y[:8])])
    batch = job.batch(0, 4)
    assert [getattr(arg, "shape", arg) for arg in batch.args] == [(4, 5), (3, 3), (), "text"]


def test_autocast_around_the_call_is_the_jobs():
    loader = [(X, Y)]
    with torch.autocast("cpu", torch.bfloat16):
        assert captured(loader).amp == "bfloat16"
    assert captured(loader).amp is None
    assert captured(loader, amp="bfloat16").amp == "bfloat16"
    with torch.autocast("cpu", torch.float16), pytest.raises(JobError, match="cannot be planned under autocast in float16"):
        captured(loader)


def test_a_compiled_model_is_taken_out():
    model = net()
    assert captured([(X, Y)], torch.compile(model), sgd(model)).model is model


def test_an_optimizer_may_be_a_function():
    job = captured([(X, Y)], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3), name="mine")
    assert job.optimizer(job.model.parameters()).param_groups[0]["lr"] == 0.3
    assert job.name == "mine"


class Unreadable(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise OSError("disk on fire")


class Unbuildable(torch.optim.SGD):
    """Holds what cannot be copied, as one that shards its state among ranks does."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.lock = __import__("threading").Lock()


class Centres(nn.Module):
    """A loss with parameters of its own, as ArcFace's classes and a learned temperature are."""

    def __init__(self):
        super().__init__()
        self.rows, self.scale = nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(self.scale * output @ self.rows, target)


@pytest.mark.parametrize("way", ["one group", "two groups", "two optimizers", "a closure"])
def test_parameters_of_the_loss_that_an_optimizer_steps_are_left_out(way):
    model, centres = net(), Centres()
    own = list(centres.parameters())
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": own, "lr": 9.0}], lr=0.5)
    if way == "one group":
        optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.5)
    elif way == "two optimizers":
        optimizer = [torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.Adam(own)]
    with pytest.warns(UserWarning, match="2 parameters of the optimizer of Sequential are the loss's: predicted steps"):
        job = qsync.capture(model, optimizer, (lambda o, y: centres(o, y)) if way == "a closure" else centres, [(X, Y)])
    before = [parameter.detach().clone() for parameter in own]
    runner = StepRunner.start(job, torch.device("cpu"), batches=1)
    runner.train_step(0)
    assert all(map(torch.equal, own, before))
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(X), Y).backward()
    expected = [parameter - 0.5 * parameter.grad for parameter in plain.parameters()]
    assert all(torch.allclose(a, b) for a, b in zip(runner.model.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loader": iter([(X, Y)])}, r"the loader is a list_iterator, which gives each batch only once"),
        ({"loader": 7}, r"the loader of Sequential is a int, from which no batches can be read"),
        ({"loader": []}, r"the loader of Sequential yields no batch; check its data set"),
        ({"loader": DataLoader(Unreadable())}, r"reading batch 0 of Sequential's loader failed: OSError: disk on fire"),
        ({"loader": ["text"]}, r"the loader of Sequential yields a str, which says neither .*; where the training loop"),
        (
            {"loader": [(X, Y)], "loss_fn": lambda out, a, b: out},
            r"yields 2 parts, and the loss takes 2 of them .* none for the model",
        ),
        ({"loader": [(X, Y)], "loss_fn": 3}, r"the loss_fn of Sequential is a int; pass the function"),
        (
            {"loader": [{"input": X, "one": Y, "other": Y}]},
            r"a dictionary of which the model does not take one, other, and the loss takes 1 beside the output; of a dictionary, ",
        ),
        (
            {"loader": [{"input": X}]},
            r"a dictionary \(input\) of which the model takes everything, and nothing is left for the loss",
        ),
        (
            {"loader": [{"image": X, "mask": Y}]},
            r"a dictionary \(image, mask\), of which the model's forward gets .* \(missing a required argument: 'input'\); "
            r"where .* pass that as the loader, here lambda: \(\(input, target\) for ",
        ),
        (
            {"loader": [(X, Y.repeat_interleave(3))]},
            rf"yields {len(X)} samples with a target of length {3 * len(Y)}, .* cut .* reshape it in the loss",
        ),
        ({"loader": [(X, Y)], "optimizer": 0.1}, r"the optimizer of Sequential is a float; pass the torch\.optim\.Optimizer"),
        (
            {"loader": [(X, Y)], "optimizer": sgd(net())},
            r"group 0 of the optimizer .* of shape \[6, 5\] that is not one of the model's or the loss's",
        ),
        (
            {"loader": [(X, Y)], "optimizer": torch.optim.SGD([torch.zeros(2)], lr=0.1)},
            r"the optimizer of Sequential has no parameter of the model that is trained",
        ),
    ],
)
def test_what_makes_no_job_is_refused(arguments, said):
    arguments = {"loss_fn": F.cross_entropy, **arguments}
    model = net()
    with pytest.raises(JobError, match=said):
        qsync.capture(model, arguments.pop("optimizer", sgd(model)), arguments["loss_fn"], arguments["loader"])


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (
            lambda o, b: F.cross_entropy(o.logits, b.labels),
            r"failed in line \d+ of test_capture\.py \(AttributeError: ",
        ),
        (lambda o, b: o.loss, "returned None"),
        (
            lambda o, y: F.cross_entropy(o, y),
            r"failed in line \d+ of test_capture\.py \(TypeError: cross_entr",
        ),
    ],
)
def test_a_loss_that_takes_something_else_of_a_dictionary_is_refused_where_it_runs(loss_fn, said):
    job = captured([LABELLED], OwnLoss(), loss_fn=loss_fn)
    said = rf"{said}.*; of a dictionary, loss_fn\(output, batch\) "
    said = rf"^the loss_fn of OwnLoss, called with a SimpleNamespace and a tensor of shape [^;]*, {said}"
    for run in (lambda: job.compute_loss(job.batch(0, 4)), lambda: trace(job)):
        with pytest.raises(JobError, match=said):
            run()


def test_a_loss_of_two_outputs_of_one_model_is_refused_with_the_way_to_write_it():
    """As in a siamese net's loop: ``contrastive(model(a), model(b), same)``."""

    def contrastive(z, other, same):
        return ((z - other).norm(dim=1) * same).sum()

    job = captured([(X, X, Y)], net(), loss_fn=contrastive)
    said = (
        r"^the loss_fn of Sequential, called with a tensor of shape \(\d+, \d+\) and .*, failed in line \d+ of test_capture\.py "
        r"\(RuntimeError: .*; of a tuple, the loss gets .* makes these calls in one module's forward, which is called once"
    )
    with pytest.raises(JobError, match=said):
        trace(job)
    with pytest.raises(JobError, match=r"missing a required argument: 'scale'\); .* here lambda: \(\(x, scale, target\) for "):
        captured([((X, X), Y)], TwoInputs())
    with pytest.raises(JobError, match=r"does not take the other 2 \(too many positional arguments\); .* in one module's forward"):
        captured([(X, X, Y)], net(), loss_fn=lambda z, same: z.sum())


def test_a_loader_may_be_a_function_that_makes_it_and_is_read_as_without():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(list(zip(X, Y, strict=True)), 4, shuffle=True, generator=generator)
    before = torch.get_rng_state(), generator.get_state()
    job = captured(lambda: ((x + 1, y) for x, y in loader), net())
    assert all(map(torch.equal, before, (torch.get_rng_state(), generator.get_state())))
    x, _ = next(iter(loader))
    assert torch.equal(job.batch(0, 4).args[0], x + 1)


def test_a_generator_that_has_begun_to_read_is_told_from_one_that_has_not():
    loader = DataLoader(list(zip(X, Y, strict=True)), 4)
    assert [begins_to_read(it) for it in ((x for x, _ in loader), iter(loader))] == [True, True]
    assert [begins_to_read(it) for it in (loader, (x for x, _ in [(X, Y)]), [X], lambda: loader)] == [False] * 4


def test_a_model_that_has_seen_no_batch_is_refused_before_its_optimizer():
    model = nn.Sequential(nn.Linear(5, 6), nn.LazyLinear(3))
    with pytest.raises(JobError, match=r"1\.weight of Sequential has no shape yet"):
        captured([(X, Y)], model)
    model(X)
    assert trace(captured([(X, Y)], model)).adjustable


def test_what_model_and_loss_both_get_is_there_once():
    job = captured([LABELLED], OwnLoss(), loss_fn=lambda output, batch: output.loss)
    batch = job.batch(0, 40).to("cpu")
    assert batch.target["labels"] is batch.kwargs["labels"]
    assert batch.nbytes == X.nbytes + Y.nbytes


def test_more_that_makes_no_job_is_refused():
    model = net()
    with pytest.raises(JobError, match=r"the Unbuildable of Sequential cannot be made again .*TypeError: .*pass a function"):
        captured([(X, Y)], model, Unbuildable(model.parameters()))
    with pytest.raises(JobError, match=r"the model is a str; pass the torch\.nn\.Module"):
        qsync.capture("resnet50", sgd(model), F.cross_entropy, [(X, Y)])
    job = captured([(X,)], loss_fn=None)
    with pytest.raises(JobError, match="captured without a loss function, and its model returns no loss"):
        job.compute_loss(job.batch(0, 4))
    with pytest.raises(JobError, match=r"^Sequential was captured without a loss function"):  # not as a failure of the export
        trace(job)


DICTIONARIES = [{"boxes": torch.randn(k, 4), "labels": torch.ones(k)} for k in (1, 2, 3, 1)]
IMAGES = [torch.randn(3, 8, 8) for _ in range(4)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((tuple(IMAGES), tuple(DICTIONARIES)), r"yields a tuple with a tensor for each sample \(argument 0 of the model\)"),
        ((torch.stack(IMAGES), DICTIONARIES), r"yields a list with a dictionary for each sample \(argument 1 of the model\)"),
        ({"x": torch.stack(IMAGES), "y": DICTIONARIES}, r"yields a list with a dictionary for each sample \(y\)"),
        ({"x": IMAGES, "y": torch.zeros(4)}, r"yields a list with a tensor for each sample \(x\)"),
    ],
)
def test_lists_with_an_entry_for_each_sample_are_refused(given, said):
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, y):
            return self.layer(x)

    model = Detector()
    with pytest.raises(JobError, match=said + ".* along dimension 0 of tensors: pad the entries in collate_fn and stack them, "):
        qsync.capture(model, torch.optim.SGD(model.parameters(), 0.1), None, [given])


def test_lists_of_inputs_that_hold_all_samples_are_cut():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, scales, y):
            return sum(map(self.layer, scales)).mean() + y.mean()

    model = Scales()
    given = ([torch.randn(4, 8), torch.randn(4, 8)], torch.randn(4))
    job = qsync.capture(model, torch.optim.SGD(model.parameters(), 0.1), None, [given])
    assert [tuple(x.shape) for x in job.batch(0, 2).tensors] == [(2, 8), (2, 8), (2,)]

"""Collectors of plugins that fail: named in a sentence, fatal only to those that asked for them."""

import math
import types

import attrs
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.errors import ObservationError, PluginError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.registry import Registry
from qsync_torch.doctor.machine import doctor_lines
from qsync_torch.job import Batch, Job
from qsync_torch.observing import observe as observe_module
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.collector import CollectorUnavailable
from qsync_torch.observing.collectors import collectors_named, installed_collectors
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.record import JobFault
from qsync_torch.tracing.trace import trace

from .asking import observed

INT8 = Variant.of(Precision.INT8)


class Called:
    """Per call; fails in the given update, counted in calls of two operators."""

    name = "called"

    def __init__(self, fails_at, error=RuntimeError):
        self.calls, self.fails_at, self.error = 0, fails_at, error

    def collect(self, call, variants):
        self.calls += 1
        if (self.calls - 1) // 2 == self.fails_at and self.calls % 2 == 0:
            raise self.error("boom in\na call")
        return {(None, "one"): 1.0}


class Stepped:
    """By the step; what it is asked fails or is no number."""

    name = "stepped"

    def __init__(self, answer):
        self.answer = answer

    def collect_step(self, step, variants):
        return self.answer() if callable(self.answer) else self.answer


class Expensive(Stepped):
    def passes(self, dag, variants):
        raise KeyError("passes")


class Forgetful(Stepped):
    def restore(self, model, update, variants, found):
        raise LookupError(f"nothing of {update} {dict(found)}")


def _fail():
    raise OSError


def _exit():
    print("noise")
    raise SystemExit(0)


def _job():
    torch.manual_seed(0)

    def batch(step, size):
        return Batch((torch.randn(size, 6, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 3)

    return Job(
        "net",
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)),
        batch,
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def _observe(collectors, **options):
    job = _job()
    options = {"warmup": 1, "steps": 3, "settled": None, **options}
    return observed(job, attrs.evolve(trace(job), model="net"), (INT8,), collectors=collectors, **options)


FAILING = [
    (lambda: Called(0), "update 1 of net with RuntimeError: boom in a call"),
    (lambda: Called(2), "update 3 of net with RuntimeError: boom in a call"),
    (lambda: Stepped(_fail), "update 1 of net with OSError"),
    (lambda: Called(0, KeyboardInterrupt), "update 1 of net with KeyboardInterrupt: boom in a call"),
    (lambda: Stepped(_exit), "update 1 of net with SystemExit: 0"),
    (lambda: Stepped(None), "update 1 of net with AttributeError: 'NoneType' object has no attribute 'items'"),
    (lambda: Stepped({(None, None, "x"): "much"}), "update 1 of net with ValueError: could not convert string to float: 'much'"),
    (lambda: Stepped({(None, None, "x"): math.nan}), "update 1 of net with ValueError: x of the model is nan"),
    (lambda: Stepped({"x": 1.0}), "update 1 of net with ValueError: not enough values to unpack (expected 3, got 1)"),
    (lambda: Expensive({(None, None, "x"): 1.0}), "update 1 of net with KeyError: 'passes'"),
]
IDS = [
    "a call",
    "a later update",
    "a step",
    "an interrupt of its own",
    "an exit",
    "nothing",
    "a text",
    "no number",
    "another key",
    "the announcement",
]


@pytest.mark.parametrize(("make", "says"), FAILING, ids=IDS)
def test_one_that_was_asked_for_ends_the_run_by_name(make, says):
    collector = make()
    with pytest.raises(PluginError) as error:
        _observe([collector, LossVarCollector()])
    origin = f"{__name__}.{type(collector).__name__}"
    assert str(error.value) == f"collector {collector.name} ({origin}) failed at {says}; name others with --collectors, or fix it"


@pytest.mark.parametrize(("make", "says"), FAILING, ids=IDS)
def test_one_that_was_not_asked_for_disables_only_itself(make, says, monkeypatch, capsys):
    collector, said = make(), []
    monkeypatch.setattr(observe_module, "default_collectors", lambda announce: [collector, LossVarCollector()])
    found = _observe(None, announce=said.append)
    assert f"without {collector.name}: it failed at {says}; observing goes on with lossvar" in said
    assert found.settings[f"without {collector.name}"] == f"it failed at {says}"
    assert found.settings["collectors"] == f"{collector.name},lossvar"
    assert found.series == _observe([LossVarCollector()]).series
    assert capsys.readouterr().out == ""


class Fading:
    """Can go on for two updates."""

    name = "fading"

    def __init__(self):
        self.updates = 0

    def collect_step(self, step, variants):
        self.updates += 1
        if self.updates > 2:
            raise CollectorUnavailable("its memory is full")
        return {(None, None, "x"): 1.0}


def test_one_that_can_not_go_on_is_left_out_with_all_that_it_wrote(monkeypatch):
    monkeypatch.setattr(observe_module, "default_collectors", lambda announce: [Fading(), LossVarCollector()])
    found = _observe(None)
    assert found.settings["without fading"] == "its memory is full"
    assert found.series == _observe([LossVarCollector()]).series


def test_one_that_can_not_go_on_ends_the_run_that_asked_for_it():
    with pytest.raises(ObservationError, match=r"^collector fading fails at update 3 of net: its memory is full$"):
        _observe([Fading(), LossVarCollector()])


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_call_that_can_not_be_observed(asked_for, monkeypatch):
    collectors = [Called(0, CollectorUnavailable), LossVarCollector()]
    monkeypatch.setattr(observe_module, "default_collectors", lambda announce: collectors)
    found = _observe(collectors if asked_for else None)
    assert found.settings["without called"] == "boom in\na call"
    assert {series.collector for series in found.series} == {"run", "lossvar"}


def test_the_only_one_fails(monkeypatch):
    monkeypatch.setattr(observe_module, "default_collectors", lambda announce: [Called(1)])
    with pytest.raises(ObservationError, match="collector called cannot observe net: it failed at update 2 of net with RuntimeErr"):
        _observe(None)


def test_an_error_of_qsync_in_a_collector_is_the_jobs(monkeypatch):
    def refuse():
        raise ObservationError("the gradients are not finite")

    monkeypatch.setattr(observe_module, "default_collectors", lambda announce: [Stepped(refuse), LossVarCollector()])
    with pytest.raises(JobFault, match=r"^the gradients are not finite$"):
        _observe(None)


def test_one_that_can_not_be_restored(monkeypatch):
    kept, said = [], []
    rows = {(None, None, "x"): 2.0}
    monkeypatch.setattr(observe_module, "default_collectors", lambda announce: [Forgetful(rows), LossVarCollector()])
    _observe(None, checkpoint=kept.append)
    found = _observe(None, earlier=kept[0], announce=said.append)
    assert said[0].startswith(
        "without stepped: it failed at update 1 of net with LookupError: nothing of 1 {(None, None, 'x'): 2.0}"
    )
    assert found.series == _observe([LossVarCollector()]).series


@pytest.mark.parametrize(
    ("offered", "says"),
    [
        (Stepped({}), ""),
        (LossVarCollector(), "two collectors are called 'lossvar'; uninstall the plugin with the second, or rename it"),
    ],
)
def test_what_plugins_offer_is_checked(offered, says, monkeypatch):
    installed = Registry.collect
    monkeypatch.setattr(Registry, "collect", lambda self, *hook: [*installed(self, *hook), offered])
    if not says:
        assert "stepped" in installed_collectors()
        return
    with pytest.raises(PluginError, match=says):
        installed_collectors()


def test_what_lacks_part_of_the_interface_is_left_out(monkeypatch):
    """By name, and alone: beside a plugin that offers nothing else, and one that offers more."""
    useless = types.SimpleNamespace(qsync_register_collectors=hookimpl(lambda: [object(), Stepped({(None, None, "x"): 2.0})]))
    load = Registry.load

    def with_plugin(*args):
        registry = load(*args)
        registry.register(useless, "useless")
        return registry

    monkeypatch.setattr(Registry, "load", with_plugin)
    lacks = "it lacks part of a collector's interface (name, and collect or collect_step); fix or uninstall that plugin"
    said = []
    found = _observe(None, announce=said.append)
    assert said[0] == f"plugin useless (builtins.object) is disabled: {lacks}"
    assert found.values("stepped", "x") == (2.0,) * len(found.iterations)
    topics = {line.topic: line for line in doctor_lines()}
    assert topics["collectors"].finding == said[0]
    with pytest.raises(
        ObservationError, match=r"there is no collector 'foo'; installed are .*; plugin useless \(builtins\.object\)"
    ):
        collectors_named(["foo"])


@pytest.mark.parametrize(
    ("offered", "says"),
    [
        (Stepped, "it is a class, where an instance of it is asked for"),
        (types.SimpleNamespace(name="x", collect_step=3), "it lacks part of a collector's interface"),
        (types.SimpleNamespace(name="a,b", collect=print), "its name is 'a,b', and must be text without blanks and commas"),
        (types.SimpleNamespace(name="", collect=print), "its name is '', and must be text"),
    ],
)
def test_what_could_never_run_is_refused_beforehand(offered, says, monkeypatch):
    installed = Registry.collect
    refused = []
    monkeypatch.setattr(Registry, "collect", lambda self, hook, problem: refused.append(problem(offered)) or installed(self, hook))
    assert "lossvar" in installed_collectors()
    assert refused[0].startswith(says)


class Loss(Stepped):
    def collect_step(self, step, variants):
        with step.undisturbed():
            return {(None, None, "loss"): step.loss().item()}


class GradientNorm(Stepped):
    def collect_step(self, step, variants):
        with step.undisturbed():
            gradients = torch.autograd.grad(step.loss(), list(step.model.parameters()))
        return {(None, None, "norm"): float(torch.nn.utils.get_total_norm(gradients))}


class GradientSize(Called):
    def collect(self, call, variants):
        return {(None, "size"): call.grad_output.square().sum()}


@pytest.mark.parametrize("collector", [Loss({}), GradientSize(9)])
def test_a_loss_that_is_not_finite_is_not_blamed_on_a_collector(collector):
    job = _job()

    def batch(step, size):
        return attrs.evolve(job.batch(step, size), args=(torch.full((size, 6), math.nan),)) if step == 3 else job.batch(step, size)

    broken = attrs.evolve(job, batch=batch)
    with pytest.raises(JobFault, match="the loss of net is nan at update 3; its batch has NaN"):
        observe(broken, trace(broken), ObserveRequest([INT8], warmup=1, steps=5, settled=None, collectors=[collector]))


@pytest.mark.parametrize("collector", [GradientNorm({}), GradientSize(9)], ids=["a step", "a call"])
def test_a_gradient_that_is_not_finite_is_not_blamed_on_a_collector(collector):
    """The loss is zero, and the derivative of a square root there infinite."""
    job = attrs.evolve(_job(), loss=lambda output, batch: (output - output.detach()).abs().sum().sqrt())
    with pytest.raises(JobFault, match=r"is (nan|inf) at update 0 of .*; its activation, weight or gradient holds NaN or infinite"):
        observe(job, trace(job), ObserveRequest([INT8], warmup=0, steps=2, settled=None, collectors=[collector]))


def test_the_command_says_so_in_a_line(tmp_path, monkeypatch):
    installed = Registry.collect

    def collect(self, hook, *problem):
        return [*installed(self, hook, *problem), *([Stepped(_fail)] if hook == "qsync_register_collectors" else [])]

    monkeypatch.setattr(Registry, "collect", collect)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(
        "import torch\nfrom qsync_torch.job import Batch, Job\n"
        "batch = lambda step, size: Batch((torch.ones(size, 3),), target=torch.zeros(size, dtype=torch.long))\n"
        "loss = lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target)\n"
        "tiny = lambda: Job('tiny', torch.nn.Linear(3, 2), batch, loss, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4)\n"
    )
    command = ["observe", "job.py:tiny", "-o", "o.qsync", "--warmup", "1", "--steps", "1", "--rungs", "bfloat16"]
    result = CliRunner().invoke(cli, [*command, "--collectors", "stepped"], catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: collector stepped ({__name__}.Stepped) failed at update 1 of tiny")
    assert not (tmp_path / "o.qsync").exists()
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert (
        "without stepped: it failed at update 1 of tiny with OSError; observing goes on with hutchinson, lossvar" in result.stderr
    )
    assert artifact.load(tmp_path / "o.qsync").settings["without stepped"] == "it failed at update 1 of tiny with OSError"

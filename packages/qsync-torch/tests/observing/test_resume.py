"""Observing that is interrupted and continued, and what is said before it begins."""

import copy
import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.collectors import collectors_named
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.montecarlo import MonteCarloCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.record import SettledRule
from qsync_torch.tracing.trace import trace

from .asking import OnceSquare, observed

INT8 = Variant.of(Precision.INT8)
BFLOAT16 = Variant.of(Precision.BFLOAT16)
LADDER = (INT8, BFLOAT16)


class Interrupted(Exception):
    pass


class Net(nn.Module):
    """Batch norm's statistics, dropout's random numbers and momentum go from update to update."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.drop(F.relu(self.norm(self.first(x)))).flatten(1))


class Once(Net):
    def forward(self, x):
        return OnceSquare.apply(super().forward(x))


def _batch(step, size):
    return Batch((torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 3)


def _job(model=Net, loss=None, lr=0.1):
    torch.manual_seed(0)
    loss = loss or (lambda output, batch: F.cross_entropy(output, batch.target))
    return Job("net", model(), _batch, loss, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9), batch_size=6)


@pytest.fixture(scope="module")
def dag():
    return trace(_job())


def _observe(dag, model=Net, **options):
    collectors = [HutchinsonCollector(), LossVarCollector()]
    options = {"warmup": 2, "steps": 5, "collectors": collectors, "settled": None, **options}
    return observed(_job(model), dag, options.pop("variants", LADDER), **options)


def _interrupted(dag, after, **options):
    kept = []

    def checkpoint(so_far):
        kept.append(so_far)
        if len(kept) == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        _observe(dag, checkpoint=checkpoint, **options)
    return kept[-1]


@pytest.mark.parametrize("after", [1, 3, 5])
def test_continued_is_as_if_never_interrupted(dag, after):
    whole = _observe(dag)
    earlier = _interrupted(dag, after)
    assert earlier.stopped == "interrupted"
    assert earlier.iterations == whole.iterations[:after]
    torch.manual_seed(77)  # what else the program has drawn meanwhile does not matter
    assert _observe(dag, earlier=earlier) == whole


def test_one_that_an_older_version_began_is_refused(dag):
    earlier = _interrupted(dag, 2)
    older = attrs.evolve(earlier, series=tuple(one for one in earlier.series if one.term != terms.GRADIENT_SQ_NORM))
    with pytest.raises(ObservationError, match=r"an older version made it, without the gradient's norm .*--fresh"):
        _observe(dag, earlier=older)


def test_interrupted_twice(dag):
    earlier = _interrupted(dag, 2)
    later = _interrupted(dag, 1, earlier=earlier)
    assert len(later.iterations) == 3
    assert _observe(dag, earlier=later) == _observe(dag)


def test_continued_where_a_collector_is_left_out(dag):
    whole, said = _observe(dag, model=Once), []
    assert "once_differentiable" in whole.settings["without hutchinson"]
    earlier = _interrupted(dag, 2, model=Once)
    assert _observe(dag, model=Once, earlier=earlier, announce=said.append) == whole
    assert said[0] == f"without hutchinson: {whole.settings['without hutchinson']}; observing goes on with lossvar"


def test_continued_settles_where_it_would_have(dag):
    rule = SettledRule(window=2, running=-1, window_alone=-1)
    whole = _observe(dag, steps=8, settled=rule)
    assert whole.stopped.startswith("settled: ")
    assert 3 < len(whole.iterations) < 8
    assert _observe(dag, steps=8, settled=rule, earlier=_interrupted(dag, 3, steps=8, settled=rule)) == whole


def test_continued_truth(dag):
    options = {"steps": 3, "variants": (INT8,)}
    whole = _observe(dag, collectors=[MonteCarloCollector(draws=4)], **options)
    earlier = _interrupted(dag, 2, collectors=[MonteCarloCollector(draws=4)], **options)
    assert _observe(dag, earlier=earlier, collectors=[MonteCarloCollector(draws=4)], **options) == whole


class First:
    """Measures at the first observed update, with two passes a variant, and repeats its number at later ones."""

    name = "first"
    measures_once = True
    found = None

    def passes(self, dag, variants):
        return 2 * len(variants)

    def restore(self, model, update, variants, found):
        self.found = found

    def collect_step(self, step, variants):
        self.found = self.found or {(None, None, "measured_at"): float(step.update)}
        return self.found


def test_a_collector_that_measures_once_gets_its_numbers_back(dag):
    """What it measured at the first observed update comes back, and is not measured again."""
    options = {"collectors": [First(), LossVarCollector()], "steps": 3}
    whole = _observe(dag, **options)
    for after in (1, 2):
        earlier = _interrupted(dag, after, **{**options, "collectors": [First(), LossVarCollector()]})
        said = []
        again = {**options, "collectors": [First(), LossVarCollector()], "announce": said.append}
        assert _observe(dag, earlier=earlier, **again) == whole
        assert "each about 1 forward and backward passes (first, lossvar), about" in said[0]


def test_the_job_is_left_as_it_was(dag):
    job = _job()
    before, state = copy.deepcopy(job.model.state_dict()), torch.random.get_rng_state()
    observe(job, dag, ObserveRequest(LADDER, warmup=1, steps=1, collectors=[HutchinsonCollector(), LossVarCollector()]))
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 1}, "its seed is '0', now '1'"),
        ({"warmup": 3}, "its warmup is '2', now '3'"),
        ({"steps": 6}, "its steps is '5', now '6'"),
        ({"batch_size": 4}, "its batch_size is '3', now '4'"),
        ({"collectors": [LossVarCollector()]}, "its collectors is 'hutchinson,lossvar', now 'lossvar'"),
        ({"variants": (BFLOAT16,)}, f"its variants is '{BFLOAT16} {INT8}', now '{BFLOAT16}'"),
        ({"variants": (attrs.evolve(INT8, rounding=Rounding.FLOOR), BFLOAT16)}, "round=floor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_another_run_left_is_refused(dag, changed, says):
    earlier = _interrupted(dag, 1)
    with pytest.raises(ObservationError) as error:
        _observe(dag, earlier=earlier, **changed)
    text = str(error.value)
    assert text.startswith("the interrupted observation cannot be continued: its ")
    assert text.endswith("; start anew (qsync observe --fresh)")
    assert says in text
    assert "\n" not in text


def test_another_models_observations_are_refused(dag):
    earlier = attrs.evolve(_interrupted(dag, 1), dag_digest="0" * 64)
    with pytest.raises(ObservationError, match=r"cannot be continued: its model is '0+', now '[0-9a-f]{64}'; start anew "):
        _observe(dag, earlier=earlier)


def test_the_cost_is_announced_before_anything_is_observed(dag):
    happened = []

    class Costly:
        name = "costly"

        def passes(self, dag, variants):
            return 2.0 * len(variants)

        def collect_step(self, step, variants):
            happened.append(step.update)
            return {(None, None, "one"): 1.0}

    options = {"collectors": [Costly(), LossVarCollector()], "announce": happened.append, "warmup": 3, "steps": 2}
    _observe(dag, **options)
    text, *updates = happened
    assert updates == [3, 4]
    expected = r"at most 2 observed updates of 3 samples, each about 5 forward and backward passes \(costly, lossvar\), about \d+ s"
    assert re.fullmatch(expected, text)
    happened.clear()
    _observe(dag, **{**options, "warmup": 0})
    assert happened[0].endswith("(costly, lossvar)")  # without a warm-up there is no time to go by
    happened.clear()
    earlier = _interrupted(dag, 1, **options)
    happened.clear()
    _observe(dag, earlier=earlier, **options)
    assert happened[0].startswith("at most 1 observed updates of 3 samples")
    assert happened[1:] == [4]


def test_passes_of_one_that_measures_once_are_those_of_its_first_update(dag):
    said = []
    _observe(dag, announce=said.append, steps=3, collectors=[First()])
    start = "at most 3 observed updates of 3 samples, each about 1 forward and backward passes (first), at the first 4 "
    assert said[0].startswith(start)


def test_passes_of_the_default(dag):
    said = []
    _observe(dag, announce=said.append, steps=1)
    masks = sum(operator.kind in ("relu", "max_pool2d") for operator in dag.operators)
    assert masks == 1
    assert f"each about {1 + HutchinsonCollector().passes(dag, LADDER):.0f} forward and backward passes (hutchinson," in said[0]


def test_progress_counts_warm_up_and_updates(dag):
    seen = []
    _observe(dag, warmup=1, steps=2, progress=lambda *state: seen.append(state))
    assert seen == [(0, 3, "warm-up"), (1, 3, "update"), (2, 3, "update"), (3, 3, "")]


def test_a_loss_without_parameters():
    class Detached(Net):
        def forward(self, x):
            return super().forward(x).detach()

    job = _job(Detached)
    expected = r"^the loss of net depends on no trainable parameter, so that there is nothing to observe; check that [^\n]*$"
    for warmup in (0, 1):
        with pytest.raises(ObservationError, match=expected):
            observe(
                job,
                trace(_job()),
                ObserveRequest(LADDER, warmup=warmup, steps=1, collectors=[HutchinsonCollector(), LossVarCollector()]),
            )


def test_an_unknown_collector():
    with pytest.raises(ObservationError, match=r"^there is no collector 'hutchison'; installed are hutchinson, lossvar, "):
        collectors_named(["lossvar", "hutchison"])
    expected = r"^no collector is named, so that nothing would be observed; installed are hutchinson, lossvar, "
    with pytest.raises(ObservationError, match=expected):
        collectors_named([])
    with pytest.raises(ObservationError, match=expected):
        observe(_job(), trace(_job()), ObserveRequest(LADDER, collectors=[]))
    assert [collector.name for collector in collectors_named(["montecarlo", "lossvar", "montecarlo"])] == ["montecarlo", "lossvar"]


def test_a_gradient_that_is_not_finite_names_the_update(dag):
    def loss(output, batch):
        # Finite itself; its derivative at 0 is not.
        return F.cross_entropy(output, batch.target) + (output * 0).abs().sqrt().sum()

    job = _job(loss=loss)
    with pytest.raises(ObservationError, match="the gradient of net is not finite at update 0; train with a smaller learning rate"):
        observe(job, dag, ObserveRequest(LADDER, warmup=0, steps=2, collectors=[HutchinsonCollector(), LossVarCollector()]))


def test_an_operator_that_no_gradient_reaches_has_no_series(dag):
    class Cut(Net):
        def forward(self, x):
            with torch.no_grad():
                y = self.first(x)
            return self.second(self.drop(F.relu(self.norm(y))).flatten(1))

    cut = _observe(dag, model=Cut, steps=2, collectors=[LossVarCollector()])
    assert {series.op_id for series in cut.series} == {None, OpId("second")}
    assert cut.values(terms.LOSSVAR, terms.X_VAR_GRAD, OpId("second"), INT8)

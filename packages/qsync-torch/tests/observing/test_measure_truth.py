import json

import attrs
import pytest
from click.testing import CliRunner

from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.errors import ObservationError, QSyncError
from qsync_core.ir import observations as terms
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.plugins.hooks import TruthRequest
from qsync_torch.load_job import load_job
from qsync_torch.observing import measure_truth as measure_truth_module
from qsync_torch.observing.measure_truth import measure_truth
from qsync_torch.observing.montecarlo import MonteCarloCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

INT8, BFLOAT16 = Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16)

JOB = """
import attrs
import torch
from qsync_torch.job import Batch, Job

def tiny():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8), torch.nn.GELU()]
    def batch(step, size):
        return Batch((torch.randn(size, 6, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 3)
    return Job(
        "tiny",
        torch.nn.Sequential(*layers, torch.nn.Linear(8, 3)),
        batch,
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )

def wider():
    job = tiny()
    job.model[3] = torch.nn.Linear(8, 8, bias=False)
    return job

def bare():
    return attrs.evolve(tiny(), model=torch.nn.Sequential(torch.nn.LayerNorm(6)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    job = load_job("job.py:tiny")
    dag = trace(job)
    artifact.save(dag, tmp_path / "dag.qsync")
    artifact.save(observe(job, dag, ObserveRequest((INT8, BFLOAT16), warmup=2, steps=3, seed=5)), tmp_path / "o.qsync")
    return tmp_path


@pytest.fixture
def half_a_second(monkeypatch):
    """What a pass is said to take, so that no test depends on this machine."""
    monkeypatch.setattr(measure_truth_module, "_seconds_per_pass", lambda *_: 0.5)


def _request(folder, **changes):
    told = []
    request = TruthRequest(
        job="job.py:tiny",
        dag=artifact.load(folder / "dag.qsync", PrecisionDag),
        observations=artifact.load(folder / "o.qsync", Observations),
        variants=(INT8, BFLOAT16),
        budget_s=60.0,  # 118 passes besides the warm-up
        device="",
        announce=told.append,
        progress=lambda done, total, text: told.append((done, total)),
    )
    return attrs.evolve(request, **changes), told


def test_the_observed_updates_are_measured_again(folder, half_a_second):
    request, told = _request(folder)
    found = measure_truth(request)
    observed = request.observations
    assert (found.iterations, found.batch_size) == (observed.iterations, observed.batch_size) == ((2, 3, 4), 4)
    # The same losses: the same states, batches and dropout masks.
    assert found.values("run", "loss") == pytest.approx(observed.values("run", "loss"), rel=1e-6)
    assert {series.collector for series in found.series} == {"run", terms.MONTECARLO}
    # 3 operators and all together; 8 draws and bfloat16's one, on 3 batches.
    assert told[0] == (
        "measuring the truth: 3 operators in int8, bfloat16, 8 draws where rounding is random, on 3 batches after 2 updates: "
        "111 forward and backward passes, about 58 s"
    )
    assert told[1] == (0, 111)
    assert told[-1] == (111, 111)
    done = [now for now, _ in told[1:]]
    assert done == sorted(done)


def test_what_chains_keep_is_measured_where_that_is_asked_for(folder, half_a_second):
    request, told = _request(folder, budget_s=82.0, chains=True)  # 162 passes besides the warm-up
    found = measure_truth(request)
    kept = ChainVariant(saved=Precision.INT8).rated_as
    for name in ("1#0", "4#0"):  # both GELUs
        halves = [found.values(terms.MONTECARLO, half, OpId.parse(name), kept) for half in (terms.FIRST_HALF, terms.SECOND_HALF)]
        assert all(value > 0 for half in halves for value in half)
        assert halves[0] != halves[1]
    assert told[0] == (
        "measuring the truth: 3 operators in int8, bfloat16 and 2 kept inputs of chains, 8 draws where rounding is random, on 3 "
        "batches after 2 updates: 159 forward and backward passes, about 82 s"
    )
    assert told[-1] == (159, 159)
    with pytest.raises(ObservationError, match="on one batch takes 17 passes"):
        measure_truth(_request(folder, budget_s=7, chains=True)[0])


def test_the_numbers_are_the_collectors(folder):
    request, _ = _request(folder, variants=(BFLOAT16,), budget_s=1e6)
    job = load_job("job.py:tiny")
    again = observe(
        job, request.dag, ObserveRequest((BFLOAT16,), warmup=2, steps=3, seed=5, collectors=[MonteCarloCollector(2)], settled=None)
    )
    found = measure_truth(request)
    for op_id in (OpId("0"), OpId("3"), None):
        key = (terms.MONTECARLO, terms.FIRST_HALF, op_id, BFLOAT16)
        assert found.values(*key) == again.values(*key)


def test_what_is_refused(folder, half_a_second):
    request, told = _request(folder, budget_s=7)
    expected = r"a budget of 7 s is too small: measuring 3 operators once on one batch takes 13 passes of 0\.5 s after 2 updates"
    with pytest.raises(ObservationError, match=expected + r" of warm-up; give at least 9\.8 s"):
        measure_truth(request)
    for budget in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(
            ObservationError, match=rf"^the budget is a number of seconds, finite and greater than 0; got {budget:g}$"
        ):
            measure_truth(_request(folder, budget_s=budget)[0])
    assert told == []
    with pytest.raises(QSyncError, match=r"only the graph has 3\.bias; run 'qsync trace' for this job"):
        measure_truth(_request(folder, job="job.py:wider")[0])
    bare = trace(load_job("job.py:bare"))
    with pytest.raises(ObservationError, match="tiny has no operator whose precision a plan may change"):
        measure_truth(_request(folder, job="job.py:bare", dag=bare)[0])


def test_a_budget_without_bounds_measures_all(folder, half_a_second, monkeypatch):
    seen = []
    monkeypatch.setattr(measure_truth_module, "_cost", lambda budget, *_: seen.append(budget) or (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        measure_truth(_request(folder, budget_s=1e308)[0])
    monkeypatch.setattr(measure_truth_module, "_seconds_per_pass", lambda *_: 1e-9)
    with pytest.raises(KeyError):
        measure_truth(_request(folder, budget_s=1e308)[0])
    assert [(budget.batches, budget.draws) for budget in seen] == [(3, 32)] * 2


def test_the_command_measures_keeps_and_reads(folder, half_a_second):
    arguments = ["indicate", "o.qsync", "--dag", "dag.qsync", "--check", "--truth", "t.qsync", "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--job", "job.py:tiny", "--budget", "30"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("measuring the truth: 3 operators in bfloat16, int8, ")
    first = json.loads(result.stdout)
    assert {"hutchinson", "lossvar"} <= set(first["check"]["indicators"])
    assert first["check"]["iterations"] == 3
    assert first["check"]["notes"] == []
    again = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert again.stderr == ""
    assert json.loads(again.stdout) == first
    kept = CliRunner().invoke(cli, [*arguments, "--job", "job.py:tiny"], catch_exceptions=False)
    assert kept.stderr == "the truth is read from t.qsync; remove that file to measure it again\n"
    tiny = CliRunner().invoke(cli, [*arguments[:-3], "--job", "job.py:tiny", "--budget", "1"])
    assert tiny.exit_code == 1
    assert "a budget of 1 s is too small" in tiny.output

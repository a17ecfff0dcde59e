"""The models are what the rows say they are, and a row is what can be computed from the measurements by other means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

from indicator.agreement import NAMES, Judged
from indicator.data import BYTES, SIDE, digits_batch, text_batch
from indicator.measuring import INT8, Effort, Kept, Task, measure
from indicator.models import SUBJECTS
from indicator.published import named
from indicator.rows import ladder_rows
from qsync_core.ir import observations as terms
from qsync_planner.indicate import indicate
from qsync_torch.tracing.trace import trace


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_model_has_thirty_operators_that_a_plan_may_change(name) -> None:
    dag = trace(SUBJECTS[name].job(0))
    assert len(dag.adjustable) >= 30
    kinds = {operator.kind for operator in dag.operators}
    assert {"transformer": {"linear", "layer_norm", "gelu", "dropout"}, "gelu-cnn": {"conv2d", "linear", "gelu"}}.get(
        name, {"conv2d", "batch_norm", "relu", "max_pool2d"}
    ) <= kinds
    assert ("relu" in kinds) == (name == "relu-cnn")


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_seed_rules_weights_and_batches(name) -> None:
    first, again, other = (SUBJECTS[name].job(seed) for seed in (1, 1, 2))

    def same(a, b) -> list[bool]:
        x, y = (
            [*job.model.state_dict().values(), *(tensor for step in (0, 7) for tensor in job.batch(step, 4).args)] for job in (a, b)
        )
        return [torch.equal(p, q) for p, q in zip(x, y, strict=True)]

    assert all(same(first, again))
    assert not all(same(first, other)[-2:])
    assert not torch.equal(first.batch(0, 4).args[0], first.batch(1, 4).args[0])


def test_batches() -> None:
    text = text_batch(3, 5, length=12, seed=0)
    assert torch.equal(text.args[0][:, 1:], text.target[:, :-1])
    assert int(text.args[0].max()) < BYTES
    digits = digits_batch(3, 5, seed=0)
    assert digits.args[0].shape == (5, 1, SIDE, SIDE)
    assert digits.target.shape == (5,)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_row_is_kendalls_tau_of_the_kept_measurements(tmp_path) -> None:
    kept = Kept(tmp_path, Effort(warmup=2, steps=2, truth_steps=2, draws=2))
    task = Task("gelu-cnn", 0)
    assert not kept.is_complete(task)
    said: list[str] = []
    measure(task, kept, said.append)
    assert kept.is_complete(task)
    measure(task, kept, said.append)
    assert len(said) == 3  # the second time there was nothing left to do
    measured = kept.read(task)
    assert measured.truth.iterations == measured.observed.iterations == (2, 3)
    rows = {row["id"]: row for row in ladder_rows({"gelu-cnn": [Judged.of(measured)]})}
    assert {f"I1b{suffix}" for suffix in ("", *(f"-{name}" for name in NAMES[1:]), "-ceiling", "-ceiling-draws")} <= set(rows)
    assert not any(name.startswith("I3") for name in rows)  # those need all models
    halves = [
        np.array([measured.truth.values(terms.MONTECARLO, term, o.op_id, INT8) for o in measured.dag.adjustable])
        for term in (terms.FIRST_HALF, terms.SECOND_HALF)
    ]
    # Relative to ‖g‖² of their update, as the page on the indicator has averages; a common factor changes no ranks.
    sq_norms = np.array(measured.truth.values(terms.MONTECARLO, terms.GRADIENT_SQ_NORM, None))
    truth = (np.mean(halves, 0) / sq_norms).mean(1)
    for name in ("lossvar", "hessian", "paper"):
        omega = indicate(measured.observed, measured.dag, [INT8], named(name)).omega
        expected = kendalltau([omega[o.op_id][INT8] for o in measured.dag.adjustable], truth).statistic
        assert rows[f"I1b-{name}"]["value"] == pytest.approx(expected, abs=1e-4)
    by_draws = kendalltau(*((half / sq_norms).mean(1) for half in halves)).statistic
    assert rows["I1b-ceiling-draws"]["value"] == pytest.approx(by_draws, abs=1e-4)

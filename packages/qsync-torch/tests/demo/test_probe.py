"""What the demo makes smaller and leaves out on a machine, from what it measured there."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.capturing.capture import capture
from qsync_torch.demo import probe
from qsync_torch.demo.probe import LADDER, Probe, fitting_batch, sample_seconds
from qsync_torch.demo.workloads import load_workload, loss
from qsync_torch.profiling import paying
from qsync_torch.profiling.paying import compared_rungs, largest_operator
from qsync_torch.tracing.trace import trace

INT8, BFLOAT16, FLOAT32 = LADDER


def tiny_job(batch_size: int):
    workload = load_workload("resnet", tiny=True)
    return capture(workload.model, workload.optimizer, loss, DataLoader(workload.training, batch_size))


def found(int8: float, bfloat16: float, batch_size: int = 32) -> Probe:
    return Probe(batch_size, 32, "conv", {INT8: int8, BFLOAT16: bfloat16})


@pytest.mark.parametrize(
    ("sample_s", "seconds", "batch"),
    [(0.01, 210, 32), (0.03, 210, 16), (0.06, 210, 8), (0.1, 210, 4), (5.0, 210, 4), (0.001, -10, 4)],
)
def test_a_slow_machine_gets_smaller_batches(sample_s, seconds, batch):
    assert fitting_batch(sample_s, 32, seconds) == batch


def test_rungs_that_pay_are_the_ladder_and_the_others_are_named():
    both = found(0.6, 0.5)
    assert (both.ladder, both.saves_time, both.notes) == (LADDER, True, [])
    one = found(0.6, 1.9)
    assert one.ladder == (INT8, FLOAT32)
    (note,) = one.notes
    assert note.startswith("Left out: bfloat16, which does not pay on this CPU")
    assert "int8 0.60, bfloat16 1.90" in note


def test_where_no_rung_pays_memory_is_saved():
    none = found(50.0, 1.1, batch_size=8)
    assert not none.saves_time
    assert none.ladder == (BFLOAT16, FLOAT32)
    smaller, why = none.notes
    assert "8 samples a step instead of 32" in smaller
    assert "No lower precision saves time on this CPU" in why
    assert "a budget that float32 does not fit" in why


def test_the_largest_operator_is_tried_at_every_rung():
    job = tiny_job(4)
    dag = trace(job)
    assert dag.batch_size == 4
    assert largest_operator(dag).flops == max(operator.flops for operator in dag.adjustable)
    ratios = compared_rungs(dag, dict(job.model.named_parameters()))
    assert list(ratios) == [INT8, BFLOAT16]
    assert all(ratio.value > 0 for ratio in ratios.values())
    assert sample_seconds(job) > 0


def test_a_hopelessly_slow_rung_runs_once(monkeypatch):
    runs = {INT8: 100.0, BFLOAT16: 0.5, FLOAT32: 1.0}
    counted = dict.fromkeys(runs, 0)

    def runner(operator, variant, layouts):
        def run():
            counted[variant] += 1
            return runs[variant]

        return run

    monkeypatch.setattr(paying, "_runner", runner)
    monkeypatch.setattr(paying, "seconds_of", lambda run: run())
    dag = trace(tiny_job(32))
    assert {rung: ratio.value for rung, ratio in compared_rungs(dag, {}).items()} == {INT8: 100.0, BFLOAT16: 0.5}
    assert counted[INT8] == 1
    assert counted[BFLOAT16] == counted[FLOAT32] > 1


def test_the_leanest_rung_keeps_activations_in_16_bit():
    assert Variant.of(Precision.BFLOAT16) == probe.LEANEST

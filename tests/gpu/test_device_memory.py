"""The peak of profiled steps on a GPU against the same training outside of profiling."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

JOB = "resnet18:image=64,small_stem=true,classes=10"


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_rungs_peak_is_that_of_training(precision):
    from qsync_core.ir.precision import Precision
    from qsync_core.ir.variant import Variant
    from qsync_torch.apply.apply import apply_
    from qsync_torch.load_job import load_job
    from qsync_torch.profiling.memory import outside_bytes
    from qsync_torch.profiling.whole_step import StepRunner, _peak_bytes
    from qsync_torch.tracing.trace import trace

    device = torch.device("cuda", 0)
    job = load_job(JOB, batch_size=64)
    variant = Variant.of(Precision(precision))
    entries = {operator.op_id: variant for operator in trace(job).adjustable}

    def applied(model):
        # Not by kernels of CUTLASS, each of which its first call would compile: memory does not hang on who multiplies.
        return apply_(model, entries, backend="triton+aten") if precision != "float32" else None

    runner = StepRunner.start(job, device)
    applied(runner.model)
    measured = _peak_bytes(runner, variant, device, with_update=True)
    rung = runner.rungs[variant]
    assert rung.allocated_bytes == measured <= rung.reserved_bytes
    assert 0 < outside_bytes(device) < 4 << 30
    del runner
    gc.collect()

    before = torch.cuda.memory_allocated(device)
    model = job.copy_model().to(device).train()
    applied(model)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    batch = job.batch(0, 64).to(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        job.compute_loss(batch, model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trained = torch.cuda.max_memory_allocated(device)
    # What lived before the second training are libraries' workspaces, which the first one made.
    assert before < 512 << 20
    assert measured == pytest.approx(trained, rel=0.02)

"""Jobs under autocast on a GPU: formats, a plan of the base, and the predicted step."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.profile import DeviceKind  # noqa: E402
from qsync_core.ir.semantics import Autocast, output_precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402

BF16 = Precision.BFLOAT16
BASE, INT8 = Variant.plain(BF16), Variant.of(Precision.INT8, output=BF16)
JOBS = ["resnet18:image=64", "bert-base:layers=2,hidden=128,heads=2,seq=64,vocab=1000"]


def job_of(text):
    from qsync_torch.load_job import load_job

    torch.manual_seed(0)
    return attrs.evolve(load_job(text, batch_size=8), amp="bfloat16")


@pytest.mark.parametrize("text", JOBS)
def test_formats_are_those_of_cudas_autocast(text):
    """Softmax and layer norm give float32 there, which a CPU's do not."""
    from qsync_torch.tracing.trace import trace

    job = job_of(text)
    dag = trace(job)
    formats = {}
    for o in dag.operators:
        inputs = [formats[source] for source in o.inputs]
        formats[o.op_id] = output_precision(o, BASE, inputs, Autocast.of(BF16, DeviceKind.CUDA))
    expected = {str(op_id): str(precision) for op_id, precision in formats.items()}
    model = job.model.cuda().train()
    modules, found, calls = dict(model.named_modules()), {}, {}

    def note(name, output):
        found[f"{name}#{calls.setdefault(name, 0)}"] = str(output.dtype).removeprefix("torch.")
        calls[name] += 1

    for name in {o.op_id.fqn for o in dag.operators if o.op_id.fqn in modules}:
        modules[name].register_forward_hook(lambda _, __, output, name=name: note(name, output))
    job.compute_loss(job.batch(0, 8).to("cuda"), model).backward()
    assert len(found) > 5
    assert found == {name: expected[name] for name in found}
    assert set(found.values()) == {"bfloat16"} | ({"float32"} if text.startswith("bert") else set())


@pytest.mark.parametrize("text", JOBS)
def test_a_plan_of_the_base_has_the_gradients_of_autocast_alone(text):
    """And one in int8 has others, near them."""
    from qsync_torch import apply_
    from qsync_torch.tracing.trace import trace

    dag = trace(job_of(text))

    def gradients(variant):
        job = job_of(text)
        model = job.model.cuda().train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if variant is not None:
            apply_(model, dict.fromkeys((o.op_id for o in dag.adjustable), variant), base=BF16)
        job.compute_loss(job.batch(0, 8).to("cuda"), model).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        alone, again, base, int8 = (gradients(variant) for variant in (None, None, BASE, INT8))
    finally:
        torch.backends.cudnn.deterministic = deterministic
    scatter = (again - alone).norm()  # embeddings' gradients are added up in any order
    assert (base - alone).norm() <= 2 * scatter + 1e-6 * alone.norm()
    assert 0 < (int8 - alone).norm() < alone.norm()


@pytest.mark.parametrize("text", JOBS)
def test_the_predicted_full_step_is_the_measured_one(text):
    from qsync_core.cluster_file import parse_cluster
    from qsync_planner.matching import Inputs, under_base
    from qsync_planner.replayer.replay import Replayer
    from qsync_torch.profiling.profile import ProfileRequest, profile
    from qsync_torch.tracing.trace import trace

    job = job_of(text)
    dag = trace(job)
    measured = profile(job, dag, ProfileRequest(device="cuda", ladder=(INT8, BASE)))
    group = f'[[group]]\nname = "train"\ndevice = "{measured.device.name}"\ncount = 1\nrole = "train"\nbase = "bfloat16"\n'
    cluster, _ = under_base(parse_cluster(group), dag)
    predicted = Replayer(Inputs(dag, cluster, {"train": measured})).replay({})
    assert predicted.iteration_ns == pytest.approx(measured.steps[0].iteration_ns, rel=0.02)
    assert predicted.groups["train"].peak_bytes == measured.steps[0].peak_bytes

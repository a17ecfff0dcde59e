"""The graph and ``apply_`` agree on which format flows where, under random plans: predicted by core's table, measured in a run."""

import random
import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nightly import each_once
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.functions import FUNCTIONS, UnderAutocast, function_of
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind
from qsync_core.ir.semantics import Autocast, output_precision
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.items import distinct_items
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

BERT = "layers=2,hidden=16,heads=2,vocab=50,seq=8"
MODELS = [
    "mixed",
    "resnet18:image=32,width=4,classes=7",
    "vgg16_bn:image=32,width=4,hidden=8,classes=7,pool_size=1",
    f"bert-base:{BERT}",
    f"bert-base:{BERT},head=mlm,attention=eager",
]


class Mixed(nn.Module):
    """Residual in place, functional and packed projections, a scale that promotes, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shared = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.act, self.last = nn.LayerNorm(8), nn.GELU(), nn.Identity()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.0)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.a(x))
        y = self.b(x)
        y += x
        y = self.act(self.norm(y))
        y = self.drop(self.attention(y, y, y, need_weights=False)[0])
        y = F.linear(y, self.w)
        y = self.shared(y) * self.scale
        return self.last(self.act(y))


def mixed_job() -> Job:
    return Job(
        "mixed",
        Mixed(),
        lambda step, size: Batch((torch.randn(size, 3, 8),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )


def predicted(dag: PrecisionDag, variants: dict[OpId, Variant], autocast: Autocast | None = None) -> dict[str, str]:
    """Format of every operator's output."""
    formats: dict[OpId, Precision] = {}
    for operator in dag.operators:
        variant = variants.get(operator.op_id, operator.variant)
        formats[operator.op_id] = output_precision(operator, variant, [formats[source] for source in operator.inputs], autocast)
    return {str(op_id): str(precision) for op_id, precision in formats.items()}


def whole(variants: Mapping[OpId, Variant]) -> dict[OpId, Assignment]:
    """Assignments, whose outputs are taken as they are."""
    return {op_id: Assignment(variant, "", "", "") for op_id, variant in variants.items()}


def measured(job: Job, dag: PrecisionDag, variants: dict[OpId, Variant]) -> dict[str, str]:
    """Format of the outputs of all modules that operators are named after, by operator."""
    modules = dict(job.model.named_modules())
    calls: dict[str, int] = {}
    found: dict[str, str] = {}

    def note(name: str, output: torch.Tensor) -> None:
        found[f"{name}#{calls.setdefault(name, 0)}"] = str(output.dtype).removeprefix("torch.")
        calls[name] += 1

    names = {o.op_id.fqn for o in dag.operators if o.op_id.fqn in modules}
    handles = [modules[name].register_forward_hook(lambda _, __, output, name=name: note(name, output)) for name in names]
    applied = apply_(job.model, whole(variants), base=dag.base)
    job.compute_loss(job.batch(0, job.batch_size)).backward()
    applied.remove()
    for handle in handles:
        handle.remove()
    return found


@each_once({"text": MODELS, "seed": range(2)})
def test_formats_of_a_real_run_are_those_the_graph_predicts(text: str, seed: int) -> None:
    job = mixed_job() if text == "mixed" else load_job(text, batch_size=2)
    dag = trace(job)
    draw = random.Random(seed)
    rungs = [Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32)]
    by_group = {operator.variant_group: draw.choice(rungs) for operator in dag.adjustable}
    variants = {operator.op_id: by_group[operator.variant_group] for operator in dag.adjustable}
    assert len(set(variants.values())) > 1
    variants = OutputFormats.of(dag).decided(variants)
    expected = predicted(dag, variants)
    found = measured(job, dag, variants)
    assert len(found) > 5
    assert found == {name: expected[name] for name in found}


@each_once({"text": MODELS, "lowered": [False, True]})
def test_formats_under_autocast_do_not_depend_on_the_plan(text: str, lowered: bool) -> None:
    job = attrs.evolve(mixed_job() if text == "mixed" else load_job(text, batch_size=2), amp="bfloat16")
    dag = trace(job)
    base, int8 = Variant.plain(dag.base), Variant.of(Precision.INT8, output=dag.base)
    variants = {o.op_id: int8 if lowered and o.variant_group > dag.adjustable[1].variant_group else base for o in dag.adjustable}
    expected = predicted(dag, variants, Autocast.of(dag.base, DeviceKind.CPU))
    assert expected == predicted(dag, dict.fromkeys(variants, base), Autocast.of(dag.base, DeviceKind.CPU))
    found = measured(job, dag, variants)
    assert len(found) > 5
    assert found == {name: expected[name] for name in found}


class Sums(nn.Module):
    """Logarithms of sums of exponentials, each a module of its own so that its output is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.sums, self.running = nn.Linear(8, 8), nn.Linear(8, 8), Of(torch.logsumexp), Of(torch.logcumsumexp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.running(self.b(self.a(x) - self.sums(self.a(x)).unsqueeze(-1)))


class Of(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, -1)


@pytest.mark.parametrize(("amp", "expected"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_logarithms_of_sums_are_in_float32_for_a_plan_and_as_they_arrive_under_autocast(amp: str | None, expected: str) -> None:
    kinds, job = ("logsumexp", "logcumsumexp"), attrs.evolve(mixed_job(), model=Sums(), amp=amp)
    dag = trace(job)
    variants = dict.fromkeys((o.op_id for o in dag.adjustable), Variant.of(Precision.INT8, output=Precision.BFLOAT16))
    formats = predicted(dag, OutputFormats.of(dag).decided(variants), Autocast.of(dag.base, DeviceKind.CPU))
    assert {o.kind: formats[str(o.op_id)] for o in dag.operators if "sumexp" in o.kind} == dict.fromkeys(kinds, expected)
    seen = []
    for module in (job.model.sums, job.model.running):
        module.register_forward_hook(lambda _, __, output: seen.append(str(output.dtype).removeprefix("torch.")))
    variants = OutputFormats.of(dag).decided(variants)
    apply_(job.model, whole(variants), base=dag.base)
    job.compute_loss(job.batch(0, job.batch_size))
    assert seen == [expected] * 2


def test_logarithms_of_sums_are_measured_in_what_arrives_under_autocast() -> None:
    """On a CPU both follow their inputs, on a GPU the second one."""
    dag = trace(attrs.evolve(mixed_job(), model=Sums(), amp="bfloat16"))
    ladder = (Variant.of(Precision.INT8, output=Precision.BFLOAT16), Variant.plain(Precision.BFLOAT16))
    for device, in_float32 in ((DeviceKind.CPU, set()), (DeviceKind.CUDA, {"logsumexp"})):
        found = {(item.operator.kind, item.variant.compute) for item in distinct_items(dag, ladder, device)}
        for kind in ("logsumexp", "logcumsumexp"):
            assert ((kind, Precision.BFLOAT16) in found) == (kind not in in_float32)
    base = Variant.plain(Precision.BFLOAT16)
    once = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
    job = attrs.evolve(mixed_job(), model=Sums(), amp="bfloat16")
    request = ProfileRequest(ladder=(base,), with_collectives=False, efforts=Efforts(once, once, once))
    costs = profile(job, dag, request).cost_index
    assert all(base in costs[o.op_id] for o in dag.operators if "sumexp" in o.kind)


def test_autocast_lists_are_those_of_pytorch() -> None:
    """PyTorch's header names every function that autocast runs in its format, and in float32 on CUDA."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("autocast lists: this build of PyTorch comes without headers")
    listed = {
        name: {function.strip("_") for function in re.findall(r"_\((\w+)", text.split("#define")[0])}
        for name, text in (
            part.split("(_)", 1) for part in header.read_text().split("#define AT_FORALL_")[1:] if "(_)" in part[:60]
        )
    }
    private = {"scaled_dot_product_flash_attention", "thnn_fused_gru_cell", "thnn_fused_lstm_cell"}
    recurrent = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    ours = {how: {name for name in (*FUNCTIONS, *KINDS) if function_of(name).autocast is how} for how in UnderAutocast}
    assert listed["LOWER_PRECISION_FP"] - private == ours[UnderAutocast.BASE] - recurrent
    float32 = (listed["FP32"] | listed["FP32_SET_OPT_DTYPE"]) - {kind for kind, row in FUNCTIONS.items() if row.loss}
    assert float32 - ours[UnderAutocast.FLOAT32_ON_CUDA] == set()
    assert ours[UnderAutocast.FLOAT32_ON_CUDA] - float32 <= {"norm"}

import attrs
import pytest
import torch
import torch.nn.functional as F

from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.timeline import Interval, Timeline
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.load_job import load_job
from qsync_torch.profiling.measured_timeline import (
    RANGE,
    STEP,
    Event,
    Span,
    measured_timeline,
    merge_timelines,
    spans_of,
    without_overlap,
)
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.trace import trace

TINY_BERT = "bert-base:layers=1,hidden=16,heads=2,vocab=50,seq=8"
TINY_RESNET = "resnet18:image=16,small_stem=true,width=4,classes=5"


def _measure(text, precision):
    job = load_job(text, batch_size=2)
    dag = trace(job)
    runner = StepRunner.start(job, torch.device("cpu"))
    apply_(runner.model, {operator.op_id: Variant.of(precision) for operator in dag.adjustable})
    return dag, measured_timeline(runner.model, dag, lambda: runner.train_step(0), group="train", steps=1, peak_bytes=77)


@pytest.mark.parametrize(("text", "precision"), [(TINY_RESNET, Precision.FLOAT32), (TINY_BERT, Precision.INT8)])
@pytest.mark.slow
def test_every_operator_of_a_real_step_is_found_forward_and_backward(text, precision):
    dag, timeline = _measure(text, precision)
    ids = {operator.op_id for operator in dag.operators if operator.kind != "input"}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert {interval.op_id for interval in timeline.intervals if interval.phase is phase} - {None} == ids
    assert {interval.resource for interval in timeline.intervals} == {Resource.COMPUTE}
    assert sum(interval.phase is Phase.OPTIMIZER for interval in timeline.intervals) == 2  # step and zero_grad
    forward = [interval.op_id for interval in timeline.intervals if interval.phase is Phase.FORWARD and interval.op_id]
    assert forward == [operator.op_id for operator in dag.operators if operator.kind != "input"]
    assert timeline.iteration_ns > 0
    assert timeline.software["train"]["autocast"] == "off"
    assert timeline.software["train"]["device"] == "cpu"
    assert (timeline.source, timeline.rank_group, timeline.peak_bytes) == ("measured", {0: "train"}, {"train": 77})
    assert min(interval.start_ns for interval in timeline.intervals) == 0


def test_forward_of_a_module_called_twice():
    from qsync_torch.job import Batch, Job

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    job = Job(
        "twice",
        Twice(),
        lambda step, size: Batch((torch.randn(size, 4),), target=torch.zeros(size, dtype=torch.long)),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=2,
    )
    dag, runner = trace(job), StepRunner.start(job, torch.device("cpu"))
    timeline = measured_timeline(runner.model, dag, lambda: runner.train_step(0), group="g", steps=1)
    forward = [str(interval.op_id) for interval in timeline.intervals if interval.phase is Phase.FORWARD and interval.op_id]
    assert forward == ["layer#0", "tanh#0", "layer#1", "$loss.cross_entropy_loss#0"]


def _cuda_like_events():
    """A linear and a functional addition on a device: two launches forward, two backward, an all-reduce beside them."""

    def cpu(name, start, end, thread=1, sequence=-1, correlation=0):
        return Event(name, start, end, thread, sequence, False, correlation, 0)

    def kernel(name, start, end, linked):
        return Event(name, start, end, 0, -1, True, 0, linked)

    return [
        cpu(STEP, 0, 1000),
        cpu(f"{RANGE}fc#0", 10, 30),
        cpu("aten::linear", 12, 28, sequence=5),
        cpu("aten::addmm", 14, 26, sequence=6, correlation=1),
        cpu("aten::add", 40, 50, sequence=7, correlation=2),
        kernel("gemm", 60, 160, 1),
        kernel("elementwise", 160, 180, 2),
        cpu("autograd::engine::evaluate_function: AddBackward0", 70, 75, thread=2, sequence=7, correlation=3),
        cpu("autograd::engine::evaluate_function: AddmmBackward0", 80, 95, thread=2, sequence=6, correlation=4),
        cpu("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 96, 99, thread=2),
        kernel("gemm", 180, 400, 4),
        kernel("ncclDevKernel_AllReduce_Sum", 300, 500, 9),
        cpu("Optimizer.step#SGD.step", 110, 150, correlation=5),
        kernel("sgd", 500, 520, 5),
    ]


def test_kernels_belong_to_the_operator_that_launched_them():
    from qsync_core.ir.dag import OpClass, Operator, PrecisionDag

    dag = PrecisionDag(
        "m",
        (
            Operator(OpId("$input.x"), "input", OpClass.FIXED, (), (), (2, 2)),
            Operator(OpId("fc"), "linear", OpClass.ADJUSTABLE, (OpId("$input.x"),), ((2, 2),), (2, 2), weight_shape=(2, 2)),
            Operator(OpId("add"), "add", OpClass.DEPENDENT, (OpId("fc"),), ((2, 2),), (2, 2)),
        ),
        (),
    )
    spans = spans_of(_cuda_like_events(), dag, {"fc"})
    rows = [(span.name, span.phase, span.resource, span.start_ns, span.end_ns) for span in spans]
    assert rows == [
        ("all-reduce", Phase.COMMUNICATION, Resource.COMMUNICATION, 300, 500),
        ("fc#0", Phase.FORWARD, Resource.COMPUTE, 60, 160),
        ("add#0", Phase.FORWARD, Resource.COMPUTE, 160, 180),
        ("fc#0", Phase.BACKWARD, Resource.COMPUTE, 180, 400),
        ("sgd", Phase.OPTIMIZER, Resource.COMPUTE, 500, 520),
        ("fc#0", Phase.FORWARD, Resource.DISPATCH, 10, 30),
        ("add#0", Phase.FORWARD, Resource.DISPATCH, 40, 50),
        ("add#0", Phase.BACKWARD, Resource.DISPATCH, 70, 75),
        ("fc#0", Phase.BACKWARD, Resource.DISPATCH, 80, 95),
        ("AccumulateGrad", Phase.BACKWARD, Resource.DISPATCH, 96, 99),
        ("Optimizer.step", Phase.OPTIMIZER, Resource.DISPATCH, 110, 150),
    ]


def _small_dag():
    from qsync_core.ir.dag import OpClass, Operator, PrecisionDag

    return PrecisionDag(
        "m",
        (
            Operator(OpId("$input.x"), "input", OpClass.FIXED, (), (), (2, 2)),
            Operator(OpId("fc"), "linear", OpClass.ADJUSTABLE, (OpId("$input.x"),), ((2, 2),), (2, 2), weight_shape=(2, 2)),
        ),
        (),
    )


def test_a_device_is_busy_once_however_many_streams_it_has():
    """Overlapping streams, a broadcast before the forward, launches that no operator covers, the driver's own numbers."""

    def cpu(name, start, end, correlation=0, linked=0):
        return Event(name, start, end, 1, -1, False, correlation, linked)

    def device(name, start, end, linked, stream=7):
        return Event(name, start, end, 0, -1, True, 0, linked, stream)

    events = [
        cpu(STEP, 0, 1000),
        cpu("aten::copy_", 2, 4, correlation=9),
        device("Memcpy HtoD (Pageable -> Device)", 5, 15, 9),
        device("Memcpy HtoD (Pinned -> Device)", 0, 900, 9, stream=30),
        device("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 60, 8, stream=20),
        cpu(f"{RANGE}fc#0", 10, 30),
        cpu("aten::addmm", 14, 26, correlation=1),
        cpu("cudaLaunchKernel", 15, 16, correlation=4, linked=1),
        device("gemm", 60, 160, 1),
        device("beside it", 100, 200, 1, stream=8),
        cpu("autograd::engine::evaluate_function: AddmmBackward0", 80, 95, correlation=4),
        device("gemm", 200, 300, 4),
        cpu("cudaLaunchKernel", 96, 97, correlation=1, linked=4),
        cpu("c10d::hook", 98, 99, correlation=6),
        device("copy of a bucket", 300, 310, 6),
        device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 250, 500, 10, stream=20),
        device("a graph's kernel", 310, 320, 77),
        cpu("Optimizer.step#SGD.step", 110, 150, correlation=5),
        cpu("aten::_foreach_add_", 160, 170, correlation=12),
        device("sgd", 500, 520, 5),
        device("after the optimizer's range", 520, 530, 12),
    ]
    spans = spans_of(sorted(events, key=lambda event: (event.start_ns, -event.end_ns)), _small_dag(), {"fc"})
    compute = [(span.phase, span.start_ns, span.end_ns) for span in spans if span.resource is Resource.COMPUTE]
    assert compute == [
        (Phase.FORWARD, 5, 15),
        (Phase.FORWARD, 60, 100),
        (Phase.FORWARD, 100, 200),
        (Phase.BACKWARD, 200, 300),
        (Phase.BACKWARD, 300, 310),
        (Phase.BACKWARD, 310, 320),
        (Phase.OPTIMIZER, 500, 520),
        (Phase.OPTIMIZER, 520, 530),
    ]
    communication = [(span.name, span.start_ns, span.end_ns) for span in spans if span.resource is Resource.COMMUNICATION]
    assert communication == [("broadcast", 20, 60), ("all-reduce", 250, 500)]


def test_overlap_is_cut_away_and_an_inner_span_keeps_its_time():
    def span(name, start, end):
        return Span(name, None, Phase.BACKWARD, Resource.COMPUTE, start, end)

    cut = without_overlap([span("outer", 0, 100), span("inner", 20, 50), span("innermost", 30, 40), span("later", 90, 120)])
    assert [(piece.name, piece.start_ns, piece.end_ns) for piece in cut] == [
        ("outer", 0, 20),
        ("inner", 20, 30),
        ("innermost", 30, 40),
        ("inner", 40, 50),
        ("outer", 50, 90),
        ("later", 90, 120),
    ]


def test_ranks_are_merged_and_the_slowest_sets_the_period():
    def one(rank, group, period, peak):
        interval = Interval("x", None, Phase.FORWARD, Resource.COMPUTE, rank, 0, 5)
        return Timeline("measured", "m", period, {rank: group}, (interval,), {group: peak})

    merged = merge_timelines([one(1, "infer", 90, 7), one(0, "train", 60, 5), one(2, "infer", 80, 9)])
    assert merged.iteration_ns == 90
    assert merged.rank_group == {1: "infer", 0: "train", 2: "infer"}
    assert merged.peak_bytes == {"infer": 9, "train": 5}
    assert [interval.rank for interval in merged.intervals] == [0, 1, 2]
    assert attrs.asdict(merged.intervals[0])["duration_ns"] == 5

"""Whole steps of a compiled model: what is compiled, what its graphs keep, and that the compiler is left as it was found."""

from contextlib import nullcontext
from functools import partial

import attrs
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import InternalTorchDynamoError
from torch._functorch.partitioners import min_cut_rematerialization_partition

from qsync_core.errors import JobError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled, Compiler
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import whole_step
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.items import layer_kinds
from qsync_torch.profiling.measured_timeline import measured_timeline
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.profiling.whole_step import StepRunner, compiled_model, measure_step
from qsync_torch.timing import CudaStopwatch, Effort, make_stopwatch
from qsync_torch.tracing.trace import trace

CPU = torch.device("cpu")
QUICK = Effort(min_repeats=2, max_repeats=2, budget_s=0.0, warmup=0)
EFFORTS = Efforts(QUICK, QUICK, QUICK)
EAGER_KERNELS = Compiled(backend="aot_eager")
BASE, INT8 = Variant.plain(Precision.BFLOAT16), Variant.of(Precision.INT8, sixteen_bit=Precision.BFLOAT16)


def job_of(compiles=EAGER_KERNELS, amp="bfloat16"):
    torch.manual_seed(0)
    return Job(
        "three-layers",
        nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 8)),
        lambda step, size: Batch((torch.randn(size, 24, generator=torch.Generator().manual_seed(step)),)),
        lambda output, batch: output.float().square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        40,
        amp=amp,
        compiles=compiles,
    )


@pytest.fixture
def forward_of(monkeypatch):
    """Bytes that each partition has its forward hand to its backward, but for inputs of the graph."""
    handed = []

    def storage(node):
        return node.meta["val"].untyped_storage()

    def parted(joint, *arguments, num_fwd_outputs, **options):
        forward, backward = min_cut_rematerialization_partition(joint, *arguments, num_fwd_outputs=num_fwd_outputs, **options)
        (outputs,) = forward.graph.find_nodes(op="output")[0].args
        made = [node for node in outputs[num_fwd_outputs:] if node.op != "placeholder"]
        storages = {storage(node)._cdata: storage(node).nbytes() for node in made}
        handed.append(sum(storages.values()))
        return forward, backward

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=parted)
    monkeypatch.setattr(whole_step, "compiled_model", lambda model, how, applied: torch.compile(model, backend=backend))
    return handed


@pytest.mark.parametrize("lowered", [(), ("0", "2", "4"), ("2",)], ids=["base", "all in int8", "one in int8"])
def test_what_is_kept_is_what_the_partition_hands_to_backward(forward_of, lowered):
    job = job_of()
    runner = StepRunner.start(job, CPU, compiled=job.compiles)
    runs = {OpId(name): INT8 if name in lowered else BASE for name in ("0", "2", "4")}
    entries = {op_id: Assignment(variant, "aten", "", "") for op_id, variant in runs.items()}
    applied = apply_(runner.model, entries, base=Precision.BFLOAT16) if lowered else None
    with runner.compiling(applied):
        found = runner.saved_bytes
    # What the loss keeps lies behind the graph: its input in float32, which its square reads.
    assert len(forward_of) == 1
    assert found == forward_of[0] + 4 * 40 * 8


def test_a_profile_of_a_compiled_job_has_compiled_steps_and_leaves_nothing_compiled(monkeypatch):
    compiled, made = [], whole_step.compiled_model

    def counted(model, how, applied):
        compiled.append((how.by, applied is not None))
        return made(model, how, applied)

    monkeypatch.setattr(whole_step, "compiled_model", counted)
    job, said = job_of(), []
    measure = partial(profile, asked=ProfileRequest(ladder=[INT8], efforts=EFFORTS), note=said.append)
    found = measure(job, trace(job))
    assert found.compiled == EAGER_KERNELS
    assert compiled == [(Compiler.TORCH, False), *[(Compiler.TORCH, True)] * 4]
    assert sorted(mixed.lowered for mixed in found.mixed) == [(OpId(name),) for name in ("0", "2", "4")]
    assert {mixed.step.variant for mixed in found.mixed} == {INT8}
    assert len({mixed.step.saved_bytes for mixed in found.mixed}) == 3
    assert [step.variant for step in found.steps] == [BASE, INT8]
    base, low = (step.saved_bytes for step in found.steps)
    assert 0 < low < base
    assert any(note.startswith("5 whole steps were compiled by torch.compile, backend aot_eager, which took") for note in said)
    assert found.software["autocast"] == "bfloat16"
    eager = measure(attrs.evolve(job, compiles=None), trace(job))
    assert (eager.compiled, eager.mixed, {step.saved_bytes for step in eager.steps}, len(compiled)) == (None, (), {None}, 5)


def test_an_interrupted_profile_compiles_only_what_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr("qsync_torch.profiling.profile._KINDS", 1)
    job, compiled, made = job_of(), [], whole_step.compiled_model
    measure = partial(profile, job, trace(job), ProfileRequest(ladder=[INT8], efforts=EFFORTS), resume=tmp_path / "kept")

    def once(model, how, applied):
        compiled.append(applied is not None)
        if len(compiled) == 2:
            raise KeyboardInterrupt
        return made(model, how, applied)

    monkeypatch.setattr(whole_step, "compiled_model", once)
    with pytest.raises(KeyboardInterrupt):
        measure()
    assert len(measure().steps) == 2
    assert compiled == [False, True, True, True]


def test_layers_that_are_alike_are_one_kind_and_so_are_readers_of_one_tensor():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return x + self.o(self.q(x) * self.k(x))

    job = attrs.evolve(job_of(), model=nn.Sequential(nn.Linear(24, 8), *(Block() for _ in range(3))))
    kinds = layer_kinds(trace(job), lambda operator: operator.flops)
    assert [[str(op_id) for op_id in kind] for kind in kinds] == [
        [f"{layer}.{name}#0" for layer in (1, 2, 3) for name in "qk"],
        ["0#0"],
        ["1.o#0", "2.o#0", "3.o#0"],
    ]


def test_a_model_that_does_not_compile_is_named_with_what_to_do():
    job = job_of(Compiled(backend="inductor"))

    def refuse(*_):
        raise RuntimeError("no C++ compiler was found\nand more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_step, "compiled_model", refuse)
        with pytest.raises(JobError) as error:
            profile(job, trace(job), ProfileRequest(ladder=[], efforts=EFFORTS))
    said = str(error.value)
    assert "a training step of three-layers, compiled by torch.compile, fails" in said
    assert "no C++ compiler was found" in said
    assert "qsync.hybrid(..., compiles=False)" in said


def test_qsync_compile_is_for_a_plan_alone(monkeypatch):
    from qsync_torch.compiling import compile as module

    seen = []
    monkeypatch.setattr(module, "compile", lambda model, backend: seen.append(backend) or model)
    model, how = nn.Linear(4, 4), Compiled(Compiler.QSYNC, backend="aot_eager")
    assert compiled_model(model, how, None) is not model
    assert not seen
    applied = apply_(model, {}, base=Precision.FLOAT32)
    assert compiled_model(model, how, applied) is model
    assert seen == ["aot_eager"]


class Clocked:
    """A device that takes no time, and events on it."""

    def current(self):
        return nullcontext()

    def synchronize(self):
        pass

    def spin(self, ns):
        pass

    def record(self):
        return self

    def query(self):
        return False

    def elapsed_time(self, other):
        return 0.0


def test_phases_of_a_compiled_model_are_timed_compiled():
    """Under a mode that sees calls, as eager phases are timed, PyTorch runs it eagerly, and from then on."""
    ran = []

    def backend(graph, inputs):
        def run(*arguments):
            ran.append(len(arguments))
            return graph(*arguments)

        return run

    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(3, 4)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    stopwatch = CudaStopwatch(CPU, Clocked())
    for calls in (1, 2):
        stopwatch.time_whole(lambda: compiled(x))
        assert len(ran) == calls
    torch.compiler.reset()


def test_a_compiled_steps_timeline_attributes_nothing_and_says_so():
    job = job_of()
    runner = StepRunner.start(job, CPU)
    plain = runner.model
    runner.model = torch.compile(plain, backend="aot_eager")
    timeline = measured_timeline(plain, trace(job), lambda: runner.train_step(0), group="g", steps=1)
    torch.compiler.reset()
    assert timeline.software["g"]["compiled"] == "True"
    assert {interval.op_id for interval in timeline.intervals} == {None}
    assert {str(interval.phase) for interval in timeline.intervals} >= {"forward", "backward", "optimizer"}
    runner.model = plain
    eager = measured_timeline(plain, trace(job), lambda: runner.train_step(0), group="g", steps=1)
    assert eager.software["g"]["compiled"] == "False"
    assert OpId("0") in {interval.op_id for interval in eager.intervals}


def test_a_step_of_a_job_that_is_not_compiled_is_measured_as_it_is(monkeypatch):
    monkeypatch.setattr(whole_step, "compiled_model", None)
    job = job_of(compiles=False)
    assert job.compiles is None
    found = measure_step(StepRunner.start(job, CPU), BASE, trace(job), make_stopwatch(CPU), QUICK)
    assert found.saved_bytes is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("mat1 and mat2 must have the same dtype"), r"\); compute in float32 there \(x\.float\(\)\), or leave int8"),
        (InternalTorchDynamoError("KeyError: 'x'"), r"\); leave int8[^ ]* off the ladder, or where the script does not compile "),
    ],
)
def test_an_error_of_the_compiler_itself_is_not_laid_to_formats(monkeypatch, error, said):
    made = whole_step.compiled_model

    def compiled(model, how, applied):
        if applied is None:
            return made(model, how, applied)
        raise error

    monkeypatch.setattr(whole_step, "compiled_model", compiled)
    job = job_of()
    with pytest.raises(JobError, match=said):
        profile(job, trace(job), ProfileRequest(ladder=[INT8], efforts=EFFORTS))

"""Tuning a graph's kernels: each distinct one once, for every backend that takes it; interrupted runs continue."""

import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qsync_core.errors import BackendError, QSyncError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelConfig, Op
from qsync_core.kernels.requests import CallShapes, OperatorRequest
from qsync_core.tuning.record import TuningRecord
from qsync_core.tuning.search import Effort
from qsync_torch.job import Batch, Job
from qsync_torch.kernels.installed import open_store, store_of_request
from qsync_torch.kernels.selection import find_backends
from qsync_torch.plugin import qsync_describe_device
from qsync_torch.profiling.items import distinct_items
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning import compiling, job_tuning
from qsync_torch.tuning.compiling import BackgroundCompiler, _greedy
from qsync_torch.tuning.job_tuning import (
    CompiledAhead,
    JobTuning,
    capability_of,
    compile_requests,
    describe,
    distinct_requests,
    tune_job,
    tune_requests,
)
from qsync_torch.tuning.kernel_timing import device_peaks

from .installed_backends import CompilingNamedBackend, NamedBackend

CPU = torch.device("cpu")
INT8 = Variant.of(Precision.INT8)
WIDE = Variant.of(Precision.INT8, output=Precision.FLOAT32)
QUICK = Effort(budget=2, samples=(1, 1))


@pytest.fixture(scope="module")
def dag():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    return trace(
        Job(
            "tiny",
            model,
            lambda step, size: Batch((torch.randn(size, 6),), target=torch.arange(size) % 3),
            lambda output, batch: nn.functional.cross_entropy(output, batch.target),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=4,
        )
    )


def test_each_distinct_kernel_once(dag):
    found = distinct_requests(dag, (INT8, WIDE, Variant.of(Precision.BFLOAT16)), "cpu", "")
    roles = [(asked.role, asked.request.shapes) for asked in found]
    wide, narrow = ((4, 6), (6, 6)), ((4, 6), (3, 6))
    # The first layer has no gradient of its input and the second has; a float32 output changes the forward product only.
    assert sorted(roles) == sorted(
        [
            ("quantize", ((4, 6),)),
            ("quantize.weight", ((6, 6),)),
            ("linear.output", wide),
            ("linear.grad_weight", ((4, 6), (4, 6))),
            ("linear.grad_input", ((4, 6), (6, 6))),
            ("quantize.weight", ((3, 6),)),
            ("linear.output", narrow),
            ("linear.grad_input", ((4, 3), (3, 6))),
            ("linear.grad_weight", ((4, 3), (4, 6))),
            ("linear.output", wide),
            ("linear.output", narrow),
        ]
    )
    # Uses × (operations + 400 × bytes read): 6 × 400·96 to quantize activations, 4 × 400·144 for weights; 1 × (144 + 400·42).
    assert set(roles[:2]) == {("quantize", ((4, 6),)), ("quantize.weight", ((6, 6),))}
    assert roles[-2:] == [("linear.output", narrow)] * 2


def test_equal_layers_of_a_job_under_autocast_are_one_measurement():
    def counts(layers):
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers)), nn.Linear(8, 3))
        job = Job(
            "layers",
            model,
            lambda step, size: Batch((torch.randn(size, 8),), target=torch.arange(size) % 3),
            lambda output, batch: nn.functional.cross_entropy(output, batch.target),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=4,
            amp="bfloat16",
        )
        graph, ladder = trace(job), (INT8, Variant.of(Precision.BFLOAT16))
        return len(distinct_items(graph, ladder, DeviceKind.CUDA)), len(distinct_requests(graph, ladder, "cuda", "9.0"))

    # Two linears and the GELU in two formats, the loss and two normalisations, one of which needs no gradient of its input.
    assert counts(3) == counts(12) == (9, 9)


def test_every_backend_that_takes_a_kernel_is_tuned(dag, install):
    one, two = NamedBackend("one", refuses={"grad_weight": "no"}), NamedBackend("two")
    install(one, two)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    told = []
    store = open_store(CPU)
    found = tune_requests(requests, [one, two], store, CPU, effort=QUICK, progress=lambda *update: told.append(update))
    assert found.reused == 0
    assert [entry.asked for entry in found.requests] == requests
    for entry in found.requests:
        refuses = entry.asked.request.op == Op.LINEAR_GRAD_WEIGHT
        assert [record.key.backend for record in entry.records] == (["two"] if refuses else ["one", "two"])
        assert entry.refusals == ({"one": ("no",)} if refuses else {})
        assert entry.best == min(entry.records, key=lambda record: record.latency_ns)
        for record in entry.records:
            assert store.find(record.key.backend, entry.asked.request) == record
            assert record.latency_ns > 0
    assert told[-1][:2] == (2 * len(requests), 2 * len(requests))
    assert [done for done, _, _ in told] == list(range(2 * len(requests) + 1))


def test_no_search_begins_after_the_budget(dag, install, monkeypatch):
    one = NamedBackend("one")
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    clock = iter(range(100))
    monkeypatch.setattr(job_tuning, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    store = open_store(CPU)
    found = tune_requests(requests, [one], store, CPU, effort=QUICK, seconds=3)
    # It begins at 0 and looks at the clock before each search, and before a second configuration: at 1, 2 and 3.
    assert [entry.asked for entry in found.requests] == requests[:1]
    assert [store.find("one", asked.request) is not None for asked in requests[:2]] == [True, False]


def test_a_search_tries_nothing_more_when_the_time_is_over(dag, install, monkeypatch):
    """A Triton kernel takes seconds to compile, so that 24 of them are most of a minute."""
    now = [0.0]

    class Compiling(NamedBackend):
        def build(self, request, config):
            now[0] += 2
            return super().build(request, config)

    one = Compiling("one", configs=[f"tile={n}" for n in range(24)])
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    monkeypatch.setattr(job_tuning, "time", SimpleNamespace(monotonic=lambda: now[0]))
    effort, store = Effort(budget=24, samples=(1,)), open_store(CPU)
    tune_requests(requests, [one], store, CPU, effort=effort, seconds=10)
    assert len(one.built) == 5
    assert [store.find("one", asked.request) is not None for asked in requests[:2]] == [True, False]
    tune_requests(requests, [one], open_store(CPU), CPU, effort=effort)
    assert {text for _, text in one.built} == {f"tile={n}" for n in range(24)}
    assert len(one.built) - 24 * len(requests) in (0, 1), "the fastest of the search before is built again, to be looked at"


def test_a_job_is_tuned_on_a_gpu_only(dag, install, monkeypatch):
    assert tune_job(dag, (INT8,), CPU) is None
    monkeypatch.setattr(job_tuning, "device_facts", lambda device: ("cuda", "9.0"))
    monkeypatch.setattr(job_tuning, "open_store", lambda device, path: open_store(CPU, path))
    gpu = torch.device("cuda", 0)
    assert tune_job(dag, (INT8,), gpu, seconds=0) is None
    assert tune_job(dag, (Variant.of(Precision.BFLOAT16),), gpu) is None
    asked = []
    monkeypatch.setattr(job_tuning, "tune_requests", lambda requests, *rest, **named: asked.append(named) or JobTuning((), 0, 0.0))
    assert tune_job(dag, (INT8,), gpu, seconds=5) is not None
    assert asked[0]["seconds"] == 5


def test_an_interrupted_run_continues_and_a_finished_one_measures_nothing(dag, install):
    class Interrupting(NamedBackend):
        left = 5

        def build(self, request, config):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return super().build(request, config)

    one = Interrupting("one")
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    with pytest.raises(KeyboardInterrupt):
        tune_requests(requests, [one], open_store(CPU), CPU, effort=QUICK)
    one.left = -1
    found = tune_requests(requests, [one], open_store(CPU), CPU, effort=QUICK)
    assert found.reused == 2
    # What had been measured before the interruption was not measured again; the fastest of it may be built again, to be looked at.
    assert len(one.built) - 2 * len(requests) in (0, 1)
    one.left = 0
    assert tune_requests(requests, [one], open_store(CPU), CPU, effort=QUICK).reused == len(requests)


def test_kernels_that_fail_are_told_and_do_not_stop_the_others(dag, install):
    class Failing(NamedBackend):
        def build(self, request, config):
            if request.op == Op.LINEAR_OUTPUT:
                raise BackendError(f"{config.text} does not compile")
            return super().build(request, config)

    one = Failing("one")
    install(one)
    found = tune_requests(distinct_requests(dag, (INT8,), "cpu", ""), [one], open_store(CPU), CPU, effort=QUICK)
    for entry in found.requests:
        if entry.asked.request.op == Op.LINEAR_OUTPUT:
            assert entry.best is None
            assert "a: a does not compile; b: b does not compile" in entry.refusals["one"][0]
        else:
            assert entry.best is not None


def test_a_wrong_kernel_is_not_the_fastest_and_is_not_kept(dag, install):
    """Right when it is called first; later it gives the scale that it kept by address, of one configuration or of all."""

    class Stale(NamedBackend):
        def build(self, request, config):
            kernel, kept = super().build(request, config), {}

            def quantize(x, q, scale, *others):
                if x.data_ptr() not in kept:
                    kernel(x, q, scale, *others)
                    kept[x.data_ptr()] = scale.clone()
                scale.copy_(kept[x.data_ptr()])

            return quantize if request.op == Op.QUANTIZE and config.text != right else kernel

    for name, right in (("all", None), ("some", "b")):
        one = Stale(name)
        install(one)
        store = open_store(CPU)
        for entry in tune_requests(distinct_requests(dag, (INT8,), "cpu", ""), [one], store, CPU, effort=QUICK).requests:
            if entry.asked.request.op == Op.QUANTIZE:
                assert (entry.best and entry.best.config) == right
                assert ([] if right else ["all"]) == list(entry.failures)
                assert all("it is wrong: of other numbers in the same memory, one of its scales is" in why
                           for said in entry.failures.values() for why in said)  # fmt: skip
                assert (store.find(name, entry.asked.request) is None) == (right is None)
            else:
                assert entry.best is not None


def test_backends_compile_ahead_what_they_take(dag, install):
    one, two = CompilingNamedBackend("one"), NamedBackend("two")
    install(one, two)
    requests = distinct_requests(dag, (INT8,), "cuda", "7.5")
    told = []
    assert compile_requests(requests, [one, two], "sm_75", lambda *update: told.append(update)) == {
        "one": CompiledAhead(len(requests), 7)
    }
    assert one.compiled == [("sm_75", len(requests))]
    assert told == [(len(requests), len(requests), "one: all")]


def test_tuning_compiles_few_kernels_that_serve_many_and_measures_their_knobs(dag, install):
    class Ranked(CompilingNamedBackend):
        def candidate_configs(self, request):
            wide = request.shapes[-1][0] >= 6
            texts = ["t1", "t2", "t3", "t1;swizzle=4"] if wide else ["t2", "t4", "t2;swizzle=4"]
            return [KernelConfig(text) for text in texts]

        def unsupported_reasons(self, request):
            return [] if request.op == Op.LINEAR_OUTPUT else ["it multiplies only"]

    one = Ranked("one", configs=("t1", "t2", "t3", "t4", "t1;swizzle=4", "t2;swizzle=4"))
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    store = open_store(CPU)
    found = tune_requests(requests, [one], store, CPU, effort=Effort(budget=9, kernels=1, samples=(1, 1)))
    products = [entry for entry in found.requests if entry.asked.request.op == Op.LINEAR_OUTPUT]
    assert len(products) == 2
    # t2 is the first of one and the second of the other: 1 + 1/2 against 1 for t1.
    assert [set(store.measured("one", entry.asked.request)) for entry in products] == [{"t2"}, {"t2", "t2;swizzle=4"}]
    more = tune_requests(requests, [one], store, CPU, effort=Effort(budget=9, kernels=2, samples=(1, 1)))
    assert more.reused == 1
    assert set(store.measured("one", products[0].asked.request)) == {"t1", "t2", "t1;swizzle=4"}


def test_compilers_are_ended_with_the_time_and_others_are_measured(dag, install):
    interrupted = threading.Event()

    class Compiling(CompilingNamedBackend):
        def build(self, request, config):
            if not interrupted.wait(60):
                return super().build(request, config)
            raise BackendError("compiling was interrupted")

        def interrupt_compiling(self):
            interrupted.set()

    one, two = Compiling("one", configs=("a",)), NamedBackend("two", configs=("a",))
    install(one, two)
    requests, store = distinct_requests(dag, (INT8,), "cpu", ""), open_store(CPU)
    found = tune_requests(requests, list(find_backends(("one", "two"))), store, CPU, effort=QUICK, seconds=2)
    assert interrupted.is_set()
    assert found.requests
    assert {record.key.backend for entry in found.requests for record in entry.records} == {"two"}
    assert [entry.refusals for entry in found.requests] == [{}] * len(found.requests)
    # Nothing that was interrupted counts as tried.
    assert not any(store.measured("one", asked.request) for asked in requests)


def test_a_compiler_that_begins_as_the_others_are_ended_is_ended_too(dag, install, monkeypatch):
    monkeypatch.setattr(compiling, "_AGAIN_S", 0.01)
    compiles, interrupted, first = threading.Event(), threading.Event(), threading.Event()

    class Compiling(CompilingNamedBackend):
        def build(self, request, config):
            first.wait(60)  # before it has a compiler, it looks for one
            compiles.set()
            if not interrupted.wait(10):
                return super().build(request, config)
            raise BackendError("compiling was interrupted")

        def interrupt_compiling(self):
            if compiles.is_set():
                interrupted.set()
            first.set()

    one = Compiling("one", configs=("a",))
    install(one)
    tune_requests(distinct_requests(dag, (INT8,), "cpu", ""), [one], open_store(CPU), CPU, effort=QUICK, seconds=1)
    assert interrupted.is_set()
    assert not one.built


def test_a_search_compiles_nothing_that_there_was_no_time_for(dag, install, monkeypatch):
    """Its first configuration would be compiled by the search itself, however long that takes."""
    one, two = CompilingNamedBackend("one", configs=("a", "b", "c", "d")), NamedBackend("two", configs=("a",))
    install(one, two)
    # Each compiler takes 40 of 60 seconds: as many begin as there are cores.
    clock = itertools.count(0, 40)
    monkeypatch.setattr(compiling, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(compiling, "_cores", lambda: 1)
    monkeypatch.setattr(job_tuning, "time", SimpleNamespace(monotonic=lambda: 0.0))
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    tune_requests(requests, [one, two], open_store(CPU), CPU, effort=QUICK, seconds=60)
    assert len(one.built) == 1


def test_requests_are_measured_as_their_kernels_become_ready(dag, install):
    gate = threading.Event()
    measured = []

    class Slow(CompilingNamedBackend):
        def unsupported_reasons(self, request):
            return [] if request.op == Op.LINEAR_OUTPUT else ["it multiplies only"]

        def build(self, request, config):
            gate.wait(60)
            return super().build(request, config)

    one, two = Slow("one", configs=("a",)), NamedBackend("two", configs=("a",))
    install(one, two)
    requests = distinct_requests(dag, (INT8,), "cpu", "")

    def progress(done, total, what):
        measured.append(what)
        if what.startswith("compiling"):
            gate.set()

    found = tune_requests(requests, [one, two], open_store(CPU), CPU, effort=QUICK, progress=progress)
    assert [entry.asked for entry in found.requests] == requests
    waited = next(i for i, what in enumerate(measured) if what.startswith("compiling: 0 of "))
    # What needs no compiler is measured first: by both backends, or by the other one.
    assert waited == sum(1 if asked.request.op == Op.LINEAR_OUTPUT else 2 for asked in requests)
    assert not any("one: linear.output" in what for what in measured[:waited])


def _first(compiler, left):
    """The request that is ready first."""
    while (index := compiler.ready(left)) is None:
        compiler.wait(left, lambda built, every: None)
    return index


@pytest.mark.parametrize("late", [False, True])
def test_no_kernel_is_begun_when_the_time_is_over(dag, install, late):
    one = CompilingNamedBackend("one", configs=("a",))
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    with BackgroundCompiler([one], requests, 1, -math.inf if late else math.inf) as compiler:
        assert _first(compiler, range(len(requests))) in range(len(requests))
    assert bool(one.built) != late


def test_no_kernel_is_begun_that_would_be_compiled_after_the_time(dag, install, monkeypatch):
    now = [0.0]

    class Compiling(CompilingNamedBackend):
        def build(self, request, config):
            now[0] += 40
            return super().build(request, config)

    monkeypatch.setattr(compiling, "_cores", lambda: 1)
    monkeypatch.setattr(compiling, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = Compiling("one", configs=("a", "b"))
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    left = list(range(len(requests)))
    with BackgroundCompiler([one], requests, 2, 60.0) as compiler:
        while left:
            left.remove(_first(compiler, left))
    assert len(one.built) == 1


def test_a_compiler_that_fails_is_told_and_leaves_the_others(dag, install):
    class Broken(CompilingNamedBackend):
        def build(self, request, config):
            raise BackendError("no nvcc")

        def unsupported_reasons(self, request):
            return []

    broken, two = Broken("one"), NamedBackend("two")
    install(broken, two)
    found = tune_requests(distinct_requests(dag, (INT8,), "cpu", ""), [broken, two], open_store(CPU), CPU, effort=QUICK)
    assert all("a: no nvcc" in entry.refusals["one"][0] and entry.best is not None for entry in found.requests)


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_every_request_gets_a_kernel_of_its_own_list(lists, kernels):
    chosen = _greedy([{text: rank for rank, text in enumerate(texts)} for texts in lists], kernels)
    assert len(set(chosen)) == len(chosen)
    assert all(set(chosen) & set(texts) for texts in lists)
    assert len(chosen) <= kernels + len(lists)
    if kernels >= 6:
        assert set(chosen) == {text for texts in lists for text in texts}


def test_a_compiler_that_fails_stops_compiling_ahead(dag):
    class Broken(CompilingNamedBackend):
        def compile_ahead(self, requests, arch, progress):
            raise BackendError("no nvcc")

    requests = distinct_requests(dag, (INT8,), "cuda", "7.5")
    with pytest.raises(BackendError, match="no nvcc"):
        compile_requests(requests, [Broken("one")], "sm_75", lambda *update: None)


def test_names_of_architectures():
    assert [capability_of(arch) for arch in ("sm_75", "sm_90a", "sm_100a")] == ["7.5", "9.0", "10.0"]
    for nonsense in ("75", "sm_", "sm_x5", "compute_75", "sm_7"):
        with pytest.raises(QSyncError, match="--arch names a chip as compilers do, for example sm_75 or sm_90a, got"):
            capability_of(nonsense)


def test_descriptions():
    call = CallShapes("linear", (4, 6), (3, 6), (4, 3))
    asked = OperatorRequest("linear.output", distinct_request(call), (4, 3), Precision.INT8)
    assert describe(asked) == "linear.output int8 4×6 3×6"


def distinct_request(call):
    from qsync_core.kernels.requests import operator_requests

    return operator_requests(call, INT8, "cpu")[2].request


def test_the_default_store_is_read_again_when_it_changes(dag, install):
    one = NamedBackend("one")
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    assert len(store_of_request(requests[0].request)) == 0
    tune_requests(requests[:1], [one], open_store(CPU), CPU, effort=QUICK)
    assert len(store_of_request(requests[0].request)) == 1


def test_what_is_known_of_devices():
    facts = qsync_describe_device("cpu")
    assert (facts.kind, facts.name, facts.compute_capability) == ("cpu", "cpu", "")
    assert facts.software["torch"] == torch.__version__
    assert qsync_describe_device("cuda:99") is None
    assert device_peaks(CPU).bytes_per_ns == 0


def test_a_record_that_its_backend_does_not_know_is_measured_again_and_that_of_another_library_is_not(dag, install):
    one = CompilingNamedBackend("one", configs=("t1", "t2", "t3"))
    install(one)
    asked = distinct_requests(dag, (INT8,), "cpu", "")[:1]
    store = open_store(CPU)
    key = store.key("one", asked[0].request)
    store.add(TuningRecord(key, "t_of_elsewhere", 1, 99))
    found = tune_requests(asked, [one], store, CPU, effort=Effort(kernels=2, samples=(1, 1)))
    assert found.reused == 0
    assert found.requests[0].best.config in ("t1", "t2")
    store.add(TuningRecord(key, "t3", 1, 3))
    again = tune_requests(asked, [one], open_store(CPU), CPU, effort=Effort(kernels=1, samples=(1, 1)))
    assert (again.reused, again.requests[0].best.config) == (1, "t3")

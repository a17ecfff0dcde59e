"""Tuning a graph's kernels: each distinct one once, for every backend that takes it; interrupted runs continue."""

import pytest
import torch
from torch import nn

from qsync_core.backend import Op
from qsync_core.errors import BackendError, QSyncError
from qsync_core.operator_requests import CallShapes, OperatorRequest
from qsync_core.precision import Precision
from qsync_core.tuning import Effort
from qsync_core.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.trace import trace
from qsync_torch.tuning.job_tuning import (
    arch_of,
    capability_of,
    compile_requests,
    describe,
    distinct_requests,
    tune_requests,
)
from qsync_torch.tuning.peaks import device_peaks
from qsync_torch.tuning.tuned_store import describe_device, open_store, store_of_request

from .installed_backends import CompilingNamedBackend, NamedBackend

CPU = torch.device("cpu")
INT8 = Variant.of(Precision.INT8)
SIXTEEN = Variant.of(Precision.INT8, output=Precision.BFLOAT16)
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
    found = distinct_requests(dag, (INT8, SIXTEEN, Variant.of(Precision.BFLOAT16)), "cpu", "")
    roles = [(asked.role, asked.request.shapes) for asked in found]
    wide, narrow = ((4, 6), (6, 6)), ((4, 6), (3, 6))
    # The first layer has no gradient of its input and the second has; a 16-bit output changes the forward product only.
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
    # Every configuration was built once: what had been measured before the interruption was not measured again.
    assert len(one.built) == 2 * len(requests)
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


def test_backends_compile_ahead_what_they_take(dag, install):
    one, two = CompilingNamedBackend("one"), NamedBackend("two")
    install(one, two)
    requests = distinct_requests(dag, (INT8,), "cuda", "7.5")
    told = []
    assert compile_requests(requests, [one, two], "sm_75", lambda *update: told.append(update)) == {"one": len(requests)}
    assert one.compiled == [("sm_75", len(requests))]
    assert told == [(len(requests), len(requests), "one: all")]
    assert compile_requests(requests, [one], "", lambda *update: None) == {}


def test_a_compiler_that_fails_stops_only_those_who_need_it(dag, install):
    class Broken(CompilingNamedBackend):
        def compile_ahead(self, requests, arch, progress):
            raise BackendError("no nvcc")

    requests = distinct_requests(dag, (INT8,), "cuda", "7.5")
    with pytest.raises(BackendError, match="no nvcc"):
        compile_requests(requests, [Broken("one")], "sm_75", lambda *update: None)
    compile_requests(requests, [Broken("one")], "sm_75", lambda *update: None, required=False)


def test_names_of_architectures():
    assert [arch_of(capability) for capability in ("7.5", "8.6", "9.0", "")] == ["sm_75", "sm_86", "sm_90a", ""]
    assert [capability_of(arch) for arch in ("sm_75", "sm_90a", "sm_100a")] == ["7.5", "9.0", "10.0"]
    for nonsense in ("75", "sm_", "sm_x5", "compute_75", "sm_7"):
        with pytest.raises(QSyncError, match="--arch names a chip as compilers do, for example sm_75 or sm_90a, got"):
            capability_of(nonsense)


def test_descriptions():
    call = CallShapes("linear", (4, 6), (3, 6), (4, 3))
    asked = OperatorRequest("linear.output", distinct_request(call), (4, 3), Precision.INT8)
    assert describe(asked) == "linear.output int8 4×6 3×6"


def distinct_request(call):
    from qsync_core.operator_requests import operator_requests

    return operator_requests(call, INT8, "cpu")[2].request


def test_the_default_store_is_read_again_when_it_changes(dag, install):
    one = NamedBackend("one")
    install(one)
    requests = distinct_requests(dag, (INT8,), "cpu", "")
    assert len(store_of_request(requests[0].request)) == 0
    tune_requests(requests[:1], [one], open_store(CPU), CPU, effort=QUICK)
    assert len(store_of_request(requests[0].request)) == 1


def test_what_is_known_of_devices():
    facts = describe_device("cpu")
    assert (facts.kind, facts.name, facts.compute_capability) == ("cpu", "cpu", "")
    assert facts.software["torch"] == torch.__version__
    assert describe_device("cuda:99") is None
    assert device_peaks(CPU).bytes_per_ns == 0

"""Which kernels an operator gets: named ones in their order, tuned ones by latency, PyTorch's own for float formats."""

import threading

import attrs
import pytest
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.choice import KernelChoice, OpChoice
from qsync_core.kernels.requests import CallShapes, operator_requests
from qsync_core.tuning.record import TuningRecord
from qsync_torch.kernels.installed import open_store
from qsync_torch.tuning import compiling
from qsync_torch.tuning.chooser import KernelChooser

from .installed_backends import CompilingNamedBackend, NamedBackend

CPU = torch.device("cpu")
INT8, BFLOAT16 = Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16)
CALL = CallShapes("linear", (4, 16), (8, 16), (4, 8))


def tuned(latencies, call=CALL):
    """A store with these latencies: (backend, role) to (configuration, nanoseconds)."""
    store = open_store(CPU)
    for asked in operator_requests(call, INT8, "cpu"):
        for (backend, role), (config, latency_ns) in latencies.items():
            if asked.role == role:
                store.add(TuningRecord(store.key(backend, asked.request), config, latency_ns))
    return store


def test_a_cpu_takes_aten_and_a_gpu_whatever_is_fastest():
    assert KernelChooser(CPU).chain == ("aten",)
    assert KernelChooser(CPU).for_operator(CALL, INT8) == KernelChoice.parse("aten", "")
    assert KernelChooser(torch.device("cuda")).chain == ("auto",)


def test_the_fastest_of_each_kernel(install):
    install(NamedBackend("one"), NamedBackend("two", refuses={"grad_weight": "no"}))
    store = tuned(
        {
            ("one", "linear.output"): ("b", 30),
            ("two", "linear.output"): ("a", 20),
            ("aten", "linear.output"): ("", 25),
            ("one", "linear.grad_input"): ("b", 9),
            ("one", "quantize"): ("a", 5),
            ("two", "quantize.weight"): ("b", 4),
        }
    )
    chooser = KernelChooser(CPU, "auto", store)
    chosen = chooser.for_operator(CALL, INT8)
    assert chosen.backend == "one+two+aten"
    assert dict(chosen.pins) == {
        "linear.output": OpChoice("two", "a"),
        "linear.grad_input": OpChoice("one", "b"),
        "linear.grad_weight": OpChoice("aten", ""),
        "quantize": OpChoice("one", "a"),
        # Weights of all shapes share one quantization: a backend, but no configuration.
        "quantize.weight": OpChoice("two", ""),
    }
    assert {request.op for request in chooser.untuned} == {Op.LINEAR_GRAD_WEIGHT}


def test_without_records_the_name_decides(install):
    install(NamedBackend("one"))
    assert KernelChooser(CPU, "auto", open_store(CPU)).for_operator(CALL, INT8) == KernelChoice.parse()


def test_a_chain_keeps_its_order_and_takes_tuned_configurations(install):
    install(NamedBackend("one", refuses={"quantize": "it multiplies only"}), NamedBackend("two"))
    store = tuned({("one", "linear.output"): ("b", 900), ("two", "linear.output"): ("b", 1)})
    ops = dict(KernelChooser(CPU, "one+two", store).for_operator(CALL, INT8).pins)
    assert ops["linear.output"] == OpChoice("one", "b")
    assert ops["linear.grad_input"] == OpChoice("one", "a")
    assert ops["quantize"] == OpChoice("two", "a")


def producers(activation=Activation.GELU):
    """The requests of a chain whose copy is int8, as an int8 operator reads it."""
    variant = attrs.evolve(INT8, saved=Precision.FLOAT32, grad_input=Precision.FLOAT32)
    form = ChainForm(activation)
    return [KernelRequest(op, variant, ((4, 16),), chain=form) for op in (Op.ACTIVATION_OUTPUT, Op.ACTIVATION_GRAD_INPUT)]


def test_a_fused_chain_takes_the_backend_that_quantizes_fastest(install, tmp_path):
    """Of those with both of its kernels; PyTorch's are a reference.  Its own records go before that."""
    install(NamedBackend("one"), NamedBackend("two"))
    store = tuned({("two", "quantize"): ("b", 4), ("aten", "quantize"): ("", 5)})
    chosen = KernelChooser(CPU, "auto", store).for_chain(producers())
    assert dict(chosen.pins) == {op: OpChoice("two", "a") for op in (Op.ACTIVATION_OUTPUT, Op.ACTIVATION_GRAD_INPUT)}
    store.add(TuningRecord(store.key("one", producers()[1]), "b", 7))
    assert dict(KernelChooser(CPU, "auto", store).for_chain(producers()).pins)[Op.ACTIVATION_GRAD_INPUT] == OpChoice("one", "b")
    untuned = KernelChooser(CPU, "auto", open_store(CPU, tmp_path / "none.sqlite"))
    assert untuned.for_chain(producers()) == KernelChoice.parse()
    assert {request.op for request in untuned.untuned} == {Op.QUANTIZE}


def test_a_fused_chain_that_no_named_backend_has_is_left_out(install):
    install(NamedBackend("one", refuses={"grad_input": "forward only"}), NamedBackend("two"))
    assert KernelChooser(CPU, "one+two").for_chain(producers()).backend == "one+two"
    assert KernelChooser(CPU, "one").for_chain(producers()) is None
    assert KernelChooser(CPU).for_chain(producers()) == KernelChoice.parse()
    assert KernelChooser(CPU).for_chain(producers(Activation.NONE)) is None


def test_float_formats_run_pytorchs_own_kernels(install):
    install(NamedBackend("one"))
    assert KernelChooser(CPU, "auto").for_operator(CALL, BFLOAT16) == KernelChoice.parse("aten", "")
    assert KernelChooser(CPU, "one+aten").for_operator(CALL, BFLOAT16) == KernelChoice.parse("aten", "")
    with pytest.raises(BackendError, match=r"operator fc#0 cannot run as bfloat16 on backend one: .* --backend one\+aten'"):
        KernelChooser(CPU, "one").for_operator(CALL, BFLOAT16, "operator fc#0")


def test_refusals_are_told_with_every_reason(install):
    install(NamedBackend("one", refuses={"grad_input": "too narrow"}), NamedBackend("two", refuses={"grad_input": "too wide"}))
    with pytest.raises(BackendError, match=r"no kernel backend can run linear\.grad_input .*\(one: too narrow; two: too wide\)"):
        KernelChooser(CPU, "one+two").for_operator(CALL, INT8)
    rows = Variant.parse(str(INT8).replace("x=tensor", "x=channel"))
    with pytest.raises(
        BackendError, match=r"fc cannot run linear\.output as int8: aten: scales per input channel do not factor out"
    ):
        KernelChooser(CPU).for_operator(CALL, rows, "fc")
    with pytest.raises(BackendError, match="kernel backend 'three' is not installed here"):
        KernelChooser(CPU, "three")


def test_casts_are_chosen_by_their_shape(install):
    install(NamedBackend("one"))
    store = tuned({("one", "quantize"): ("b", 5), ("aten", "quantize"): ("", 50)})
    chooser = KernelChooser(CPU, "auto", store)
    key = CastKey(Precision.FLOAT32, Precision.INT8, Granularity.PER_TENSOR, Rounding.STOCHASTIC)
    assert chooser.for_cast(key, (4, 16)) == KernelChoice.parse("one", "quantize=one/b")
    assert chooser.for_cast(key, (4096, 16)) == KernelChoice.parse()
    assert chooser.for_cast(CastKey(Precision.FLOAT32, Precision.BFLOAT16), (4, 16)) == KernelChoice.parse()


def test_what_was_chosen_is_compiled_side_by_side_and_each_kernel_once(install, monkeypatch):
    both = threading.Barrier(2)

    class Waiting(CompilingNamedBackend):
        def unsupported_reasons(self, request):
            return [] if request.op in (Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT) else ["it has two products"]

        def build(self, request, config):
            both.wait(30)  # for the other kernel's compiler
            return super().build(request, config)

    one = Waiting("one", configs=("t1;swizzle=4", "t2"))
    install(one)
    chooser = KernelChooser(CPU, "one+aten")
    chooser.for_operator(CALL, INT8)
    chooser.for_operator(attrs.evolve(CALL, x=(6, 16), y=(6, 8)), INT8)  # other rows, which the same kernels take
    monkeypatch.setattr(compiling, "_cores", lambda: 2)
    waited = []
    compiling.build_all(chooser.to_compile, lambda built, every: waited.append((built, every)))
    assert sorted(one.built) == [(Op.LINEAR_GRAD_INPUT, "t1;swizzle=4"), (Op.LINEAR_OUTPUT, "t1;swizzle=4")]
    assert waited == [(0, 2), (1, 2)]

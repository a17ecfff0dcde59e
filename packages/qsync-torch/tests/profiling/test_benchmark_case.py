import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from qsync_core.ir.dag import TRANSPOSED, WEIGHT_LAYOUT, OpClass, Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import ATEN
from qsync_torch.load_job import load_job
from qsync_torch.profiling.benchmark_case import adjustable_case, replayed_case
from qsync_torch.profiling.memory import _cpu_allocations, watch_saved
from qsync_torch.tracing.trace import trace


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_linear_keeps_its_input_and_the_parameter_is_not_counted():
    x, weight, bias = leaf(5, 8), leaf(3, 8), leaf(3)
    saved = watch_saved(lambda: F.linear(x, weight, bias), [x], [weight, bias])
    assert (saved.inputs, saved.output, saved.own_bytes) == ((0,), False, 0)


def test_relu_keeps_its_output():
    x = leaf(4, 4)
    saved = watch_saved(lambda: F.relu(x), [x])
    assert (saved.inputs, saved.output, saved.own_bytes) == ((), True, 0)


def test_add_keeps_nothing_and_mul_both():
    x, y = leaf(4, 4), leaf(4, 4)
    assert watch_saved(lambda: x + y, [x, y]).inputs == ()
    assert watch_saved(lambda: x * y, [x, y]).inputs == (0, 1)


def test_one_storage_counts_once():
    x = leaf(4, 4)
    saved = watch_saved(lambda: x.t() @ x, [x])
    assert (saved.inputs, saved.own_bytes) == ((0,), 0)


def test_dropout_keeps_its_mask():
    x = leaf(16, 16)
    saved = watch_saved(lambda: F.dropout(x, 0.5), [x])
    # The mask: one bool an element (a float32 one where ATen has no fused kernel).
    assert (saved.inputs, saved.output) == ((), False)
    assert saved.own_bytes in (256, 4 * 256)


def test_batch_norm_keeps_input_and_statistics():
    x, weight, bias = leaf(4, 8, 3, 3), leaf(8), leaf(8)
    mean, variance = torch.zeros(8), torch.ones(8)
    saved = watch_saved(lambda: F.batch_norm(x, mean, variance, weight, bias, True), [x], [weight, bias, mean, variance])
    assert (saved.inputs, saved.output, saved.own_bytes) == ((0,), False, 2 * 8 * 4)  # saved mean and inverse deviation


def _convolution(batch=2, channels=4, out=6, side=5):
    return Operator(
        OpId("conv"),
        "conv2d",
        OpClass.ADJUSTABLE,
        (OpId("relu"),),
        ((batch, channels, side, side),),
        output_shape=(batch, out, side, side),
        parameters=("conv.weight", "conv.bias"),
        weight_shape=(out, channels, 3, 3),
        attributes={"stride": "1,1", "padding": "1,1", "dilation": "1,1", "groups": "1", "memory_format": "channels_last"},
    )


@pytest.mark.parametrize(
    ("precision", "own_bytes"),
    [
        (Precision.FLOAT32, 0),
        (Precision.BFLOAT16, 2 * 6 * 4 * 9),  # the weight's 16-bit copy
        (Precision.INT8, 6 * 4 * 9 + 4 + 6 * 4),  # the weight's 8-bit copy, one scale of the activation, six of the weight
    ],
)
def test_adjustable_operator_keeps_its_cast_input_and_low_precision_weight(precision, own_bytes):
    operator = _convolution()
    layouts = {"conv.weight": torch.empty(6, 4, 3, 3).to(memory_format=torch.channels_last)}
    case = adjustable_case(operator, Variant.of(precision), layouts, torch.device("cpu"), ATEN)
    saved = watch_saved(case.make_ready().run, case.activations, case.parameters)
    assert case.activations[0].dtype is {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[precision]
    assert (saved.inputs, saved.output, saved.own_bytes) == ((0,), False, own_bytes)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16, Precision.INT8])
def test_a_transposed_weight_keeps_what_a_linear_keeps_and_int8_copies_it_once_each_way(precision):
    n, k, rows = 512, 256, 8
    made = {}
    for attributes, stored in (({}, (n, k)), ({WEIGHT_LAYOUT: TRANSPOSED}, (k, n))):
        operator = Operator(
            OpId("fc.weight"),
            "linear",
            OpClass.ADJUSTABLE,
            (OpId("relu"),),
            ((rows, k),),
            output_shape=(rows, n),
            parameters=("fc.weight", "fc.bias"),
            weight_shape=(n, k),
            attributes=attributes,
        )
        assert operator.parameter_shape == stored
        case = adjustable_case(operator, Variant.of(precision), {"fc.weight": torch.empty(stored)}, torch.device("cpu"), ATEN)
        saved = watch_saved(case.make_ready().run, case.activations, case.parameters)
        assert case.parameters[0].shape == stored
        call, results = case.make_ready(), []
        forward = _cpu_allocations(lambda: results.append(call.run()))  # noqa: B023
        gradient = torch.randn(rows, n, dtype=case.gradient_dtype or results[0].dtype)
        backward = _cpu_allocations(call.backward_thunk(results[0], [gradient]))
        # A product without instructions for its format makes float32 copies of its own, of the weight's size too.
        made[stored] = (
            (saved.inputs, saved.output, saved.own_bytes),
            *(sum(nbytes == 4 * n * k for _, nbytes in changes) for changes in (forward, backward)),
        )
    (kept, forward, backward), (same, forward_turned, backward_turned) = made.values()
    assert kept == same
    copies = 1 if precision is Precision.INT8 else 0
    assert (forward_turned - forward, backward_turned - backward) == (copies, copies)


def test_a_whole_model_keeps_what_the_parts_say():
    """The distinct bytes that autograd keeps in one real forward equal the sum over operators, shared tensors counted once."""
    job = load_job("resnet18:image=16,small_stem=true,width=4,classes=5", batch_size=2)
    dag = trace(job)
    kept, batch = {}, job.batch(0, 2)
    lasting = {t.untyped_storage().data_ptr() for t in (*job.model.parameters(), *job.model.buffers(), batch.target)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.compute_loss(batch)
    measured = sum(nbytes for nbytes, _ in kept.values())
    assert loss.requires_grad

    layouts = dict(job.model.named_parameters())
    tensors, own = {}, 0
    for operator in dag.operators:
        if operator.kind == "input":
            continue
        if operator.is_adjustable:
            case = adjustable_case(operator, Variant.of(Precision.FLOAT32), layouts, torch.device("cpu"), ATEN)
        else:
            case = replayed_case(operator, torch.device("cpu"), Precision.FLOAT32)
        saved = watch_saved(case.make_ready().run, case.activations, case.parameters)
        own += saved.own_bytes
        for index in saved.inputs:
            producer = dag[operator.inputs[index]]
            tensors[producer.op_id] = 4 * operator.input_numel(index)
        if saved.output:
            tensors[operator.op_id] = 4 * operator.output_numel
    # In-place ReLUs share the storage of their input, which batch_norm does not keep: nothing is counted twice.
    assert measured == sum(tensors.values()) + own


def test_an_output_kept_by_its_own_node_is_freed_with_the_last_reference() -> None:
    x = torch.randn(4, requires_grad=True)
    saved = watch_saved(lambda: torch.relu(x), [x])
    alive = weakref.ref(saved.result)
    del saved
    gc.collect()
    assert alive() is None

"""What the backend offers and refuses; none of it needs a GPU, torch or triton."""

from __future__ import annotations

import itertools
import re

import attrs
import pytest

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import BACKEND_API_VERSION, KernelBackend, KernelConfig, KernelRequest, Op
from qsync_kernels_triton.backend import _ROWS_ONE_SCALE, PRODUCER_CANDIDATES, TritonBackend
from qsync_kernels_triton.config import DEQUANTIZE, SHARED_BYTES, ProducerConfig, ProductConfig, QuantizeConfig, ranked
from qsync_kernels_triton.support import OPS

INT8 = Variant.of(Precision.INT8)
INT8_GRADIENTS = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN)
QUANTIZE = KernelRequest(Op.QUANTIZE, INT8, ((64, 64),), device_kind="cuda", compute_capability="9.0")
OUTPUT = attrs.evolve(QUANTIZE, op=Op.LINEAR_OUTPUT, shapes=((4608, 768), (3072, 768)))
CONVOLUTION = attrs.evolve(
    QUANTIZE, op=Op.CONV2D_OUTPUT, shapes=((8, 64, 56, 56), (64, 64, 3, 3)), geometry=Geometry(padding=(1, 1))
)
GRAD_INPUT = attrs.evolve(OUTPUT, op=Op.LINEAR_GRAD_INPUT, shapes=((4608, 3072), (3072, 768)))
GRAD_WEIGHT = attrs.evolve(OUTPUT, op=Op.LINEAR_GRAD_WEIGHT, shapes=((4608, 3072), (4608, 768)))
CONV_GRAD_INPUT = attrs.evolve(CONVOLUTION, op=Op.CONV2D_GRAD_INPUT)
NORM = attrs.evolve(QUANTIZE, op=Op.BATCH_NORM_OUTPUT, shapes=((8, 64, 56, 56),), chain=ChainForm(Activation.RELU, residual=True))
LAYER_NORM = attrs.evolve(QUANTIZE, op=Op.LAYER_NORM_OUTPUT, shapes=((4608, 768),), chain=ChainForm(residual=True))
GELU = attrs.evolve(QUANTIZE, op=Op.ACTIVATION_OUTPUT, shapes=((4608, 3072),), chain=ChainForm(Activation.GELU))
PRODUCERS = [
    attrs.evolve(r, op=f"{r.op.partition('.')[0]}.{part}") for r in (NORM, LAYER_NORM, GELU) for part in ("output", "grad_input")
]
SUPPORTED = [QUANTIZE, OUTPUT, CONVOLUTION, GRAD_INPUT, GRAD_WEIGHT, CONV_GRAD_INPUT]


@pytest.fixture(autouse=True)
def _torch_and_triton_are_found(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def test_it_is_a_backend_of_this_api():
    backend = TritonBackend()
    assert isinstance(backend, KernelBackend)
    assert (backend.name, backend.api_version) == ("triton", BACKEND_API_VERSION)
    specs = {spec.op: spec for spec in backend.kernel_specs()}
    assert set(specs) == set(OPS)
    assert all(spec.device_kinds == ("cuda",) for spec in specs.values())
    assert {op for op, spec in specs.items() if spec.min_compute_capability == "7.5"} == {*Op.PRODUCERS, Op.DEQUANTIZE}
    assert {spec.min_compute_capability for spec in specs.values()} == {"7.5", "8.0"}


@pytest.mark.parametrize("request_", SUPPORTED, ids=lambda r: r.op)
@pytest.mark.parametrize("variant", [INT8, INT8_GRADIENTS, FLOAT8])
def test_what_it_offers_on_a_recent_gpu(request_, variant):
    assert TritonBackend().unsupported_reasons(attrs.evolve(request_, variant=variant)) == []


@pytest.mark.parametrize("request_", PRODUCERS, ids=lambda r: r.op)
@pytest.mark.parametrize("variant", [INT8, FLOAT8, Variant.of(Precision.FLOAT16), attrs.evolve(INT8, saved=Precision.FLOAT16)])
def test_producers_write_copies_in_8_bit_or_none(request_, variant):
    assert TritonBackend().unsupported_reasons(attrs.evolve(request_, variant=variant)) == []
    assert TritonBackend().unsupported_reasons(attrs.evolve(request_, variant=variant, shapes=())) == []


@pytest.mark.parametrize("request_", PRODUCERS, ids=lambda r: r.op)
@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_ROW])
def test_producers_of_no_shape_in_particular_have_candidates(request_, granularity):
    variant = attrs.evolve(request_.variant, x_granularity=granularity)
    found = TritonBackend().candidate_configs(attrs.evolve(request_, variant=variant, shapes=()))
    assert {config.text for config in found} <= {str(config) for config in PRODUCER_CANDIDATES[request_.op] + _ROWS_ONE_SCALE}
    assert found


@pytest.mark.parametrize("request_", PRODUCERS, ids=lambda r: r.op)
@pytest.mark.parametrize("floats", [Precision.FLOAT32, Precision.FLOAT16, Precision.BFLOAT16])
@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_producers_run_on_every_chip_whose_tensor_cores_read_their_copies(request_, floats, capability):
    """A T4's too: with what is kept as it is or in int8, and a batch norm's gradient with its copy and in two parts."""
    backward = request_.op == Op.BATCH_NORM_GRAD_INPUT
    chains = [request_.chain, attrs.evolve(request_.chain, grad_copy=backward, grad_sum=backward)]
    for saved, chain in itertools.product((floats, Precision.INT8), chains):
        variant = attrs.evolve(INT8, output=floats, grad_input=floats, saved=saved)
        asked = attrs.evolve(request_, variant=variant, chain=chain, compute_capability=capability)
        assert TritonBackend().unsupported_reasons(asked) == []


@pytest.mark.parametrize(
    ("request_", "change", "reason"),
    [
        (NORM, {"chain": ChainForm(Activation.GELU)}, "batch_norm is fused with the activations none, relu, not with gelu"),
        (NORM, {"variant": attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)}, "the result of a batch norm has one scale"),
        (NORM, {"contiguous": False}, "it needs dense operands"),
        (NORM, {"compute_capability": "7.0"}, "Triton's producers need compute capability 7.5, and this device's is 7.0"),
        (NORM, {"compute_capability": ""}, "Triton's producers need compute capability 7.5, and this device's is unknown"),
        (NORM, {"shapes": ((8, 64),)}, "batch_norm.output takes one operand of 4 dimensions"),
        (LAYER_NORM, {"chain": ChainForm(Activation.RELU)}, "layer_norm is fused with the activations none, not with relu"),
        (GELU, {"chain": ChainForm(Activation.RELU)}, "the sign of ReLU's input does not survive rounding to 8 bit"),
        (GELU, {"variant": INT8_GRADIENTS}, "gradients are in a float format, not in int8"),
        (
            attrs.evolve(GELU, op=Op.ACTIVATION_GRAD_INPUT),
            {"variant": FLOAT8, "compute_capability": "8.6"},
            "kernels that read float8_e4m3fn need compute capability 8.9, and this device's is 8.6",
        ),
    ],
)
def test_other_chains_are_refused_with_their_one_reason(request_, change, reason):
    (said,) = TritonBackend().unsupported_reasons(attrs.evolve(request_, **change))
    assert re.search(reason, said)
    with pytest.raises(BackendError, match="backend triton cannot run"):
        TritonBackend().build(attrs.evolve(request_, **change), KernelConfig())


@pytest.mark.parametrize(
    ("grad", "x", "change", "first"),
    [
        ((128, 64, 56, 56), (128, 256, 56, 56), {}, "m=64;n=256;k=64;warps=8;stages=3;group=1;tma=0"),
        ((128, 256, 56, 56), (128, 64, 56, 56), {}, "m=256;n=64;k=64;warps=8;stages=3;group=1;tma=0"),
        ((128, 128, 28, 28), (128, 256, 56, 56), {"geometry": Geometry((2, 2))}, "m=128;n=256;k=64;warps=8;stages=3;group=1;tma=0"),
        ((128, 512, 28, 28), (128, 256, 56, 56), {"geometry": Geometry((2, 2))}, "m=128;n=256;k=64;warps=8;stages=3;group=1;tma=0"),
        ((128, 512, 7, 7), (128, 2048, 7, 7), {}, "dequantize"),
        ((128, 64, 54, 54), (128, 64, 56, 56), {}, ""),
        ((128, 64, 56, 56), (128, 64, 56, 56), {"geometry": Geometry(padding=(1, 1))}, ""),
        ((128, 64, 56, 56), (128, 64, 56, 56), {"geometry": Geometry(groups=2)}, ""),
        ((128, 64, 56, 56), (128, 64, 56, 56), {"variant": attrs.evolve(INT8, grad_weight=Precision.FLOAT32)}, ""),
    ],
)
def test_the_weight_of_a_1x1_convolution_reads_its_copy_where_an_element_enters_few_sums(grad, x, change, first):
    request = attrs.evolve(CONVOLUTION, op=Op.CONV2D_GRAD_WEIGHT, shapes=(grad, x), geometry=Geometry())
    texts = [config.text for config in TritonBackend().candidate_configs(attrs.evolve(request, **change))]
    assert texts[0] == first
    assert ("dequantize" in texts) == (first != "")


def test_large_tensors_are_supported():
    assert TritonBackend().unsupported_reasons(attrs.evolve(QUANTIZE, shapes=((2**17, 2**16),))) == []


@pytest.mark.parametrize(
    ("request_", "change", "reason"),
    [
        (CONVOLUTION, {"op": "conv3d.output"}, "linear.output, .*dequantize, not conv3d.output"),
        (QUANTIZE, {"variant": Variant.of(Precision.FLOAT16)}, "it runs quantize in int8, float8_e4m3fn, .*, not in float16"),
        (OUTPUT, {"variant": Variant.of(Precision.BFLOAT16)}, "it multiplies int8, float8_e4m3fn, .*, not bfloat16"),
        (QUANTIZE, {"variant": attrs.evolve(INT8, symmetric=False)}, "aten alone has zero points"),
        (QUANTIZE, {"device_kind": "cpu", "compute_capability": ""}, "on CUDA devices, and this request is for cpu"),
        (QUANTIZE, {"compute_capability": "7.5"}, "Triton.* need compute capability 8.0, and this device's is 7.5"),
        (QUANTIZE, {"compute_capability": ""}, "Triton.* need compute capability 8.0, and this device's is unknown"),
        (QUANTIZE, {"contiguous": False}, "it needs dense operands"),
        (
            QUANTIZE,
            {"shapes": ((2, 3, 4),), "transposed": True},
            r"only a matrix .*\[2, 3, 4\]",
        ),
        (
            QUANTIZE,
            {"shapes": ((2, 3, 4),), "multiplied": True},
            "channels .* are those of 2-d and 4-d",
        ),
        (OUTPUT, {"variant": FLOAT8, "compute_capability": "8.0"}, "float8 products need compute capability 8.9, .* is 8.0"),
        (OUTPUT, {"shapes": ((8, 133145), (8, 133145))}, "int32 sum over 133145 products could overflow; .* is 133144"),
        (
            OUTPUT,
            {"variant": attrs.evolve(INT8, x_granularity=Granularity.PER_CHANNEL)},
            "the activation per tensor or per row",
        ),
        (
            OUTPUT,
            {"variant": attrs.evolve(INT8, w_granularity=Granularity.PER_ROW)},
            "per output channel, not per row",
        ),
        (
            OUTPUT,
            {"variant": attrs.evolve(INT8, saved=Precision.FLOAT16)},
            r"computes in \(int8\), not in float16",
        ),
        (
            GRAD_INPUT,
            {"variant": attrs.evolve(INT8, grad_input=Precision.FLOAT8_E4M3FN)},
            "linear.grad_input of int8 operands in bfloat16, float16, float32, int8, not in float8_e4m3fn; .* as grad_input",
        ),
        (
            CONVOLUTION,
            {"variant": attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)},
            "a convolution's patches overlap",
        ),
        (CONVOLUTION, {"contiguous": False}, "it needs dense channels-last operands"),
        (CONV_GRAD_INPUT, {"geometry": Geometry(stride=(2, 2))}, r"transposed filters, which needs stride 1, got \[2, 2\]"),
        (CONV_GRAD_INPUT, {"geometry": Geometry(groups=4)}, "it computes grad_input of one group only, not of 4"),
    ],
)
def test_everything_else_is_refused_with_its_one_reason(request_, change, reason):
    reasons = TritonBackend().unsupported_reasons(attrs.evolve(request_, **change))
    assert len(reasons) == 1
    assert re.search(reason, reasons[0])


@pytest.mark.parametrize(
    ("request_", "change", "reason"),
    [
        (CONVOLUTION, {"shapes": ((8, 64), (64, 64))}, r"two operands of 4 dimensions each, .* \(8, 64\) and \(64, 64\)"),
        (CONVOLUTION, {"shapes": ((8, 32, 9, 9), (64, 64, 3, 3))}, "do not fit each other: 32 against 64 in conv2d.output"),
        (OUTPUT, {"shapes": ((), (3, 4))}, r"two operands of 2 dimensions each, and these have the shapes \(\) and \(3, 4\)"),
        (OUTPUT, {"shapes": ((3, 4),)}, r"two operands of 2 dimensions each, and these have the shapes \(3, 4\)"),
        (OUTPUT, {"shapes": ((3, -4), (3, -4))}, r"shapes \(3, -4\) and \(3, -4\) have sizes below 0"),
        (CONVOLUTION, {"shapes": ((8, 64, 9, 9), (64, 64, 0, 3))}, "a filter has taps, not 0x3"),
        (CONVOLUTION, {"shapes": ((8, 64, 9, 9), (9, 16, 3, 3)), "geometry": Geometry(groups=4)}, "9 output channels .* 4 groups"),
        (OUTPUT, {"shapes": ((3, 4), (3, 5))}, "do not fit each other: 4 against 5 in linear.output"),
        (GRAD_INPUT, {"shapes": ((3,), (3,))}, "two operands of 2 dimensions each"),
        (GRAD_WEIGHT, {"shapes": ((3, 4), (5, 4))}, "do not fit each other: 3 against 5 in linear.grad_weight"),
    ],
)
def test_requests_that_are_no_products_are_refused_with_a_sentence(request_, change, reason):
    request = attrs.evolve(request_, **change)
    (said,) = TritonBackend().unsupported_reasons(request)
    assert re.search(reason, said)
    with pytest.raises(BackendError, match="backend triton cannot run"):
        TritonBackend().build(request, KernelConfig())


def test_only_the_format_of_the_operator_at_hand_counts():
    mixed = attrs.evolve(INT8, grad_input=Precision.FLOAT8_E4M3FN)
    assert TritonBackend().unsupported_reasons(attrs.evolve(OUTPUT, variant=mixed)) == []
    long_float_gradient = attrs.evolve(GRAD_WEIGHT, shapes=((200_000, 8), (200_000, 8)))
    assert TritonBackend().unsupported_reasons(long_float_gradient) == []
    assert len(TritonBackend().unsupported_reasons(attrs.evolve(long_float_gradient, variant=INT8_GRADIENTS))) == 1


def test_ten_follows_nine_in_compute_capabilities():
    assert TritonBackend().unsupported_reasons(attrs.evolve(QUANTIZE, compute_capability="10.0")) == []


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else object())
    assert TritonBackend().unsupported_reasons(QUANTIZE) == ["triton cannot be found; install qsync-kernels-triton[triton]"]


def test_building_what_is_refused_raises_with_the_reason():
    request = attrs.evolve(CONV_GRAD_INPUT, geometry=Geometry(stride=(2, 2)))
    with pytest.raises(BackendError, match=r"backend triton cannot run conv2d.grad_input on \[.*\]: .*needs stride 1"):
        TritonBackend().build(request, KernelConfig())


@pytest.mark.parametrize("request_", [*SUPPORTED, *PRODUCERS], ids=lambda r: r.op)
def test_every_candidate_configuration_can_be_read_back(request_):
    candidates = TritonBackend().candidate_configs(request_)
    read = QuantizeConfig if request_.op == Op.QUANTIZE else ProducerConfig if request_.op in Op.PRODUCERS else ProductConfig
    candidates = [candidate for candidate in candidates if candidate.text != DEQUANTIZE]
    assert [str(read.parse(candidate.text)) for candidate in candidates] == [c.text for c in candidates]
    assert len({candidate.text for candidate in candidates}) == len(candidates)
    assert read.parse("") == read()
    assert not set("".join(c.text for c in candidates)) & set("&|/ ")


@pytest.mark.parametrize("by", Granularity)
def test_a_transposed_copy_is_tried_in_ways_that_differ(by):
    request = attrs.evolve(QUANTIZE, variant=attrs.evolve(INT8, x_granularity=by))
    plain, copied = (
        [QuantizeConfig.parse(c.text) for c in TritonBackend().candidate_configs(attrs.evolve(request, transposed=transposed))]
        for transposed in (False, True)
    )
    if by is Granularity.PER_CHANNEL:  # quantized as without a copy, which is made afterwards
        assert copied == plain
        return
    read = [(config.programs, config.sweep) for config in copied]
    assert len(set(read)) == len(read) == 5
    assert read == list(dict.fromkeys((config.programs, config.sweep) for config in plain))
    assert copied[0] == plain[0]


@pytest.mark.parametrize("op", [Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT, Op.CONV2D_GRAD_INPUT])
def test_a_float_gradient_dequantizes_a_copy_first_unless_tuning_finds_better(op):
    (request_,) = (request_ for request_ in SUPPORTED if request_.op == op)
    first, *others = (candidate.text for candidate in TritonBackend().candidate_configs(request_))
    assert first == DEQUANTIZE
    assert others


@pytest.mark.parametrize("op", [Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT, Op.CONV2D_GRAD_INPUT])
def test_an_8_bit_gradient_has_nothing_to_dequantize(op):
    (request_,) = (attrs.evolve(request_, variant=INT8_GRADIENTS) for request_ in SUPPORTED if request_.op == op)
    assert DEQUANTIZE not in [candidate.text for candidate in TritonBackend().candidate_configs(request_)]
    with pytest.raises(BackendError, match="cannot read the configuration 'dequantize'"):
        TritonBackend().build(request_, KernelConfig(DEQUANTIZE))


def test_a_batch_norm_with_a_shortcut_holds_less_in_a_thread():
    chains = [ChainForm(Activation.RELU, residual=residual) for residual in (False, True)]
    first = [TritonBackend().candidate_configs(attrs.evolve(NORM, chain=chain))[0].text for chain in chains]
    assert [ProducerConfig.parse(text).lane for text in first] == [32, 16]


def test_one_scale_for_the_tensor_is_shared_by_fewer_programs():
    tensor = attrs.evolve(GELU, variant=attrs.evolve(GELU.variant, x_granularity=Granularity.PER_TENSOR))
    rows = attrs.evolve(GELU, variant=attrs.evolve(GELU.variant, x_granularity=Granularity.PER_ROW))
    first = [ProducerConfig.parse(TritonBackend().candidate_configs(r)[0].text).apply for r in (tensor, rows)]
    assert first == [4, 16]


@pytest.mark.parametrize("granularity, short, long, lanes", [("tensor", 1024, 2048, [16, 32]), ("row", 8192, 8200, [32, 8])])
def test_a_long_row_has_another_first_guess(granularity, short, long, lanes):
    variant = attrs.evolve(GELU.variant, x_granularity=Granularity(granularity))
    requests = [attrs.evolve(GELU, op=Op.RMS_NORM_OUTPUT, variant=variant, shapes=((64, length),)) for length in (short, long)]
    assert [ProducerConfig.parse(TritonBackend().candidate_configs(r)[0].text).lane for r in requests] == lanes


def test_knobs_that_are_left_out_have_their_default():
    assert QuantizeConfig.parse("warps=4") == QuantizeConfig(warps=4)
    assert ProductConfig.parse("m=64;stages=4") == ProductConfig(m=64, stages=4)


BAD_QUANTIZE = (
    "block=100;warps=4",
    "warps=4;stages=2",
    "block=64;warps=3",
    "fast",
    "block=x",
    "programs=0",
    "keep=-1",
    "warps=4;warps=4",
)
BAD_PRODUCER = ("block=100", "warps=4", "lane=0", "strip=2048", "reduce=0", "apply=-1")
BAD_PRODUCT = ("m=100", "block=64", "warps=3", "stages=9", "group=0", "tma=2")


@pytest.mark.parametrize(
    ("request_", "text", "example"),
    [(QUANTIZE, text, "block=4096;warps=8") for text in BAD_QUANTIZE]
    + [(OUTPUT, text, "m=128;n=128;k=64") for text in BAD_PRODUCT]
    + [(NORM, text, "block=2048;lane=8;strip=256") for text in BAD_PRODUCER],
)
def test_a_configuration_that_can_not_be_read_is_quoted(request_, text, example):
    with pytest.raises(BackendError) as caught:
        TritonBackend().build(request_, KernelConfig(text))
    assert f"cannot read the configuration {text!r}" in str(caught.value)
    assert caught.value.for_any_sizes
    assert example in str(caught.value)


def test_candidates_fit_shared_memory_and_large_products_try_large_tiles_first():
    for m, n, k in ((8192, 8192, 8192), (16, 64, 4096)):
        configs = ranked(m, n, k, 1, 1)
        assert all(config.shared_bytes(1, 1) <= SHARED_BYTES for config in configs)
        costs = [config.cost(m, n, k) for config in configs]
        assert costs == sorted(costs)
    assert ranked(8192, 8192, 8192, 1, 1)[0].m * ranked(8192, 8192, 8192, 1, 1)[0].n == 128 * 256
    assert ranked(16, 64, 4096, 1, 1)[0].m == 16


@pytest.mark.parametrize("request_", [OUTPUT, GRAD_INPUT, GRAD_WEIGHT, CONVOLUTION, CONV_GRAD_INPUT], ids=lambda r: r.op)
def test_tiles_of_float8_products_leave_room_for_their_sums_twice(request_):
    float8 = attrs.evolve(FLOAT8, grad_input=FLOAT8.compute, grad_weight=FLOAT8.compute)
    texts = [c.text for c in TritonBackend().candidate_configs(attrs.evolve(request_, variant=float8))]
    configs = [ProductConfig.parse(text) for text in texts]
    assert len(set(texts)) == len(texts) >= 8
    assert all(config.m * config.n / (32 * config.warps) <= 96 for config in configs)
    int8 = [ProductConfig.parse(c.text) for c in TritonBackend().candidate_configs(attrs.evolve(request_, variant=INT8_GRADIENTS))]
    assert max(config.m * config.n for config in int8) > max(config.m * config.n for config in configs)

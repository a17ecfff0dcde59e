"""The convolution's front-end on CPU memory: stand-in libraries read its arguments as the kernels do."""

from __future__ import annotations

import attrs
import kernel_requests
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries

torch = pytest.importorskip("torch")

from conv_interpreter import Interpreter  # noqa: E402

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.geometry import Geometry  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import Op  # noqa: E402
from qsync_kernels_cutlass.architectures import SM_80, SM_90A  # noqa: E402
from qsync_kernels_cutlass.compiling.library import RASTER, Arguments  # noqa: E402
from qsync_kernels_cutlass.configs import candidates, validity  # noqa: E402
from qsync_kernels_cutlass.configs.config import ConvConfig, Family, GemmConfig  # noqa: E402
from qsync_kernels_cutlass.configs.problem import folds, problem_of  # noqa: E402
from qsync_kernels_cutlass.kernels import conv2d, conv2d_launch  # noqa: E402
from qsync_kernels_cutlass.sources import conv_source  # noqa: E402

FLOAT32 = attrs.evolve(Variant.of(Precision.INT8, output=Precision.FLOAT32), grad_input=Precision.INT8)
FLOAT16 = attrs.evolve(FLOAT32, output=Precision.FLOAT16)
MMA = ConvConfig(Family.MMA, (64, 64, 64), (32, 32, 64), (16, 8, 32), 3)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(conv2d_launch, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(conv2d_launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(conv2d_launch, "sm_count", lambda device: 132)


def request(x, w, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, *, op=Op.CONV2D_OUTPUT, variant=FLOAT32):
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    attributes = {name: ",".join(map(str, pair)) for name, pair in sizes.items()} | {"groups": str(groups)}
    return kernel_requests.conv2d(op, tuple(x), tuple(w), variant=variant, **attributes)


def built(asked, config=None):
    """The kernel and its libraries by name."""
    libraries = {}

    def compile(source):
        return libraries.setdefault(source.name, Interpreter(source))

    return conv2d.build(asked, config or ConvConfig(), SM_90A, compile), libraries


def integers(*shape, seed=0):
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def expected(x, w, geometry, x_scale, w_scale, bias):
    stride, padding, dilation, groups = geometry
    total = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    value = total * x_scale.double() * w_scale.double().view(-1, 1, 1)
    return value if bias is None else value + bias.double().view(-1, 1, 1)


def check_output(x, w, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, *, bias=None, w_scale=None, out_layout=None):
    kernel, libraries = built(request(x.shape, w.shape, stride, padding, dilation, groups))
    x_scale, w_scale = torch.tensor([0.25]), torch.tensor([0.5]) if w_scale is None else w_scale
    wanted = expected(x, w, (stride, padding, dilation, groups), x_scale, w_scale, bias)
    out = torch.full(wanted.shape, torch.nan).contiguous(memory_format=out_layout or torch.channels_last)
    kernel(x, x_scale, w, w_scale, bias, out)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-6, atol=1e-4)
    return libraries


@given(
    images=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 3, 4, 5, 16, 20, 32]),
    filters=st.sampled_from([1, 4, 6, 16]),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    taps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    per_channel=st.booleans(),
    channels_last=st.booleans(),
    with_bias=st.booleans(),
)
@tries(60)
def test_any_geometry(images, channels, filters, size, taps, stride, padding, dilation, per_channel, channels_last, with_bias):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = integers(images, channels, *size).contiguous(memory_format=layout)
    w = integers(filters, channels, *taps, seed=1).contiguous(memory_format=layout)
    scale = torch.rand(filters) + 0.5 if per_channel else None
    bias = torch.randn(filters) if with_bias else None
    check_output(x, w, stride, padding, dilation, w_scale=scale, bias=bias, out_layout=layout)


def test_an_images_stem_is_folded_into_one_launch_of_64_channels():
    libraries = check_output(integers(2, 3, 21, 17), integers(8, 3, 7, 7, seed=1), (2, 2), (3, 3))
    (convolution,) = [library for name, library in libraries.items() if "tma" in name]
    (call,) = convolution.calls
    assert (call.in_c, call.filter_h, call.filter_w, call.stride_h, call.pad_h, call.lda) == (64, 4, 1, 1, 0, 16)


def test_patches_of_images_become_one_product():
    libraries = check_output(integers(2, 3, 32, 48), integers(24, 3, 16, 16, seed=1), (16, 16))
    (convolution,) = [library for name, library in libraries.items() if "tma" in name]
    (call,) = convolution.calls
    assert (call.in_c, call.filter_h, call.filter_w, call.out_h, call.out_w) == (768, 1, 1, 2, 3)


def test_long_strides_fold_many_channels_too():
    libraries = check_output(integers(1, 16, 24, 21), integers(16, 16, 11, 3, seed=1), (9, 2), (1, 1))
    assert "conv2d_fold_pixels" in libraries


@pytest.mark.parametrize(
    ("channels", "taps", "stride", "expected"),
    [
        (3, (7, 7), (2, 2), True),
        (3, (11, 11), (4, 4), True),
        (20, (3, 3), (2, 2), False),
        (64, (3, 3), (2, 2), False),
        (5, (1, 1), (2, 2), False),
    ],
)
def test_folding_where_it_multiplies_less(channels, taps, stride, expected):
    assert folds(channels, taps, Geometry(stride=stride)) is expected


@pytest.mark.parametrize(
    ("asked", "config", "reason"),
    [
        (request((1, 16, 300, 8), (16, 16, 2, 1), dilation=(255, 1)), ConvConfig(), "last tap is too far away for TMA: 255 pixels"),
        (request((1, 16, 300, 8), (16, 16, 3, 1), dilation=(100, 1)), ConvConfig(), "200 pixels from the first, 200 outside"),
        (request((1, 16, 8, 8), (16, 16, 1, 1), padding=(0, 128)), ConvConfig(), "TMA pads by at most 127 pixels, not 128"),
        (request((1, 32, 99, 8), (32, 16, 3, 3), (9, 1), groups=2), ConvConfig(), "TMA steps over at most 8 pixels, not 9"),
        (request((1, 16, 99, 99), (16, 16, 33, 3)), MMA, "filters of at most 32 taps a side, not 33"),
    ],
)
def test_geometries_beyond_a_paths_limits_are_not_its_candidates(asked, config, reason):
    problem = problem_of(asked)
    (found,) = validity.reasons(config, SM_90A, problem)
    assert reason in found
    assert all(candidate.path is not config.path for candidate in candidates.ranked(problem, SM_90A))


@pytest.mark.parametrize(
    "asked",
    [
        request((1, 16, 300, 8), (16, 16, 3, 1), dilation=(100, 1), padding=(100, 0)),
        request((1, 3, 64, 64), (16, 3, 48, 48), (16, 16)),
        request((1, 16, 99, 99), (16, 16, 33, 3), (9, 1)),
    ],
)
def test_folding_and_padding_bring_geometries_within_the_limits(asked):
    assert validity.reasons(ConvConfig(), SM_90A, problem_of(asked)) == []


def test_groups_run_one_after_the_other_on_slices_of_the_channels():
    libraries = check_output(
        integers(2, 48, 6, 5),
        integers(96, 16, 3, 3, seed=1),
        (2, 1),
        (1, 1),
        groups=3,
        w_scale=torch.rand(96),
        bias=torch.randn(96),
    )
    (convolution,) = libraries.values()
    assert [(call.in_c, call.out_c, call.lda, call.ldo) for call in convolution.calls] == [(16, 32, 48, 96)] * 3


def test_operands_that_start_between_16_bytes_are_copied():
    memory = torch.empty(2 * 16 * 5 * 5 + 1, dtype=torch.int8)
    x = memory[1:].as_strided((2, 16, 5, 5), (400, 1, 80, 16)).copy_(integers(2, 16, 5, 5))
    bias = torch.randn(17)[1:]
    check_output(x, integers(16, 16, 3, 3, seed=1), bias=bias, w_scale=torch.rand(17)[1:])


def test_a_bias_of_another_format_is_read_as_float32():
    check_output(integers(1, 16, 4, 4), integers(16, 16, 1, 3, seed=1), bias=torch.randn(16).bfloat16())


def test_one_kernel_takes_batches_of_any_size():
    x, w = integers(4, 16, 6, 6), integers(16, 16, 3, 3, seed=1)
    kernel, _ = built(request(x.shape, w.shape))
    scale = torch.ones(1)
    for images in (4, 1, 3, 0):
        out = torch.empty(images, 16, 4, 4)
        kernel(x[:images], scale, w, scale, None, out)
        torch.testing.assert_close(out, expected(x[:images], w, ((1, 1), (0, 0), (1, 1), 1), scale, scale, None).float())


@given(
    channels=st.sampled_from([(16, 16), (3, 16), (20, 12), (32, 48)]),
    taps=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    share=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    groups=st.sampled_from([1, 2]),
)
@tries(40)
def test_the_gradient_of_the_input_is_autograds(channels, taps, dilation, share, groups):
    in_c, out_c = channels
    if groups == 2:
        in_c, out_c = 32, 64
    padding = tuple(min(part, dilation[axis] * (taps[axis] - 1)) for axis, part in enumerate(share))
    x = torch.zeros(2, in_c, 7, 8, dtype=torch.double, requires_grad=True)
    w = integers(out_c, in_c // groups, *taps)
    y = torch.nn.functional.conv2d(x, w.double(), None, 1, padding, dilation, groups)
    grad = integers(*y.shape, seed=1)
    (wanted,) = torch.autograd.grad(y, x, grad.double())
    asked = request(grad.shape, w.shape, (1, 1), padding, dilation, groups, op=Op.CONV2D_GRAD_INPUT)
    kernel, _ = built(asked)
    out = torch.full(x.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    kernel(grad, w, torch.tensor([0.5]), out)
    torch.testing.assert_close(out, 0.5 * wanted.float())


def test_batches_whose_elements_do_not_fit_31_bits_are_split():
    per_launch = conv2d_launch._images_per_launch
    assert per_launch(2**20, Family.TMA, 2**14, 2**12, 512) == (2**31 - 1) // 2**12
    assert per_launch(2**20, Family.MMA, 2**14, 2**12, 512) == (2**31 - 1) // 2**21
    assert per_launch(8, Family.MMA, 2**14, 2**12, 512) == 8


def test_parts_of_a_split_batch_start_where_the_previous_ended(monkeypatch):
    monkeypatch.setattr(conv2d_launch, "INT32_MAX", 2 * 36)
    libraries = check_output(integers(5, 16, 6, 6), integers(16, 16, 3, 3, seed=1), padding=(1, 1))
    (convolution,) = libraries.values()
    assert [call.images for call in convolution.calls] == [2, 2, 1]


def operands():
    return {
        "x": integers(2, 16, 5, 5),
        "x_scale": torch.ones(1),
        "w": integers(16, 16, 3, 3),
        "w_scale": torch.ones(16),
        "bias": torch.ones(16),
        "out": torch.empty(2, 16, 3, 3),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.ones(4)}, "bias must be 16 elements of float32, got 4 of torch.float32"),
        ({"x_scale": torch.ones(2)}, "x_scale must be 1 elements of float32, got 2 of torch.float32"),
        ({"x_scale": torch.ones(1).half()}, "x_scale must be 1 elements of float32, got 1 of torch.float16"),
        ({"w_scale": torch.ones(16).half()}, "w_scale must be 1 or 16 elements of float32, got 16 of torch.float16"),
        ({"w_scale": torch.ones(3)}, "w_scale must be 1 or 16 elements of float32, got 3 of torch.float32"),
        ({"bias": torch.ones(16, device="meta")}, "bias must be on cpu like x, got meta"),
    ],
)
def test_later_calls_are_checked_as_the_first_one_was(change, message):
    kernel, _ = built(request((2, 16, 5, 5), (16, 16, 3, 3)))
    for _ in range(2):
        kernel(*operands().values())
    with pytest.raises(BackendError, match=message):
        kernel(*(operands() | change).values())
    kernel(*(operands() | {"bias": None}).values())


@pytest.mark.parametrize("name", ["bias", "w_scale"])
def test_a_vector_that_is_too_short_is_not_padded_into_a_right_one(name):
    kernel, _ = built(request((2, 16, 5, 5), (12, 16, 3, 3)))
    given = operands() | {"w": integers(12, 16, 3, 3), "w_scale": torch.ones(12), "bias": torch.ones(12)}
    given |= {"out": torch.empty(2, 12, 3, 3), name: torch.ones(5)}
    with pytest.raises(BackendError, match=rf"{name} must be (1 or )?12 elements, got 5"):
        kernel(*given.values())


def test_a_launch_follows_the_strides_of_each_call():
    library = Interpreter(conv_source(ConvConfig(), SM_90A, "float32"))
    launch = conv2d_launch.ConvLaunch("conv2d.output", library, ConvConfig(), Geometry(), "float32")
    w, scale = integers(16, 16, 3, 3, seed=1).contiguous(memory_format=torch.channels_last), torch.ones(1)
    wide = integers(2, 48, 5, 5).contiguous(memory_format=torch.channels_last)
    for x in (wide[:, :16].contiguous(memory_format=torch.channels_last), wide[:, 16:32]):
        out = torch.empty(2, 16, 3, 3).contiguous(memory_format=torch.channels_last)
        launch(x, scale, w, None, None, out)
        torch.testing.assert_close(out, expected(x, w, ((1, 1), (0, 0), (1, 1), 1), scale, scale, None).float())
    assert [call.lda for call in library.calls] == [16, 48]


def test_the_gradients_kernel_allocates_no_scale(monkeypatch):
    """What is made on one stream, or while a graph is captured, may not be read on another."""
    grad, w, out = integers(1, 16, 5, 5), integers(16, 16, 3, 3), torch.empty(1, 16, 7, 7)
    kernel, libraries = built(request(grad.shape, w.shape, op=Op.CONV2D_GRAD_INPUT))

    def refused(*arguments, **options):
        raise AssertionError("a scale was made")

    monkeypatch.setattr(torch, "ones", refused)
    scale = torch.tensor([0.5])
    kernel(grad, w, scale, out)
    (call,) = [call for name, library in libraries.items() if "tma" in name for call in library.calls]
    assert (call.a_scale, call.b_scale, call.b_scale_count) == (scale.data_ptr(), None, 1)


def test_run_time_knobs_reach_the_kernel():
    x, w = integers(1, 16, 4, 4), integers(16, 16, 2, 2)
    kernel, libraries = built(request(x.shape, w.shape), ConvConfig.parse("path=tma;tile=128x128x64;raster=m;swizzle=4"))
    scale = torch.ones(1)
    kernel(x, scale, w, scale, None, torch.empty(1, 16, 3, 3))
    (call,) = libraries["conv2d_tma_128x128x64_1x1_0_coop_f32"].calls
    assert (call.raster, call.swizzle, call.struct_bytes) == (RASTER["m"], 4, 8 * len(Arguments._fields_))


def test_half_precision_outputs_have_a_kernel_of_their_own():
    x, w = integers(1, 16, 4, 4), integers(8, 16, 2, 2)
    kernel, libraries = built(request(x.shape, w.shape, variant=FLOAT16), MMA)
    scale, out = torch.tensor([1 / 128]), torch.empty(1, 8, 3, 3, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    kernel(x, scale, w, scale, None, out)
    assert list(libraries) == ["conv2d_mma_64x64x64_32x32x64_3_optimized_f16"]
    wanted = expected(x, w, ((1, 1), (0, 0), (1, 1), 1), scale, scale, None)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda x: x.float()}, "x must be int8, got torch.float32"),
        ({"x": lambda x: x[:, :, :3]}, r"out must be of shape \(2, 16, 1, 3\), got \(2, 16, 3, 3\)"),
        ({"x": lambda x: x[0]}, "x, w and out must have 4 dimensions, got 3, 4 and 4"),
        ({"w": lambda w: w[:, :0]}, "w must be of 16 input channels a group, got 0"),
        ({"w_scale": lambda s: torch.ones(3)}, r"w_scale must be 1 or 16 elements of float32, got 3 of torch.float32"),
        ({"w_scale": lambda s: s.double()}, r"w_scale must be 1 or 16 elements of float32, got 1 of torch.float64"),
        ({"x_scale": lambda s: torch.ones(2)}, r"x_scale must be 1 elements of float32, got 2 of torch.float32"),
        ({"bias": lambda b: torch.ones(4)}, r"bias must be 16 elements of float32, got 4 of torch.float32"),
        ({"out": lambda out: out.half()}, "out must be float32, got torch.float16"),
    ],
)
def test_bad_operands_are_named(change, message):
    kernel, _ = built(request((2, 16, 5, 5), (16, 16, 3, 3)))
    given = {
        "x": integers(2, 16, 5, 5),
        "x_scale": torch.ones(1),
        "w": integers(16, 16, 3, 3),
        "w_scale": torch.ones(1),
        "bias": None,
        "out": torch.empty(2, 16, 3, 3),
    }
    given |= {name: alter(given[name]) for name, alter in change.items()}
    with pytest.raises(BackendError, match=message):
        kernel(*given.values())


def test_a_products_configuration_is_for_1x1_convolutions():
    with pytest.raises(BackendError, match="is not a matrix product"):
        built(request((1, 16, 5, 5), (16, 16, 3, 3)), GemmConfig())


@pytest.mark.parametrize(
    ("arch", "tag"), [(SM_80, "cutlass::arch::Sm80"), (attrs.evolve(SM_80, name="sm_75"), "cutlass::arch::Sm75")]
)
def test_the_2x_path_takes_the_instructions_of_its_chip(arch, tag):
    assert tag in conv_source(MMA, arch, "bfloat16").text


def test_configurations_without_tensor_cores_are_refused():
    with pytest.raises(BackendError, match="there is no convolution without tensor cores"):
        conv_source(ConvConfig(Family.SIMT), SM_80, "float32")
    with pytest.raises(BackendError, match="write float32, float16, bfloat16, not int8"):
        conv_source(ConvConfig(), SM_90A, "int8")

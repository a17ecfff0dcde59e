"""The quantization kernels, run by Triton's interpreter on the CPU, against the numpy reference, bit for bit."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import importlib.util  # noqa: E402
from pathlib import Path  # noqa: E402

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hypothesis_profiles import tries  # noqa: E402
from nightly import each_once, in_pairs  # noqa: E402
from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.precision import Granularity, Rounding  # noqa: E402
from qsync_kernels_triton.config import QuantizeConfig  # noqa: E402
from qsync_kernels_triton.quantize import single as quantize_module  # noqa: E402
from qsync_kernels_triton.quantize.single import build_quantize, scale_count  # noqa: E402

_spec = importlib.util.spec_from_file_location("triton_reference", Path(__file__).with_name("reference.py"))
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

SMALL = QuantizeConfig(block=64, warps=1, programs=6, keep=512)
"""Small, so that small tensors already take several programs, several partial maxima a row and a ragged last chunk."""
FORMATS = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


WAYS = ["one read", "two passes"]
OF_ZEROS = {Granularity.PER_TENSOR: 1.0, Granularity.PER_CHANNEL: 2.0**-11, Granularity.PER_ROW: 2.0**-126}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways to quantize, whatever the size."""
    if request.param == "two passes":
        monkeypatch.setattr(quantize_module, "ONE_READ", 0)
    return request.param


def run(x, granularity, rounding, seed=11, offset=0, config=SMALL, form="int8", stream=None, **extras):
    q = torch.empty_like(x, dtype=FORMATS[form])
    q.view(torch.int8).fill_(99)
    scale = torch.full((scale_count(tuple(x.shape), granularity),), float("nan"))
    build_quantize(granularity, rounding, config)(x, q, scale, stream, seed, offset, **extras)
    return q, scale


def rows_of(x, granularity):
    return x.reshape(scale_count(tuple(x.shape), granularity), -1).float().numpy()


def tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_is_reference(x, granularity, rounding, form="int8", seed=5, offset=(1 << 40) + 1000):
    stream = torch.tensor([77])
    q, scale = run(x, granularity, rounding, seed=seed, offset=offset, form=form, stream=stream)
    of_zeros = OF_ZEROS[granularity]
    expected, expected_scale = reference.quantize(
        rows_of(x, granularity), str(rounding), form, seed, streams(x, granularity, offset), of_zeros=of_zeros
    )
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(q.float().numpy().reshape(expected.shape), expected)
    assert stream.item() == reference.signed(reference.stream_of(offset, reference.checksums(x, 1)[0]))


def streams(x, granularity, offset):
    """Of each row: that of its own checksum."""
    return [reference.stream_of(offset, checksum) for checksum in reference.checksums(x, scale_count(tuple(x.shape), granularity))]


SHAPES = [(7, 30), (1, 1), (3, 5, 67), (4, 3, 3, 3), (2, 256), (3, 72), (1, 401)]


@in_pairs({"way": WAYS, "shape": SHAPES, "granularity": list(Granularity), "rounding": list(Rounding)}, ["way"])
def test_equals_the_reference_bit_for_bit(shape, granularity, rounding, way):
    assert_is_reference(tensor(*shape), granularity, rounding)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_sources_equal_the_reference(dtype, rounding, way):
    assert_is_reference(tensor(5, 80, dtype=dtype), Granularity.PER_TENSOR, rounding)
    assert_is_reference(tensor(5, 81, dtype=dtype), Granularity.PER_ROW, rounding)


@in_pairs({"way": WAYS, "form": list(FORMATS), "rounding": list(Rounding)}, ["way"])
def test_every_magnitude_equals_the_reference(form, rounding, way):
    """From the smallest number of float32 to the largest; a group too small for its own scale takes the smallest scale."""
    sizes = torch.tensor([2.0**-149, 1e-40, 2.0**-126, 1e-36, 2e-36, 9e-35, 1.0, 1.3e36, 1.4e36, torch.finfo(torch.float32).max])
    x = sizes[:, None] * torch.linspace(-1, 1, 41)
    assert_is_reference(x, Granularity.PER_ROW, rounding, form)
    assert_is_reference(x[1:2].contiguous(), Granularity.PER_TENSOR, rounding, form)
    q, scale = run(x, Granularity.PER_ROW, rounding, form=form)
    moved = (q.double() * scale.double()[:, None] - x.double()).abs().amax(1)
    steps = {"int8": 127, "float8_e4m3fn": 8, "float8_e5m2": 4}  # of the widest of them, to the largest value
    assert (moved <= (sizes.double() / steps[form]).clamp(min=2.0**-126) * (1 + 1e-6)).all()


@in_pairs({"way": WAYS, "form": ["float8_e4m3fn", "float8_e5m2"], "rounding": list(Rounding)}, ["way"])
def test_float8_equals_the_reference(form, rounding, way):
    x = tensor(6, 104) * torch.logspace(-6, 0, 104)
    assert_is_reference(x, Granularity.PER_TENSOR, rounding, form)
    assert_is_reference(x, Granularity.PER_ROW, rounding, form)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_rounded_to_nearest_is_the_cast_of_torch(form):
    x = tensor(1, 500) * torch.logspace(-9, 0, 500)
    q, scale = run(x, Granularity.PER_TENSOR, Rounding.NEAREST, form=form)
    assert torch.equal(q.float(), (x / scale).to(FORMATS[form]).float())


@tries(40)
@given(
    rows=st.integers(1, 6),
    length=st.integers(1, 150),
    granularity=st.sampled_from(list(Granularity)),
    rounding=st.sampled_from(list(Rounding)),
    form=st.sampled_from(list(FORMATS)),
    kind=st.sampled_from(["random", "zeros", "equal", "one outlier", "powers", "subnormal"]),
    one_read=st.sampled_from([0, quantize_module.ONE_READ]),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_random_sweep_equals_the_reference(rows, length, granularity, rounding, form, kind, one_read, seed):
    x = tensor(rows, length, seed=seed % 1000)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "equal":
        x = torch.full_like(x, -0.7)
    elif kind == "one outlier":
        x[rows // 2, length // 2] = 1e30
    elif kind == "powers":
        x = torch.sign(x) * 2.0 ** torch.floor(x * 8)
    elif kind == "subnormal":
        x = x * 2.0**-110
    before, quantize_module.ONE_READ = quantize_module.ONE_READ, one_read
    try:
        assert_is_reference(x, granularity, rounding, form, seed=seed, offset=seed // 3)
    finally:
        quantize_module.ONE_READ = before


def test_the_reference_generator_gives_the_published_answer():
    """Known answer of Random123 (kat_vectors, philox4x32 10) for key and counter zero."""
    words = [int(word[0]) for word in reference.philox(0, [0], 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_launch_configuration_does_not_change_the_result(monkeypatch):
    x = tensor(5, 304)
    configs = [
        QuantizeConfig(block, 4, programs, keep) for block, programs, keep in ((64, 1, 0), (128, 7, 1 << 20), (1024, 500, 300))
    ]
    for granularity in Granularity:
        results = []
        for one_read in (0, quantize_module.ONE_READ):
            monkeypatch.setattr(quantize_module, "ONE_READ", one_read)
            results.extend(run(x, granularity, Rounding.STOCHASTIC, config=config) for config in configs)
        for q, scale in results[1:]:
            assert torch.equal(q, results[0][0])
            assert torch.equal(scale, results[0][1])


@pytest.mark.parametrize("other", [{"seed": 4}, {"seed": 3 + (1 << 40)}, {"offset": 8}, {"offset": 7 + (1 << 40)}])
def test_every_bit_of_seed_and_offset_names_another_stream(other):
    x = tensor(1, 256)
    q, _ = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, seed=3, offset=7)
    again, _ = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, seed=3, offset=7)
    different, _ = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, **({"seed": 3, "offset": 7} | other))
    assert torch.equal(q, again)
    # Two independent roundings of one value differ with probability 2f(1-f), a third in the mean.
    assert 50 < (q != different).sum() < 120


def test_a_channels_last_tensor_is_rounded_in_memory_order(way):
    x = tensor(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    flat = x.permute(0, 2, 3, 1).contiguous()
    for granularity in (Granularity.PER_TENSOR, Granularity.PER_CHANNEL):
        q, scale = run(x, granularity, Rounding.STOCHASTIC, seed=1, offset=2)
        expected, expected_scale = run(flat, granularity, Rounding.STOCHASTIC, seed=1, offset=2)
        assert torch.equal(q.permute(0, 2, 3, 1), expected)
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("form", list(FORMATS))
def test_stochastic_rounding_is_unbiased_with_the_variance_of_the_residual(form):
    """Mean x and variance s²·f·(1−f), over 4096 draws of 9 values, within five standard errors.

    See docs/design/indicator.md#element-variance.
    """
    draws = 4096
    largest = reference.LARGEST[form]
    values = torch.tensor([largest, 0.0, 0.25, 0.5, 1.75, -0.3, -3.3, 57.125, -0.03125])
    q, scale = run(
        values.repeat(draws).reshape(draws, 9),
        Granularity.PER_TENSOR,
        Rounding.STOCHASTIC,
        config=QuantizeConfig(4096, 4),
        form=form,
    )
    assert scale.item() == 1.0
    spacing = torch.ones(9)
    if form != "int8":
        exponent = torch.clamp(torch.frexp(values)[1] - 1, min=reference.MIN_EXPONENT[form])
        spacing = 2.0 ** (exponent - reference.MANTISSA[form])
    residual = values / spacing - torch.floor(values / spacing)
    variance = spacing**2 * residual * (1 - residual)
    mean, var = q.double().mean(0), q.double().var(0, unbiased=False)
    assert torch.all((mean - values).abs() <= 5 * (variance / draws).sqrt() + spacing * 2.0**-17)
    assert torch.all((var - variance).abs() <= 5 * 0.25 * spacing**2 / draws**0.5)


def test_the_thresholds_of_a_stream_average_to_one_half_at_every_place_in_a_call():
    u = reference.thresholds(3, np.arange(8 * 20000), 1).astype(np.float64).reshape(-1, 8)
    assert np.all(np.abs(u.mean(axis=0) - 0.5) < 5 / np.sqrt(12 * 20000))
    correlation = np.corrcoef(u, rowvar=False) - np.eye(8)
    assert np.abs(correlation).max() < 5 / np.sqrt(20000)


def test_nearest_rounds_ties_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    q, _ = run(x, Granularity.PER_TENSOR, Rounding.NEAREST)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_zeros_quantize_to_zeros_under_a_scale_of_their_own(way):
    for granularity in Granularity:
        q, scale = run(torch.zeros(3, 4), granularity, Rounding.STOCHASTIC)
        assert not q.any()
        assert torch.equal(scale, torch.full_like(scale, OF_ZEROS[granularity]))


def test_rows_and_columns_of_zeros_have_the_smallest_scale():
    x = tensor(5, 7)
    x[2], x[:, 3] = 0, 0
    q, transposed, scale = torch.empty(5, 7, dtype=torch.int8), torch.empty(7, 5, dtype=torch.int8), torch.empty(12)
    build_quantize(Granularity.PER_ROW, Rounding.STOCHASTIC, SMALL)(x, q, scale, None, 5, 0, None, transposed, torch.ones(5))
    assert (scale == 2.0**-126).nonzero().flatten().tolist() == [2, 5 + 3]
    assert not q[2].any()
    assert not transposed[3].any()


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@in_pairs({"way": WAYS, "bad": NOT_FINITE, "rounding": list(Rounding), "form": list(FORMATS)}, ["way"])
def test_a_value_that_is_not_finite_makes_the_scale_infinite_instead_of_vanishing(bad, rounding, form, way):
    x = tensor(2, 70)
    x[1, 3] = bad
    _, scale = run(x, Granularity.PER_TENSOR, rounding, form=form)
    assert torch.isinf(scale).all()
    _, scales = run(x, Granularity.PER_ROW, rounding, form=form)
    assert torch.isinf(scales).tolist() == [False, True]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_an_offset_in_a_tensor_is_read_when_the_kernel_runs(granularity, way):
    """The same launch takes other random numbers when the tensor holds another number: what a replayed graph does."""
    x, offset = tensor(6, 72), torch.tensor([(1 << 62) + 12345])
    scale, q, transposed = (
        torch.empty(scale_count(tuple(x.shape), granularity)),
        *(torch.empty(s, dtype=torch.int8) for s in ((6, 72), (72, 6))),
    )
    kernel = build_quantize(granularity, Rounding.STOCHASTIC, SMALL)
    found = []
    for value in ((1 << 62) + 12345, (1 << 32) * 7, 0):
        offset.fill_(value)
        kernel(x, q, scale, None, 9, offset)
        assert torch.equal(q, run(x, granularity, Rounding.STOCHASTIC, seed=9, offset=value)[0])
        if granularity is not Granularity.PER_ROW:  # whose transposed copy is another
            kernel(x, q, scale, None, 9, offset, None, transposed)
        else:
            transposed = q.t()
        assert torch.equal(transposed, run(x, granularity, Rounding.STOCHASTIC, seed=9, offset=value)[0].t())
        found.append(q.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("offset", [torch.tensor([1.0]), torch.tensor([1, 2]), torch.empty(1, dtype=torch.int64, device="meta")])
def test_an_offset_that_kernels_cannot_read_is_refused(offset):
    with pytest.raises(BackendError, match="offset must be a number or one int64 on cpu, got torch"):
        run(tensor(3, 5), Granularity.PER_TENSOR, Rounding.STOCHASTIC, offset=offset)


def test_equal_scales_and_other_bits_round_otherwise(way):
    """Whatever clips gives the same largest magnitude over and over."""
    x = tensor(4, 90).clamp(-1, 1)
    other = torch.where(torch.arange(360).view(4, 90) == 7, x + 2.0**-20, x)
    for granularity in Granularity:
        (q, scale), (moved, scale_of_other) = (run(y, granularity, Rounding.STOCHASTIC) for y in (x, other))
        assert torch.equal(scale, scale_of_other)
        drawn = (q != moved).sum(1) > 10
        assert drawn.tolist() == ([True] * 4 if granularity is Granularity.PER_TENSOR else [True, False, False, False])


@each_once({"granularity": list(Granularity), "channels": [3, 8, 40]})
def test_a_multiplier_is_applied_first_in_float32(channels, granularity, way):
    multiplier = torch.rand(channels, generator=torch.Generator().manual_seed(1)) + 0.5
    matrix = tensor(30, channels, dtype=torch.bfloat16)
    products = rows_of(matrix.float() * multiplier, granularity)
    expected, scales = reference.quantize(products, "stochastic", seed=11, streams=streams(matrix, granularity, 0))
    q, found = run(matrix, granularity, Rounding.STOCHASTIC, multiplier=multiplier)
    assert np.array_equal(q.float().numpy().reshape(expected.shape), expected)
    assert np.array_equal(found.numpy(), scales)


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_multiplier_of_an_image_is_one_for_each_entry_of_dimension_one(channels, layout, way):
    multiplier = torch.rand(channels, generator=torch.Generator().manual_seed(1)) + 0.5
    image = tensor(2, channels, 5, 7).contiguous(memory_format=layout)
    in_memory = (0, 1, 2, 3) if layout is torch.contiguous_format else (0, 2, 3, 1)
    products = (image * multiplier.view(1, -1, 1, 1)).permute(in_memory)
    expected, scales = reference.quantize(
        products.reshape(1, -1).numpy(), "stochastic", seed=11, streams=streams(image, Granularity.PER_TENSOR, 0)
    )
    q, found = run(image, Granularity.PER_TENSOR, Rounding.STOCHASTIC, multiplier=multiplier)
    assert np.array_equal(q.permute(in_memory).float().numpy().reshape(1, -1), expected)
    assert np.array_equal(found.numpy(), scales)


@pytest.mark.parametrize("shape", [(70, 130), (64, 128), (1, 9), (3, 1)])
@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL])
def test_the_transposed_result_is_the_transpose_of_the_same_integers(shape, granularity):
    x = tensor(*shape)
    transposed = torch.zeros(shape[::-1], dtype=torch.int8)
    q, scale = run(x, granularity, Rounding.STOCHASTIC, transposed_out=transposed)
    expected, expected_scale = run(x, granularity, Rounding.STOCHASTIC)
    assert torch.equal(q, expected)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(transposed, q.t())


@tries(25)
@given(
    values=st.lists(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32), min_size=1, max_size=150),
    rounding=st.sampled_from(list(Rounding)),
)
def test_a_dequantized_value_is_at_most_one_step_away(values, rounding):
    x = torch.tensor([values], dtype=torch.float32)
    q, scale = run(x, Granularity.PER_TENSOR, rounding)
    step = scale.double().item()
    error = (q.double() * step - x.double()).abs().max().item()
    assert error <= step * (0.5 if rounding is Rounding.NEAREST else 1.0) * (1 + 1e-4)


def test_the_stride_of_a_single_row_is_of_no_account():
    """As a batch of one has, of which the first position of each sequence is taken: contiguous for PyTorch, whatever the stride."""
    x, transposed = tensor(1, 3, 40)[:, 0], torch.empty(40, 1, dtype=torch.int8)
    q = torch.empty(1, 40, dtype=torch.int8)
    assert x.stride() != q.stride()
    scale = torch.empty(1)
    kernel = build_quantize(Granularity.PER_TENSOR, Rounding.NEAREST, SMALL)
    kernel(x, q, scale, None, 11, 0, None, transposed)
    expected, expected_scale = run(x.clone(), Granularity.PER_TENSOR, Rounding.NEAREST)
    assert torch.equal(q, expected)
    assert torch.equal(transposed, expected.t())
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("offset", [(1 << 40) + 3, -5, torch.tensor([-(1 << 63)])])
def test_an_empty_tensor_has_scale_one_and_the_stream_of_its_offset(offset):
    stream = torch.tensor([77])
    q, scale = run(torch.zeros(0, 5), Granularity.PER_TENSOR, Rounding.NEAREST, offset=offset, stream=stream)
    assert stream.item() == int(offset)
    assert q.shape == (0, 5)
    assert scale.tolist() == [1.0]


def test_operands_of_another_type_or_size_are_refused_by_name():
    kernel = build_quantize(Granularity.PER_ROW, Rounding.NEAREST, SMALL)
    with pytest.raises(BackendError, match=r"q_out must be int8, .*of shape \(2, 3\).*scale_out must be 2 contiguous"):
        kernel(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1), None, 0, 0)
    with pytest.raises(BackendError, match=r"x must be float32, float16 or bfloat16, got torch.float64"):
        kernel(torch.zeros(2, 3).double(), torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2), None, 0, 0)
    with pytest.raises(BackendError, match=r"x must be dense, one row after another, got shape \(2, 3\) with strides \(1, 2\)"):
        kernel(torch.zeros(3, 2).t(), torch.zeros(3, 2, dtype=torch.int8).t(), torch.zeros(2), None, 0, 0)


def test_multipliers_and_transposes_of_another_shape_are_refused_by_name():
    kernel = build_quantize(Granularity.PER_TENSOR, Rounding.NEAREST, SMALL)
    matrix = (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int8), torch.zeros(1), None, 0, 0)
    with pytest.raises(BackendError, match=r"multiplier must be 3 contiguous float32, one for each channel of x, got .*\(2,\)"):
        kernel(*matrix, multiplier=torch.ones(2))
    with pytest.raises(BackendError, match=r"transposed_out must be torch.int8 of shape \(3, 2\), contiguous, got .*\(2, 3\)"):
        kernel(*matrix, transposed_out=torch.zeros(2, 3, dtype=torch.int8))
    alone = "a row_multiplier goes with a scale for each row and a transposed_out, whose columns then have scales of their own"
    with pytest.raises(BackendError, match=alone):
        kernel(*matrix, transposed_out=torch.zeros(3, 2, dtype=torch.int8), row_multiplier=torch.ones(2))
    by_row, of_rows = build_quantize(Granularity.PER_ROW, Rounding.NEAREST, SMALL), matrix[:2]
    with pytest.raises(BackendError, match=alone):
        by_row(*of_rows, torch.zeros(2), None, 0, 0, row_multiplier=torch.ones(2))
    both = (*of_rows, torch.zeros(5), None, 0, 0, None, torch.zeros(3, 2, dtype=torch.int8))
    for wrong in (torch.ones(3), torch.ones(2).double(), torch.ones(2, 1), torch.ones(4)[::2]):
        with pytest.raises(BackendError, match=r"row_multiplier must be 2 contiguous float32, one for each row of x, got torch"):
            by_row(*both, row_multiplier=wrong)
    with pytest.raises(BackendError, match=r"maxima are of a whole tensor, and here is a scale per row"):
        by_row(*both, maxima=torch.ones(2, 4))
    for wrong in (torch.ones(4), torch.ones(2, 0), torch.ones(2, 4).double()):
        with pytest.raises(BackendError, match=r"maxima must be float32 of shape \(2, P\), P at least 1, got torch.float"):
            kernel(*matrix, maxima=wrong)
    with pytest.raises(BackendError, match=r"maxima must be contiguous, and have strides \(1, 2\)"):
        kernel(*matrix, maxima=torch.ones(4, 2).t())
    cube = (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int8), torch.zeros(1), None, 0, 0)
    with pytest.raises(BackendError, match=r"a multiplier goes with a 2-d or 4-d tensor, and x has shape \(2, 3, 4\)"):
        kernel(*cube, multiplier=torch.ones(4))
    with pytest.raises(BackendError, match=r"a transposed result needs a contiguous matrix, got shape \(2, 3, 4\)"):
        kernel(*cube, transposed_out=torch.zeros(4, 3, 2, dtype=torch.int8))


@pytest.mark.parametrize("granularity", list(Granularity))
def test_a_single_number_is_its_own_scale(granularity):
    q, scale = run(torch.tensor(-3.0), granularity, Rounding.STOCHASTIC)
    assert (q.item(), scale.item()) == (-127, torch.tensor(3.0).div(127).item())


@each_once(
    {
        "shape": [(7, 30), (1, 1), (64, 128), (128, 32), (130, 72), (3, 401)],
        "rounding": list(Rounding),
        "form": ["int8", "float8_e4m3fn"],
        "dtype": [torch.float32, torch.bfloat16],
        "multiplied": [(), ("columns",), ("rows",), ("columns", "rows")],
    }
)
def test_rows_and_columns_equal_the_reference_bit_for_bit(shape, dtype, form, rounding, multiplied):
    """The transposed copy has a scale for each column; all draw from the stream of the whole, both copies of an element alike.

    Factors of columns count for both copies, those of rows for the transposed one alone.
    """
    x = tensor(*shape, dtype=dtype)
    multiplier = torch.linspace(0.5, 2.0, shape[1]) if "columns" in multiplied else None
    row_multiplier = torch.logspace(1, -4, shape[0]) if "rows" in multiplied else None
    q, transposed = torch.empty(shape, dtype=FORMATS[form]), torch.empty(shape[::-1], dtype=FORMATS[form])
    scale, stream, offset = torch.empty(sum(shape)), torch.zeros(1, dtype=torch.int64), (1 << 40) + 7
    build_quantize(Granularity.PER_ROW, rounding, SMALL)(x, q, scale, stream, 5, offset, multiplier, transposed, row_multiplier)
    values = (x.float() if multiplier is None else x.float() * multiplier).numpy()
    of_columns = values if row_multiplier is None else values * row_multiplier.numpy()[:, None]
    word = reference.stream_of(offset, reference.checksums(x, 1)[0])
    position = np.arange(x.numel(), dtype=np.uint64).reshape(shape)
    assert stream.item() == reference.signed(word)
    for found, its_scales, groups, drawn in (
        (q, scale[: shape[0]], values, position),
        (transposed, scale[shape[0] :], of_columns.T, position.T),
    ):
        expected, expected_scale = reference.quantize(groups, str(rounding), form, 5, (word,), drawn)
        assert np.array_equal(its_scales.numpy(), expected_scale)
        assert np.array_equal(found.float().numpy(), expected)


@each_once(
    {
        "shape": [(7, 30), (1, 1), (64, 128), (3, 401)],
        "rounding": list(Rounding),
        "dtype": [torch.float32, torch.bfloat16],
        "multiplied": [False, True],
        "transposes": [False, True],
        "partials": [1, 5, 2048],
    }
)
def test_a_tensor_whose_maxima_are_known_is_rounded_alike(way, shape, dtype, rounding, multiplied, transposes, partials):
    """In one read; maxima that say more than the tensor has count, which shows that it is not read for them."""
    x = tensor(*shape, dtype=dtype)
    values = x.float() * torch.linspace(0.5, 2.0, shape[1]) if multiplied else x.float()
    more = {"multiplier": torch.linspace(0.5, 2.0, shape[1])} if multiplied else {}
    found = []
    for known in (None, 1.0, 2.0):
        transposed, stream = torch.empty(shape[::-1], dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
        given = more | ({"transposed_out": transposed} if transposes else {})
        if known is not None:
            maxima = torch.zeros(2, partials)
            maxima[0, -1] = known * values.abs().max()
            bits = x.view(torch.int32 if dtype is torch.float32 else torch.int16).flatten().int()
            for place, part in enumerate(bits.tensor_split(partials)):
                maxima[1].view(torch.int32)[place] = part.sum(dtype=torch.int32)
            given["maxima"] = maxima
        q, scale = run(x, Granularity.PER_TENSOR, rounding, offset=(1 << 40) + 7, stream=stream, **given)
        found.append((q, scale, stream, q.t().contiguous() if not transposes else transposed))
    assert all(map(torch.equal, found[0], found[1]))
    if way == "two passes" or transposes:
        assert found[2][1] == 2 * found[0][1]


def test_a_weight_gradient_reads_the_activation_as_its_rows_are_scaled():
    """In float64: s'[n] * sum of t[n, m] * x_q[m, k] is that of the gradient and s[m] * x_q[m, k], but for the rounding of t."""
    grad, factors, scales = tensor(70, 40), torch.rand(40) + 0.5, torch.logspace(-3, 0, 70)
    kept = torch.randint(-127, 128, (70, 24)).double()
    q, transposed, scale = torch.empty(70, 40, dtype=torch.int8), torch.empty(40, 70, dtype=torch.int8), torch.empty(110)
    build_quantize(Granularity.PER_ROW, Rounding.NEAREST, SMALL)(grad, q, scale, None, 5, 0, factors, transposed, scales)
    found = (scale[70:, None].double() * transposed.double()) @ kept
    expected = (grad.double() * factors.double()).t() @ (scales.double()[:, None] * kept)
    assert ((found - expected).abs() <= 0.501 * scale[70:, None].double() * kept.abs().sum(0)).all()
    assert (expected.abs() > 10 * 0.501 * scale[70:, None].double() * kept.square().sum(0).sqrt()).double().mean() > 0.1


@pytest.mark.parametrize("row_multiplier", [None, torch.full((5,), -2.0)])
def test_rows_and_columns_of_what_is_not_finite_have_infinite_scales(row_multiplier):
    x = tensor(5, 20)
    x[1, 3], x[4, 7] = float("nan"), float("-inf")
    q, transposed, scale = torch.empty(5, 20, dtype=torch.int8), torch.empty(20, 5, dtype=torch.int8), torch.empty(25)
    build_quantize(Granularity.PER_ROW, Rounding.NEAREST, SMALL)(x, q, scale, None, 5, 0, None, transposed, row_multiplier)
    assert scale.isinf().nonzero().flatten().tolist() == [1, 4, 5 + 3, 5 + 7]

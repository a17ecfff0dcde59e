"""What the backend offers and refuses, as data, on machines with and without a compiler; building is the front-ends' matter."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_requests import FLOAT8, INT8, INT8_THROUGHOUT, conv2d, linear

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelBackend, KernelConfig, KernelRequest, Op
from qsync_core.plugins.registry import Registry
from qsync_core.progress import silent
from qsync_kernels_cutlass import architectures, plugin, support
from qsync_kernels_cutlass.backend import CutlassBackend, parse_config
from qsync_kernels_cutlass.compiling import ahead, toolchain
from qsync_kernels_cutlass.compiling.cache import KernelCache
from qsync_kernels_cutlass.compiling.compile import compile_files
from qsync_kernels_cutlass.configs import candidates
from qsync_kernels_cutlass.configs.config import ConvConfig, GemmConfig
from qsync_kernels_cutlass.configs.problem import problem_of
from qsync_kernels_cutlass.sources import KernelSource, request_sources

BACKEND = CutlassBackend()
FLOAT16 = Variant.of(Precision.FLOAT16)
WIDENED = attrs.evolve(INT8, grad_weight=Precision.FLOAT16)


def variant(**changes):
    return attrs.evolve(INT8, **changes)


ACCEPTED = [
    linear(),
    linear(capability="7.0"),
    linear(capability="7.5"),
    linear(capability="8.6"),
    linear(capability="8.9", variant=FLOAT8),
    linear(variant=variant(x_granularity=Granularity.PER_ROW)),
    linear(m=0),
    linear(m=1, k=1, n=1),
    linear(m=2**31 - 1),
    linear(m=2**31, capability="7.0"),
    conv2d(x=(2**20, 64, 56, 56)),
    linear(Op.LINEAR_GRAD_INPUT),
    linear(Op.LINEAR_GRAD_WEIGHT),
    linear(Op.LINEAR_GRAD_INPUT, variant=INT8_THROUGHOUT),
    linear(Op.LINEAR_GRAD_WEIGHT, variant=INT8_THROUGHOUT),
    linear(Op.LINEAR_GRAD_INPUT, variant=FLOAT16),
    linear(Op.LINEAR_GRAD_WEIGHT, variant=variant(grad_weight=Precision.FLOAT16), capability="7.0"),
    conv2d(),
    conv2d(capability="7.5"),
    conv2d(x=(8, 3, 224, 224), w=(64, 3, 7, 7), stride="2,2", padding="3,3"),
    conv2d(x=(8, 64, 56, 56), w=(64, 16, 3, 3), groups="4", dilation="2,1"),
    conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56), variant=INT8_THROUGHOUT),
    conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56), w=(128, 64, 1, 1), padding="0,0", variant=INT8_THROUGHOUT),
]
REFUSED = [
    (
        KernelRequest(Op.QUANTIZE, INT8, ((8, 8),), device_kind="cuda", compute_capability="9.0"),
        "it offers linear.output, .*, not quantize",
    ),
    (conv2d(Op.CONV2D_GRAD_WEIGHT), "it offers linear.output, .*, not conv2d.grad_weight"),
    (attrs.evolve(linear(), device_kind="cpu"), "runs on CUDA devices, and this request is for cpu"),
    (linear(capability=""), "this device has an unknown compute capability"),
    (linear(capability="6.1"), "compiles for sm_70, sm_75, .*, and this device has compute capability 6.1"),
    (linear(capability="10.0"), "this device has compute capability 10.0"),
    (linear(capability="9.x"), "this device has compute capability 9.x"),
    (conv2d(capability="7.0"), "int8 products need compute capability 7.5, and this device's is 7.0"),
    (linear(variant=FLOAT8, capability="8.6"), "float8 products need compute capability 8.9, and this device's is 8.6"),
    (linear(Op.LINEAR_GRAD_INPUT, capability="7.5"), "bfloat16 products need compute capability 8.0"),
    (linear(variant=FLOAT16), "it runs linear.output in int8, float8_e4m3fn, not in float16; choose one of those as compute"),
    (linear(variant=Variant.of(Precision.FLOAT32)), "it runs linear.output in int8, float8_e4m3fn, not in float32"),
    (linear(variant=variant(symmetric=False)), "quantizes symmetrically only; of QSync's backends aten alone has"),
    (conv2d(variant=FLOAT8), "it runs conv2d.output in int8, not in float8_e4m3fn"),
    (
        conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56)),
        "it runs conv2d.grad_input of int8 operands in int8, not in bfloat16; choose one of those as grad_input",
    ),
    (linear(variant=variant(x_granularity=Granularity.PER_CHANNEL)), "scales per input channel do not factor out of a product"),
    (linear(variant=variant(w_granularity=Granularity.PER_ROW)), "a weight has scales per tensor or per output channel"),
    (conv2d(variant=variant(x_granularity=Granularity.PER_ROW)), "rows of a convolution's patches overlap"),
    (
        linear(Op.LINEAR_GRAD_INPUT, variant=attrs.evolve(FLOAT16, grad_input=Precision.INT8)),
        "a gradient in int8 needs operands saved in int8, and they are saved in float16",
    ),
    (linear(k=133_153), "an int32 sum over 133153 products could overflow; the longest exact one is 133144"),
    (linear(Op.LINEAR_GRAD_WEIGHT, m=200_000, variant=INT8_THROUGHOUT), "an int32 sum over 200000 products"),
    (linear(Op.LINEAR_GRAD_INPUT, n=200_000, variant=INT8_THROUGHOUT), "an int32 sum over 200000 products"),
    (conv2d(w=(128, 32, 3, 3), groups="4"), r"operands of shapes \(32, 64, 56, 56\) and \(128, 32, 3, 3\) do not fit each other"),
    (conv2d(w=(64, 1, 3, 3), groups="64"), "a depthwise convolution does not fill tensor cores"),
    (conv2d(w=(64, 8, 3, 3), groups="8"), "a group of 8 input and 8 output channels does not fill tensor cores"),
    (conv2d(w=(128, 64, 0, 3)), "a filter has taps, not 0x3"),
    (conv2d(x=(32, 64, 2, 56), w=(128, 64, 5, 3)), "filters of 5x3 taps do not fit into a padded image of 2x56 pixels"),
    (conv2d(x=(32, -64, 56, 56), w=(128, -64, 3, 3)), "have sizes below 0"),
    (linear(m=-1), r"operands of shapes \(-1, 768\) and \(3072, 768\) have sizes below 0"),
    (linear(m=2**31), "2147483648 rows are 2\\^31 or more; split the operands"),
    (linear(n=2**31, variant=FLOAT8), "2147483648 columns are 2\\^31 or more"),
    (linear(Op.LINEAR_GRAD_WEIGHT, m=2**31), "2147483648 terms of a sum are 2\\^31 or more"),
    (conv2d(x=(2**19, 64, 64, 64), w=(128, 64, 1, 1), padding="0,0"), "2147483648 rows are 2\\^31 or more"),
    (conv2d(x=(1, 64, 2**16, 2**15)), "2147483648 pixels of an image are 2\\^31 or more"),
    (attrs.evolve(conv2d(), contiguous=False), "it needs dense channels-last operands, and these are not; copy them first"),
    (
        conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56), variant=INT8_THROUGHOUT, stride="2,2"),
        "needs stride 1, got \\[2, 2\\]; keep grad_input in 16 bit",
    ),
    (
        conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56), variant=INT8_THROUGHOUT, padding="3,3"),
        "needs a padding within the filter's reach \\[2, 2\\], got \\[3, 3\\]",
    ),
    (
        attrs.evolve(linear(), shapes=((8, 8),)),
        r"linear.output takes two operands of 2 dimensions each, and these have the shapes \(8, 8\)",
    ),
    (
        attrs.evolve(linear(), shapes=((8, 8, 8), (8, 8))),
        r"takes two operands of 2 dimensions each, and these have the shapes \(8, 8, 8\) and \(8, 8\)",
    ),
    (attrs.evolve(linear(), shapes=((8, 8), (8, 9))), r"operands of shapes \(8, 8\) and \(8, 9\) do not fit each other"),
]


@pytest.mark.parametrize("request_", ACCEPTED)
def test_accepted_requests_have_configurations_that_can_be_read_back(stand_in_nvcc, own_cache, request_):
    stand_in_nvcc("exit 1", archs="sm_70 sm_75 sm_80 sm_86 sm_89 sm_90")
    assert BACKEND.unsupported_reasons(request_) == []
    texts = [config.text for config in BACKEND.candidate_configs(request_)]
    assert len(texts) >= 4
    assert [parse_config(request_, text).text for text in texts] == texts
    assert parse_config(request_, "").text == texts[0]


@pytest.mark.parametrize(("request_", "reason"), REFUSED)
def test_refused_requests_say_why(request_, reason):
    with pytest.raises(BackendError, match=rf"backend cutlass cannot run {request_.op} as .*{reason}"):
        BACKEND.build(request_, KernelConfig())
    assert list(BACKEND.candidate_configs(request_)) == []


@given(
    op=st.sampled_from(Op.ALL),
    variant=st.builds(
        Variant,
        compute=st.sampled_from(Precision),
        output=st.sampled_from([Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT32]),
        saved=st.sampled_from(Precision),
        grad_input=st.sampled_from(Precision),
        grad_weight=st.sampled_from(Precision),
        x_granularity=st.sampled_from(Granularity),
        w_granularity=st.sampled_from(Granularity),
        symmetric=st.booleans(),
    ),
    shapes=st.lists(st.lists(st.integers(0, 300), max_size=5).map(tuple), max_size=3).map(tuple),
    capability=st.sampled_from(["", "6.0", "7.0", "7.5", "8.0", "8.7", "8.9", "9.0", "12.0"]),
    groups=st.sampled_from([1, 2, 3]),
)
def test_any_request_is_answered(op, variant, shapes, capability, groups):
    request = KernelRequest(op, variant, shapes, Geometry(groups=groups), "cuda", capability)
    reasons = support.reasons(request)
    configs = BACKEND.candidate_configs(request)
    assert bool(configs) or reasons or BACKEND.unsupported_reasons(request)
    assert all(isinstance(reason, str) and reason for reason in reasons)


def test_sm_70_is_refused_where_the_compiler_lacks_it(stand_in_nvcc, own_cache):
    half = linear(Op.LINEAR_GRAD_INPUT, variant=variant(grad_input=Precision.FLOAT16), capability="7.0")
    stand_in_nvcc("exit 1", archs="sm_75 sm_80 sm_90")
    (reason,) = BACKEND.unsupported_reasons(half)
    assert "nvcc 13.0 does not compile for sm_70, only for sm_75, sm_80, sm_90, sm_90a" in reason
    assert "no kernel for linear.grad_input as int8 on sm_70 is among those compiled ahead either" in reason
    stand_in_nvcc("exit 1", archs="sm_70 sm_75")
    assert BACKEND.unsupported_reasons(half) == []


def compiled_ahead(request_, config, arch):
    """Put the kernels of one configuration into the cache; a compiler must be there."""
    return compile_files(request_sources(request_, config, arch), progress=silent)


def take_compiler_away(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    ahead.forget()


def test_without_a_compiler_what_was_compiled_ahead_counts(stand_in_nvcc, own_cache, monkeypatch):
    stand_in_nvcc('cat "$source" > "$out"')
    asked = linear(capability="7.5")
    best, second, *_ = dict.fromkeys(config.compiled for config in candidates.ranked(problem_of(asked), architectures.SM_75))
    compiled_ahead(asked, second, architectures.SM_75)
    take_compiler_away(monkeypatch)
    assert BACKEND.unsupported_reasons(asked) == []
    offered = [parse_config(asked, config.text) for config in BACKEND.candidate_configs(asked)]
    assert {config.compiled for config in offered} == {second}
    assert parse_config(asked, "").compiled == second != best
    (reason,) = BACKEND.unsupported_reasons(linear(capability="9.0"))
    assert "needs nvcc" in reason
    assert "no kernel for linear.output as int8 on sm_90a is among those compiled ahead either" in reason
    assert "qsync tune --compile-only --arch sm_90a JOB" in reason
    assert list(BACKEND.candidate_configs(linear(capability="9.0"))) == []


def test_other_kernels_of_the_architecture_are_none_for_the_request(stand_in_nvcc, own_cache, monkeypatch):
    stand_in_nvcc('cat "$source" > "$out"')
    asked = linear(capability="7.5")
    compiled_ahead(asked, parse_config(asked, ""), architectures.SM_75)
    compile_files([KernelSource("gemm", "int x;", "sm_75")], progress=silent)
    take_compiler_away(monkeypatch)
    assert BACKEND.unsupported_reasons(asked) == []
    for other in (
        conv2d(capability="7.5"),
        linear(capability="7.5", variant=attrs.evolve(INT8, output=Precision.FLOAT16)),
        linear(Op.LINEAR_GRAD_WEIGHT, capability="7.5", variant=INT8_THROUGHOUT),
    ):
        (reason,) = BACKEND.unsupported_reasons(other)
        assert f"no kernel for {other.op} as" in reason


@pytest.mark.parametrize(
    ("request_", "needed"),
    [
        (linear(m=5, capability="7.5"), []),
        (linear(m=5, k=770, capability="7.5"), ["convert_s8_s8", "transpose_bytes"]),
        (
            linear(Op.LINEAR_GRAD_INPUT, variant=INT8_THROUGHOUT, capability="7.5"),
            ["transpose_bytes", "gemm_mma_s8_s8_f32_tt_128x256x64_w64x64x64_s2"],  # the activation's format may be float32
        ),
        (
            linear(Op.LINEAR_GRAD_WEIGHT, m=5, variant=WIDENED, capability="7.5"),
            ["convert_s8_f16"],
        ),
        (linear(Op.LINEAR_GRAD_WEIGHT, variant=FLOAT16, capability="7.5"), []),
        (conv2d(capability="7.5"), []),
        (conv2d(x=(8, 3, 224, 224), w=(64, 3, 7, 7), stride="2,2", padding="3,3", capability="7.5"), ["conv2d_fold_pixels"]),
        (conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56), variant=INT8_THROUGHOUT, capability="7.5"), ["conv2d_turn_filters"]),
    ],
)
def test_what_shapes_operands_must_have_been_compiled_ahead_where_it_is_needed(
    stand_in_nvcc, own_cache, monkeypatch, request_, needed
):
    stand_in_nvcc('cat "$source" > "$out"')
    product, *shaping = request_sources(request_, parse_config(request_, ""), architectures.SM_75)
    compile_files([product], progress=silent)
    take_compiler_away(monkeypatch)
    assert len(BACKEND.unsupported_reasons(request_)) == bool(needed)
    monkeypatch.undo()
    monkeypatch.setenv("QSYNC_KERNEL_CACHE", str(own_cache))
    stand_in_nvcc('cat "$source" > "$out"')
    compile_files([source for source in shaping if source.name in needed], progress=silent)
    take_compiler_away(monkeypatch)
    assert BACKEND.unsupported_reasons(request_) == []


def test_kernels_compiled_for_other_sizes_can_be_used(stand_in_nvcc, own_cache, monkeypatch):
    """What stands for a plan's operators before their calls are known has 64 rows; kernels are compiled for the real ones."""
    stand_in_nvcc('cat "$source" > "$out"')
    small, large = linear(m=16, k=1024, n=1000), linear(m=8192, k=8192, n=8192)
    chosen = parse_config(large, "").compiled
    assert chosen not in {config.compiled for config in candidates.ranked(problem_of(small), architectures.SM_90A)}
    compiled_ahead(large, chosen, architectures.SM_90A)
    take_compiler_away(monkeypatch)
    assert BACKEND.unsupported_reasons(small) == []
    assert parse_config(small, "") == chosen


def test_an_entry_that_is_not_whole_is_no_kernel_and_a_new_one_is_seen(stand_in_nvcc, own_cache, monkeypatch, tmp_path):
    stand_in_nvcc('cat "$source" > "$out"')
    asked = linear(capability="7.5")
    product, *_ = compiled_ahead(asked, parse_config(asked, ""), architectures.SM_75)
    whole = product.read_bytes()
    product.write_bytes(b"")
    take_compiler_away(monkeypatch)
    assert len(BACKEND.unsupported_reasons(asked)) == 1
    product.write_bytes(whole)
    elsewhere = product.parent.rename(tmp_path / "elsewhere")  # as a folder that is copied here: the cache's own folder changes
    assert len(BACKEND.unsupported_reasons(asked)) == 1
    elsewhere.rename(product.parent)
    assert BACKEND.unsupported_reasons(asked) == []


def test_listing_the_cache_is_remembered_until_it_changes(stand_in_nvcc, own_cache, monkeypatch):
    stand_in_nvcc('cat "$source" > "$out"')
    asked = linear(capability="7.5")
    compiled_ahead(asked, parse_config(asked, ""), architectures.SM_75)
    take_compiler_away(monkeypatch)
    found = []
    find = KernelCache.find
    monkeypatch.setattr(KernelCache, "find", lambda cache, key: found.append(key) or find(cache, key))
    for rows in range(1, 20):
        assert BACKEND.unsupported_reasons(linear(m=rows, capability="7.5")) == []
    assert len(found) == len(set(found)) <= 3


def test_a_compiler_that_lacks_the_architecture_does_not_hide_what_was_compiled_ahead(stand_in_nvcc, own_cache):
    stand_in_nvcc('cat "$source" > "$out"', archs="sm_70 sm_75")
    asked = linear(capability="7.0")
    sources = request_sources(asked, parse_config(asked, ""), architectures.SM_70)
    paths = compile_files(sources, progress=silent)
    stand_in_nvcc("exit 1", archs="sm_75 sm_80")
    assert BACKEND.unsupported_reasons(asked) == []
    assert compile_files(sources, progress=silent) == paths


def test_a_kernel_that_cannot_be_had_says_that_sizes_are_not_the_reason(stand_in_nvcc, own_cache, monkeypatch):
    pytest.importorskip("torch")
    stand_in_nvcc('cat "$source" > "$out"')
    asked = linear(capability="8.0")
    best, second, *_ = dict.fromkeys(config.compiled for config in candidates.ranked(problem_of(asked), architectures.SM_80))
    compiled_ahead(asked, second, architectures.SM_80)
    take_compiler_away(monkeypatch)
    with pytest.raises(BackendError, match="was not compiled ahead either") as caught:
        BACKEND.build(asked, KernelConfig(best.text))
    assert caught.value.for_any_sizes
    with pytest.raises(BackendError, match="the swizzle is 1, 2, 4 or 8") as caught:
        BACKEND.build(asked, KernelConfig(attrs.evolve(best, swizzle=3).text))
    assert not hasattr(caught.value, "for_any_sizes")


def test_a_cache_that_cannot_be_trusted_is_a_reason(own_cache, monkeypatch):
    take_compiler_away(monkeypatch)
    own_cache.mkdir()
    own_cache.chmod(0o777)
    (reason,) = BACKEND.unsupported_reasons(linear())
    assert "can be written by others (mode 0777)" in reason


@pytest.mark.parametrize(
    ("request_", "text", "complaint"),
    [
        (linear(), "tile=1x1x1", "linear.output on .*not a configuration: 'tile=1x1x1'"),
        (linear(), "path=tma;tile=256x256x128", "as int8 on .*configuration path=tma;tile=256x256x128: 256 accumulators"),
        (linear(capability="8.0"), "path=tma;tile=128x256x128", "sm_80 has no TMA"),
        (conv2d(), "path=tma;tile=128x128x64;scheduler=streamk", "conv2d.output on .*'scheduler=streamk' is not one of"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(stand_in_nvcc, own_cache, request_, text, complaint):
    stand_in_nvcc("exit 1")
    with pytest.raises(BackendError, match="backend cutlass.*" + complaint):
        BACKEND.build(request_, KernelConfig(text))


def test_convolutions_that_are_products_take_a_products_configuration():
    assert isinstance(parse_config(conv2d(), ""), ConvConfig)
    assert isinstance(parse_config(conv2d(w=(128, 64, 1, 1), padding="0,0"), ""), GemmConfig)
    assert isinstance(parse_config(conv2d(w=(128, 64, 1, 1), padding="0,0", stride="2,2"), ""), ConvConfig)


def test_compiling_ahead_compiles_the_candidates_of_what_it_takes(stand_in_nvcc, own_cache, tmp_path, capsys):
    stand_in_nvcc('cat "$source" > "$out"')
    events = []
    requests = [linear(capability="7.5"), conv2d(), linear(k=200_000)]
    done = BACKEND.compile_ahead(requests, "sm_75", lambda *update: events.append(update))
    assert done.requests == 2
    assert [refused.shapes for refused, _ in done.refused] == [linear(k=200_000).shapes]
    assert KernelCache().counts() == {"sm_75": done.kernels}
    assert [count for count, total, _ in events] == list(range(done.kernels + 1))
    assert {total for _, total, _ in events} == {done.kernels}
    lines = capsys.readouterr().err.splitlines()  # which is no terminal here
    assert [line.rpartition("(")[2] for line in lines] == [f"{n} of {done.kernels})" for n in range(done.kernels + 1)]
    compiled = len((tmp_path / "compilations").read_text().splitlines())
    BACKEND.compile_ahead(requests, "sm_75", lambda *update: events.append(update))
    assert len((tmp_path / "compilations").read_text().splitlines()) == compiled == done.kernels


def test_compiling_ahead_starts_with_every_requests_best_guess(stand_in_nvcc, own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_COMPILE_JOBS", "1")
    stand_in_nvcc('cat "$source" > "$out"', archs="sm_90")
    requests = [linear(m=8192, k=8192, n=8192), linear(m=16, k=1024, n=1000), conv2d()]
    BACKEND.compile_ahead(requests, "sm_90a", lambda *update: None)
    names = [line.rpartition("/")[2].removesuffix(".cu") for line in (tmp_path / "compilations").read_text().splitlines()]
    best = [request_sources(one, parse_config(one, ""), architectures.SM_90A) for one in requests]
    assert set(names[: len({source for found in best for source in found})]) == {source.name for found in best for source in found}


@pytest.mark.parametrize("arch", ["sm_61", "sm_", "hopper", "sm_100"])
def test_compiling_ahead_for_an_unknown_chip_is_refused(stand_in_nvcc, own_cache, arch):
    stand_in_nvcc("exit 1")
    with pytest.raises(BackendError, match=f"compiles for sm_70, sm_75, .*, not for '{arch}'"):
        BACKEND.compile_ahead([linear()], arch, print)


def test_later_chips_of_a_generation_run_the_earlier_ones_code():
    assert [architectures.compilation_target(name).name for name in ("sm_75", "sm_87", "sm_90", "sm_90a")] == [
        "sm_75",
        "sm_86",
        "sm_90a",
        "sm_90a",
    ]


def test_what_it_offers_is_data():
    assert isinstance(BACKEND, KernelBackend)
    offered = {spec.op: spec for spec in BACKEND.kernel_specs()}
    assert set(offered) == set(support.FORMATS)
    assert offered[Op.LINEAR_OUTPUT].compute == ("int8", "float8_e4m3fn")
    assert offered[Op.CONV2D_OUTPUT].layouts == ("channels_last",)


def test_a_request_gets_its_reasons_through_the_registry():
    registry = Registry()
    registry.register(plugin, "qsync-kernels-cutlass")
    assert registry.disabled == {}
    with pytest.raises(BackendError, match=r"cutlass: it runs on CUDA devices, and this request is for cpu"):
        registry.select(attrs.evolve(linear(), device_kind="cpu"))


def test_answering_imports_neither_torch_nor_numpy():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from kernel_requests import linear, conv2d;"
        "from qsync_kernels_cutlass import plugin; (b,) = plugin.qsync_register_backends();"
        "[(b.unsupported_reasons(r), b.candidate_configs(r)) for r in (linear(), conv2d())];"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    folder = __file__.rpartition("/")[0]
    assert subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Racing, shares, standings, the page: what is made of times and errors."""

import xml.etree.ElementTree as ElementTree

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelConfig, Op
from qsync_torch.benchmarking import bench
from qsync_torch.benchmarking.bench import compare
from qsync_torch.benchmarking.contenders import Backends, build_side_by_side
from qsync_torch.benchmarking.limited_backend import LimitedBackend
from qsync_torch.benchmarking.page import render
from qsync_torch.benchmarking.peaks import Peaks, measure_peaks
from qsync_torch.benchmarking.problems import Problem, problems, quantization
from qsync_torch.benchmarking.race import Measured, is_lost, race
from qsync_torch.benchmarking.results import NOT_FINITE, Row, Suite, as_data, fastest_of, speedup, standings
from qsync_torch.benchmarking.shapes import ShapeSet, product_of_rows
from qsync_torch.tuning import compiling

from .doubles import (
    SpoiltBackend,
    draws_the_transposed_copy_anew,
    forgets_factors_of_rows,
    forgets_the_last_row,
    forgets_the_transposed_copy,
    hands_out_earlier_results,
    replaces_the_result,
    spoils_a_scale_of_the_last_column,
    spoils_the_last_scale_a_little,
    writes_nothing,
)

CPU = torch.device("cpu")
INT8 = Variant.of(Precision.INT8)
ROW = Row(
    "", "linear.output", "int8→bfloat16", "64×64×64", 2, "aten", "", 2000.0, 0.02, 15, 2.7, "TFLOP/s", 0.5, "compute", 0.002, 0.03
)
OWN = attrs.evolve(ROW, contender="bfloat16", median_ns=3000.0)
FAST = attrs.evolve(ROW, contender="a<b", median_ns=1000.0, config="tile=1")
BROKEN = attrs.evolve(ROW, contender="broken", median_ns=100.0, error=0.9)
SUITE = Suite("H<200>", {"torch": "2.13"}, {"copy": 4e12, "int8": 1.4e15}, (ROW, OWN, FAST, BROKEN), {"x": "mine: it is small"})


def test_share_is_of_the_limit_that_binds():
    peaks = Peaks(1e12, {"int8": 1e15})
    assert peaks.share(10**12, 10**6, "int8", 2e6) == (pytest.approx(0.5), "compute")
    assert peaks.share(10**6, 10**9, "int8", 2e6) == (pytest.approx(0.5), "bandwidth")
    assert peaks.share(10**12, 10**9, "unknown", 1e6) == (pytest.approx(1.0), "bandwidth")
    assert peaks.as_rates() == {"copy": 1e12, "int8": 1e15}


def test_a_limit_is_what_any_product_reached_and_the_8_bit_formats_share_one():
    peaks = Peaks(1e12, {"int8": 1e15, "bfloat16": 5e14}).raised([("bfloat16", 6e14), ("float8_e4m3fn", 2e15), ("bfloat16", 1e14)])
    assert peaks == Peaks(1e12, {"int8": 2e15, "float8_e4m3fn": 2e15, "bfloat16": 6e14})
    assert Peaks(1e12, {"bfloat16": 5e14}).raised([]) == Peaks(1e12, {"bfloat16": 5e14})


def test_only_the_wanted_formats_are_measured():
    found = measure_peaks(CPU, {"bfloat16"})
    assert set(found.flops) == {"bfloat16"}
    assert min(found.as_rates().values()) > 1e6


def test_race_takes_turns_and_reports_who_can_not_run():
    order = []

    def fails():
        raise RuntimeError("no such\nkernel")

    measured, failures = race({"a": [lambda: order.append("a")], "b": [lambda: order.append("b")], "c": [fails]}, CPU, rounds=4)
    assert order == ["a", "b"] * 5
    assert {name: len(found.samples_ns) for name, found in measured.items()} == {"a": 4, "b": 4}
    assert failures == {"c": f"RuntimeError: no such kernel (test_comparing.py:{fails.__code__.co_firstlineno + 1})"}


def test_a_device_is_lost_by_an_error_of_cuda_but_not_for_want_of_memory():
    assert is_lost("AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert not is_lost("OutOfMemoryError: CUDA error: out of memory")
    assert not is_lost("BackendError: no configuration")


def test_median_and_spread():
    measured = Measured((10.0, 20.0, 30.0, 40.0, 50.0))
    assert (measured.median_ns, measured.fastest_ns) == (30.0, 10.0)
    assert measured.spread == pytest.approx(20 / 30)


def test_who_is_wrong_is_never_the_fastest():
    assert fastest_of(SUITE.rows) is FAST
    assert SUITE.wrong == [BROKEN]
    assert fastest_of([BROKEN]) is None
    assert speedup(FAST, SUITE.rows) == 3.0
    assert speedup(FAST, [FAST, BROKEN]) is None


def test_who_was_not_checked_is_not_called_the_fastest():
    unknown = attrs.evolve(FAST, error=None)
    assert fastest_of([unknown, ROW, OWN]) is ROW
    assert fastest_of([attrs.evolve(FAST, allowed=None), OWN]) is OWN
    assert not unknown.is_wrong
    assert not unknown.is_right


def test_who_is_wrong_is_compared_with_nobody_and_nobody_with_it():
    assert speedup(BROKEN, SUITE.rows) is None
    wrong = attrs.evolve(OWN, error=0.9)
    assert speedup(FAST, [FAST, wrong]) is None
    found = as_data(SUITE)["rows"]
    assert [(row["contender"], row["wrong"], row["fastest"], row["speedup"]) for row in found] == [
        ("aten", False, False, 1.5), ("bfloat16", False, False, 1.0), ("a<b", False, True, 3.0), ("broken", True, False, None),
    ]  # fmt: skip


@pytest.mark.parametrize(("bound", "error", "note"), [
    ("bandwidth", 0.002, "from cache"),
    ("compute", None, "beyond every product that was checked"),
    ("bandwidth", 0.9, ""),  # a wrong one has no share at all
])  # fmt: skip
def test_a_share_above_1_comes_with_a_word(bound, error, note):
    row = attrs.evolve(ROW, share=1.31, bound=bound, error=error)
    suite = attrs.evolve(SUITE, rows=(row,))
    assert as_data(suite)["rows"][0]["share_note"] == note
    body = ElementTree.fromstring(f"<body>{render(suite).partition('<body>')[2].partition('</html>')[0]}")
    lines = [line for line in body.iter("tr") if line.get("class") is not None]
    (cells,) = (["".join(cell.itertext()) for cell in line] for line in lines)
    assert cells[4] == (f"131%{bound}{note}" if note else "–")
    assert attrs.evolve(row, share=1.004).share_note == ""


def test_the_mean_leaves_out_what_is_wrong():
    other = [attrs.evolve(row, shape="8×8×8") for row in (attrs.evolve(ROW, contender="broken"), OWN)]
    (found,) = (one for one in standings(attrs.evolve(SUITE, rows=(*SUITE.rows, *other))) if one.contender == "broken")
    assert (found.ran, found.wrong, found.speedup) == (2, 1, pytest.approx(1.5))
    (found,) = (one for one in standings(SUITE) if one.contender == "broken")
    assert found.speedup is None


def test_standings_of_several_problems():
    other = [attrs.evolve(row, shape="8×8×8", median_ns=row.median_ns * factor) for row, factor in ((ROW, 0.1), (OWN, 0.4))]
    alone = attrs.evolve(ROW, op="quantize", error=0.05, allowed=0.1)
    found = {one.contender: one for one in standings(attrs.evolve(SUITE, rows=(*SUITE.rows, *other, alone)))}
    aten = found["aten"]
    assert (aten.ran, aten.fastest, aten.wrong, aten.largest_error) == (3, 2, 0, 0.05)
    assert aten.speedup == pytest.approx((1.5 * 6) ** 0.5)
    assert (found["broken"].wrong, found["broken"].fastest) == (1, 0)


def test_the_page_has_every_figure_and_is_well_formed():
    text = render(SUITE)
    body = text.replace("<!doctype html>", "").replace('<meta charset="utf-8">', "")
    for name in ("viewport", "color-scheme", "Content-Security-Policy"):
        start = body.index("<meta ")
        end = body.index(">", start)
        assert name in body[start:end]
        body = body[:start] + body[end + 1 :]
    page = ElementTree.fromstring(body)
    rows = {
        row[0].text: ["".join(cell.itertext()) for cell in row]
        for row in page.iter("tr")
        if row[0].tag == "td" and row.get("class")
    }
    assert set(rows) == {"aten", "bfloat16", "a<b", "broken"}
    assert rows["a<b"] == ["a<b", "1.0 µs± 2% of 15", "3.00", "2.7 TFLOP/s", "50%compute", "2.0e-03"]
    assert rows["broken"][-1] == "9.0e-01wrong: ≤ 3.0e-02"
    assert [row[0].text for row in page.iter("tr") if "fastest" in row.get("class", "")] == ["a<b"]
    said = " ".join(page.itertext())
    assert "copy 4,000 GB/s, int8 1,400 TFLOP/s." in " ".join(said.split())
    assert "mine: it is small (1: x)" in said
    assert "tile=1" in said
    assert "<script" not in text


def test_a_kernel_that_writes_too_little_is_found_out(install):
    install(
        SpoiltBackend("empty", writes_nothing), SpoiltBackend("short", forgets_the_last_row), SpoiltBackend("no", refuses=["never"])
    )
    chosen = [one for one in problems(ShapeSet("", (product_of_rows(16, 8, 24),)), float8=False) if one.part != "grad_input"]
    found = compare(chosen, Backends(), CPU, rounds=5)
    for row in found.rows:
        assert row.is_wrong == (row.contender in ("empty", "short"))
        assert (row.error == NOT_FINITE) == (row.contender == "empty")
        assert (row.count, row.samples) == (1, 5)
    assert {row.contender for row in found.rows} == {"aten", "bfloat16", "empty", "short"}
    assert set(found.left_out.values()) == {"no: never"}
    assert len(found.left_out) == len(chosen)


def test_who_hands_out_what_it_found_earlier_is_wrong_however_fast_it_is(install):
    install(SpoiltBackend("stale", hands_out_earlier_results()))
    found = compare([Problem(Op.LINEAR_OUTPUT, product_of_rows(16, 8, 24), INT8), quantization((8, 16))], Backends(), CPU, rounds=5)
    assert [(row.contender, row.is_wrong) for row in found.rows] == [
        ("aten", False), ("stale", True), ("bfloat16", False), ("aten", False), ("stale", True),
    ]  # fmt: skip


def test_who_replaces_its_output_is_left_out_and_the_others_are_right(install):
    install(SpoiltBackend("a", replaces_the_result, configs=("x", "y")), SpoiltBackend("b"))
    product = Problem(Op.LINEAR_OUTPUT, product_of_rows(16, 8, 24), INT8)
    found = compare([product, quantization((8, 16))], Backends(chain=("a", "b")), CPU, rounds=5)
    assert [(row.contender, row.is_right) for row in found.rows] == [("b", True), ("bfloat16", True), ("b", True)]
    assert all("the kernel replaced its output instead of writing into it" in why for why in found.left_out.values())
    assert len(found.left_out) == 2


def test_one_row_of_thousands_that_is_wrong_is_found(install):
    install(SpoiltBackend("short", forgets_the_last_row))
    found = compare([Problem(Op.LINEAR_OUTPUT, product_of_rows(4096, 8, 8), INT8)], Backends(), CPU, rounds=5)
    assert {row.contender: row.is_wrong for row in found.rows} == {"aten": False, "short": True, "bfloat16": False}


@pytest.mark.parametrize("by", [Granularity.PER_ROW, Granularity.PER_CHANNEL])
def test_a_scale_that_is_off_by_a_hundredth_is_found(install, by):
    install(SpoiltBackend("off", spoils_the_last_scale_a_little))
    found = compare([quantization((33, 40), by)], Backends(), CPU, rounds=5)
    assert {row.contender: row.is_wrong for row in found.rows} == {"aten": False, "off": True}


@pytest.mark.parametrize("by", Granularity)
def test_a_transposed_copy_is_looked_at_too(install, by):
    install(
        SpoiltBackend("forgets", forgets_the_transposed_copy),
        SpoiltBackend("anew", draws_the_transposed_copy_anew),
        SpoiltBackend("scale", spoils_a_scale_of_the_last_column),
    )
    found = compare([quantization((8, 16), by, flags=("transposed",))], Backends(), CPU, rounds=5)
    right = {"aten", "anew"} if by is Granularity.PER_ROW else {"aten"}  # other scales, so other numbers to round
    assert {row.contender for row in found.rows if row.is_right} == right
    assert {row.contender for row in found.rows if row.is_wrong} == {"forgets", "anew", "scale"} - right


def test_a_transposed_copy_without_its_factors_of_rows_is_found(install):
    install(SpoiltBackend("forgets", forgets_factors_of_rows))
    found = compare([quantization((8, 16), Granularity.PER_ROW, flags=("transposed",))], Backends(), CPU, rounds=5)
    assert {row.contender: row.is_wrong for row in found.rows} == {"aten": False, "forgets": True}


def test_one_who_fails_leaves_the_others_their_race(install):
    def fails(kernel, *arguments):
        raise ValueError("not today")

    install(SpoiltBackend("ill", fails))
    found = compare([quantization((8, 16))], Backends(), CPU, rounds=5)
    (row,) = found.rows
    assert (row.contender, row.unit, row.bound) == ("aten", "GB/s", "bandwidth")
    assert row.error <= row.allowed
    assert list(found.left_out.values()) == [
        f"ill: failed: ValueError: not today (test_comparing.py:{fails.__code__.co_firstlineno + 1})"
    ]


def test_without_memory_for_float64_times_are_there_and_no_error(install, monkeypatch):
    def of(problem, operands):
        raise torch.OutOfMemoryError("CUDA out of memory")

    install()
    monkeypatch.setattr(bench.Reference, "of", of)
    found = compare([Problem(Op.LINEAR_OUTPUT, product_of_rows(16, 8, 24), INT8)], Backends(), CPU, rounds=5)
    assert [(row.contender, row.error, row.allowed) for row in found.rows] == [("aten", None, None), ("bfloat16", None, None)]
    assert fastest_of(found.rows) is None
    assert "aten, error: float64 takes more memory than there is, so its error is not known" in found.left_out.values()
    assert "–</td>" in render(found)


def test_pytorchs_settings_are_as_before(install):
    install()
    earlier = torch.backends.cudnn.benchmark
    compare([quantization((8, 16))], Backends(), CPU, rounds=5)
    assert torch.backends.cudnn.benchmark is earlier


class _Compiling:
    """A backend with three libraries of two run-time settings each."""

    name, api_version = "stub", 1

    def kernel_specs(self):
        return ()

    def unsupported_reasons(self, request):
        return []

    def candidate_configs(self, request):
        return [KernelConfig(f"tile={tile};raster={raster}") for raster in "mn" for tile in (1, 2, 3)]

    def build(self, request, config):
        return lambda *arguments: None

    def compile_ahead(self, requests, arch, progress):
        return None


class _JustInTime:
    """The same without libraries."""

    name, api_version = "stub", 1
    kernel_specs, unsupported_reasons = _Compiling.kernel_specs, _Compiling.unsupported_reasons
    candidate_configs, build = _Compiling.candidate_configs, _Compiling.build


PRODUCT = Problem(Op.LINEAR_OUTPUT, product_of_rows(4, 8, 16), INT8).request(CPU)


def test_a_limited_backend_offers_the_first_libraries_with_all_their_run_time_knobs():
    limited = LimitedBackend(_Compiling(), libraries=2, just_in_time=0)
    assert limited.compiles
    assert [config.text for config in limited.candidate_configs(PRODUCT)] == [
        "tile=1;raster=m", "tile=2;raster=m", "tile=1;raster=n", "tile=2;raster=n",
    ]  # fmt: skip


def test_products_that_compile_just_in_time_are_left_out_with_the_reason_and_quantization_is_not():
    left_out, few = (LimitedBackend(_JustInTime(), 2, count) for count in (0, 1))
    quantize = quantization((4, 8)).request(CPU)
    assert left_out.unsupported_reasons(PRODUCT) == ["its products are left out of this measurement"]
    assert left_out.unsupported_reasons(quantize) == []
    assert [config.text for config in few.candidate_configs(PRODUCT)] == ["tile=1;raster=m"]
    assert len(few.candidate_configs(quantize)) == 6


def test_each_library_is_built_before_any_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(compiling, "_cores", lambda: 1)
    built = []

    class Recording(_Compiling):
        def build(self, request, config):
            built.append((request.shapes[0][0], config.text))
            if config.text.startswith("tile=2"):
                raise RuntimeError("does not compile")

    requests = [Problem(Op.LINEAR_OUTPUT, product_of_rows(m, 8, 16), INT8).request(CPU) for m in (4, 5)]
    backend = Recording()
    build_side_by_side([(backend, request, config) for request in requests for config in backend.candidate_configs(request)])
    assert built[:3] == [(4, "tile=1;raster=m"), (4, "tile=2;raster=m"), (4, "tile=3;raster=m")]
    assert sorted(set(built)) == [(m, f"tile={tile};raster=m") for m in (4, 5) for tile in (1, 2, 3)]

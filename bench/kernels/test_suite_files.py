"""What the suite makes of its figures: shapes, work, shares, files, comparisons, pages."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import attrs
import pytest

torch = pytest.importorskip("torch")

from kernels import compare, shapes, suite_file  # noqa: E402
from kernels.job_kernels import offered  # noqa: E402
from kernels.page import suite_page  # noqa: E402
from qsync_core.geometry import Geometry  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.kernels.backend import KernelConfig, Op  # noqa: E402
from qsync_core.kernels.requests import CallShapes  # noqa: E402
from qsync_torch.benchmarking.contenders import build_side_by_side  # noqa: E402
from qsync_torch.benchmarking.limited_backend import LimitedBackend  # noqa: E402
from qsync_torch.benchmarking.peaks import Peaks  # noqa: E402
from qsync_torch.benchmarking.problems import INT8, Problem, problems, quantization  # noqa: E402
from qsync_torch.benchmarking.race import Measured, race  # noqa: E402

CPU = torch.device("cpu")
ROW = suite_file.Row(
    "bert-base", "linear.output", "int8→bfloat16", "4608×768×768", 48, "aten", "", 2000.0, 0.02, 15, 2.7, "TFLOP/s", 0.5, "compute"
)
SUITE = suite_file.Suite(
    "NVIDIA H200", {"commit": "abc", "versions": {"torch": "2.11"}}, {"copy": 4e12, "int8": 1.4e15}, (ROW,), {}
)


def test_resnet50_has_53_convolutions_and_vgg16_13():
    resnet, vgg = shapes.shape_set("resnet50"), shapes.shape_set("vgg16")
    assert sum(shape.count for shape in resnet.conv) == 53
    assert sum(shape.count for shape in vgg.conv) == 13
    assert [(shape.m, shape.k, shape.n) for shape in vgg.linear] == [(64, 25088, 4096), (64, 4096, 4096), (64, 4096, 1000)]
    # torchvision counts 4.09 G multiply-accumulates for ResNet50 at 224²; its last linear layer is 2 M of them.
    macs = sum(shape.count * Problem(Op.CONV2D_OUTPUT, shape, INT8).flops // 2 for shape in resnet.conv) / shapes.BATCH["resnet50"]
    assert macs == pytest.approx(4.087e9, rel=1e-3)


def test_output_shapes_of_convolutions_are_pytorchs():
    for shape in (*shapes.shape_set("resnet50").conv, *shapes.shape_set("smoke").conv):
        x, w = torch.empty(shape.x_shape, device="meta"), torch.empty(shape.w_shape, device="meta")
        y = torch.nn.functional.conv2d(x, w, None, shape.stride, shape.padding, shape.dilation, shape.groups)
        assert tuple(y.shape) == shape.y_shape


def test_an_unknown_shape_set_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no shape set is named 'resnet'; known are bert-base, "):
        shapes.shape_set("resnet")


def test_work_and_bytes_of_a_product_worked_by_hand():
    problem = Problem(Op.LINEAR_OUTPUT, shapes.LinearShape(4, 6, 10), INT8)
    assert problem.flops == 2 * 4 * 6 * 10
    assert problem.floor_bytes == 4 * 6 + 10 * 6 + 4 * 10 * 2
    assert quantization((3, 5)).floor_bytes == 15 * (4 + 4 + 1)
    assert quantization((3, 5), flags=("transposed",)).floor_bytes == 15 * (4 + 4 + 2)


def test_operands_have_the_shapes_of_the_request():
    for problem in problems(shapes.shape_set("smoke")):
        request, operands = problem.request(CPU), problem.operands(CPU)
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor) and operand.ndim > 1]
        assert tuple(tensors[0].shape) == request.shapes[0]
        assert len(request.shapes) == 1 or tuple(tensors[1].shape) == request.shapes[1]


def test_labels_of_a_set_are_distinct():
    for name in shapes.SET_NAMES:
        labels = [problem.label for problem in problems(shapes.shape_set(name))]
        assert len(labels) == len(set(labels))


def test_share_is_of_the_limit_that_binds():
    peaks = Peaks(1e12, {"int8": 1e15})
    assert peaks.share(10**12, 10**6, "int8", 2e6) == (pytest.approx(0.5), "compute")
    assert peaks.share(10**6, 10**9, "int8", 2e6) == (pytest.approx(0.5), "bandwidth")
    assert peaks.share(10**12, 10**9, "unknown", 1e6) == (pytest.approx(1.0), "bandwidth")


def test_race_takes_turns_and_reports_who_can_not_run():
    order = []

    def fails():
        raise RuntimeError("no such kernel")

    contenders = {"a": [lambda: order.append("a")], "b": [lambda: order.append("b")], "c": [fails]}
    measured, failures = race(contenders, CPU, rounds=4)
    assert order == ["a", "b"] * 5
    assert {name: len(found.samples_ns) for name, found in measured.items()} == {"a": 4, "b": 4}
    assert failures == {"c": "RuntimeError: no such kernel"}


def test_median_and_spread():
    measured = Measured((10.0, 20.0, 30.0, 40.0, 50.0))
    assert measured.median_ns == 30.0
    assert measured.spread == pytest.approx(20 / 30)


def test_a_suite_is_read_back_as_written_and_one_row_is_one_line(tmp_path):
    path = tmp_path / "h200.json"
    suite_file.write_suite(SUITE, path)
    assert suite_file.read_suite(path) == SUITE
    assert sum("set_name" in line for line in path.read_text().splitlines()) == 1


@pytest.mark.parametrize("stored", [{"format": 99, "rows": []}, {"rows": []}, [1]])
def test_another_format_is_refused(tmp_path, stored):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"other\.json is not a result of the kernel suite in format 1 .*measure again"):
        suite_file.read_suite(path)


WHOLE = {"format": 1, **attrs.asdict(SUITE)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"stored\.json cannot be read: No such file or directory"),
        ("{", r"stored\.json is not a result of the kernel suite \(Expecting property name"),
        ('{"machine": {}, "rows": []}', r"in format 1 \(found no format\)"),
        (json.dumps({"format": 1, "rows": []}), r"it lacks 'device'"),
        (json.dumps(WHOLE | {"rows": [1]}), r"a row must be a table, got a int"),
        (json.dumps(WHOLE | {"rows": [{"op": "quantize"}]}), r"missing 13 required positional arguments"),
        (
            json.dumps(WHOLE | {"rows": [attrs.asdict(ROW) | {"median_ns": "fast"}]}),
            r"median_ns of a row must be a number",
        ),
        (json.dumps(WHOLE | {"peaks": []}), r"provenance, peaks and left_out must be tables"),
    ],
)
def test_a_file_that_can_not_be_compared_is_told_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "stored.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        suite_file.read_suite(path)
    assert "\n" not in str(caught.value)


def test_comparing_from_the_command_line(tmp_path):
    script, foreign = Path(compare.__file__), Path(compare.__file__).parents[2] / "docs" / "results" / "kernels.json"
    suite_file.write_suite(SUITE, tmp_path / "one.json")

    def run(*names):
        return subprocess.run([sys.executable, script, *names], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "1 measurements in both: 0 slower, 0 faster, 1 same" in run("one.json", "one.json").stdout
    for name in ("nowhere.json", str(foreign)):
        done = run(name, "one.json")
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
        assert done.stderr.startswith(f"error: {name} ")


def test_merging_keeps_what_was_not_measured_again():
    other = attrs.evolve(ROW, contender="cutlass")
    again = attrs.evolve(ROW, median_ns=1000.0)
    merged = suite_file.merge(attrs.evolve(SUITE, rows=(ROW, other)), attrs.evolve(SUITE, rows=(again,)))
    assert merged.rows == (again, other)
    assert suite_file.merge(attrs.evolve(SUITE, device="A100"), SUITE) == SUITE


def test_comparison_tells_changes_from_noise():
    names = ("slower", "faster", "within 5%", "noisy", "new")
    stored = attrs.evolve(SUITE, rows=tuple(attrs.evolve(ROW, contender=name) for name in (*names[:4], "gone")))
    factors = dict(zip(names, (1.5, 0.5, 1.04, 1.2, 1.0), strict=True))
    rows = [attrs.evolve(ROW, contender=name, median_ns=2000.0 * factor) for name, factor in factors.items()]
    rows[3] = attrs.evolve(rows[3], spread=0.3)
    new = attrs.evolve(SUITE, rows=tuple(rows))
    assert {change.row.contender: change.verdict for change in compare.changes(stored, new)} == {
        "slower": "slower", "faster": "faster", "within 5%": "same", "noisy": "same",
    }  # fmt: skip
    text = compare.comparison_text(stored, new)
    assert "4 measurements in both: 1 slower, 1 faster, 2 same; 1 new, 1 not measured now" in text
    assert "times of two devices do not compare" in compare.comparison_text(attrs.evolve(stored, device="A100"), new)


def test_the_page_has_every_figure_and_its_drawings_are_xml():
    rows = tuple(attrs.evolve(ROW, contender=name, shape=shape, median_ns=time)
                 for (name, time), shape in itertools.product([("aten", 2000.0), ("a<b", 1500.0)], ["4×4×4", "8×8×8"]))  # fmt: skip
    drawings = {}

    def place(name, svg):
        drawings[name] = svg
        return f"![{name}]"

    text = suite_page(attrs.evolve(SUITE, rows=rows, left_out={"x: torchao": "torchao: it is not installed"}), place)
    assert text.count("**1.5** (2.7 TFLOP/s, 50% c)") == 2
    assert "- torchao: it is not installed (1: x: torchao)" in text
    assert "copy 4.00 TB/s; int8 1.4e+03 TFLOP/s" in text
    (svg,) = drawings.values()
    bars = [node for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("title")]
    assert len(bars) == 4


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


PRODUCT = Problem(Op.LINEAR_OUTPUT, shapes.LinearShape(4, 8, 16), INT8).request(CPU)


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


def test_convolutions_keep_16_bit_gradients_where_nobody_offers_8_bit_ones():
    both = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
    plain = CallShapes("conv2d", (2, 4, 8, 8), (4, 4, 3, 3), (2, 4, 8, 8))
    strided = attrs.evolve(plain, geometry=Geometry(stride=(2, 2)))
    linear = CallShapes("linear", (2, 4), (4, 4), (2, 4))
    assert offered(both, linear) == both
    assert offered(both, plain) == attrs.evolve(both, grad_weight=Precision.BFLOAT16)
    assert offered(both, strided) == INT8


def test_each_library_is_built_before_any_is_asked_for_again(monkeypatch):
    monkeypatch.setattr("kernels.contenders.os.cpu_count", lambda: 1)
    built = []

    class Recording(_Compiling):
        def build(self, request, config):
            built.append((request.shapes[0][0], config.text))
            if config.text.startswith("tile=2"):
                raise RuntimeError("does not compile")

    requests = [Problem(Op.LINEAR_OUTPUT, shapes.LinearShape(m, 8, 16), INT8).request(CPU) for m in (4, 5)]
    backend = Recording()
    build_side_by_side([(backend, request, config) for request in requests for config in backend.candidate_configs(request)])
    assert built[:3] == [(4, "tile=1;raster=m"), (4, "tile=2;raster=m"), (4, "tile=3;raster=m")]
    assert sorted(set(built)) == [(m, f"tile={tile};raster=m") for m in (4, 5) for tile in (1, 2, 3)]

"""The repository's shape sets, and the files of the suite's results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

pytest.importorskip("torch")

from kernels import compare, shapes, suite_file
from kernels.job_kernels import offered
from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import CallShapes
from qsync_torch.benchmarking.problems import Problem, problems
from qsync_torch.benchmarking.results import Row, Suite

INT8 = Variant.of(Precision.INT8)
ROW = Row(
    "bert-base", "linear.output", "int8→bfloat16", "4608×768×768", 48, "aten", "", 2000.0, 0.02, 15, 2.7, "TFLOP/s", 0.5, "compute"
)
SUITE = Suite("NVIDIA H200", {"commit": "abc", "versions": {"torch": "2.11"}}, {"copy": 4e12, "int8": 1.4e15}, (ROW,), {})


@pytest.fixture(scope="module")
def sets():
    return {name: shapes.shape_set(name) for name in shapes.SET_NAMES}


def test_resnet50_has_53_convolutions_and_vgg16_13(sets):
    resnet, vgg = ([one for one in sets[name].products if not one.call.of_rows] for name in ("resnet50", "vgg16"))
    assert sum(shape.count for shape in resnet) == 53
    assert sum(shape.count for shape in vgg) == 13
    rows = [shape.label for shape in sets["vgg16"].products if shape.call.of_rows]
    assert rows == ["64×25088×4096", "64×4096×4096", "64×4096×1000"]
    # torchvision counts 4.09 G multiply-accumulates for ResNet50 at 224²; its last linear layer is 2 M of them.
    macs = sum(shape.count * Problem(Op.CONV2D_OUTPUT, shape, INT8).flops // 2 for shape in resnet) / shapes.BATCH["resnet50"]
    assert macs == pytest.approx(4.087e9, rel=1e-3)


def test_labels_of_a_set_are_distinct(sets):
    for found in sets.values():
        labels = [problem.label for problem in problems(found)]
        assert len(labels) == len(set(labels))


def test_an_unknown_shape_set_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no shape set is named 'resnet'; known are bert-base, "):
        shapes.shape_set("resnet")


def test_a_suite_is_read_back_as_written_and_one_row_is_one_line(tmp_path):
    path = tmp_path / "h200.json"
    suite_file.write_suite(SUITE, path)
    assert suite_file.read_suite(path) == SUITE
    assert sum("set_name" in line for line in path.read_text().splitlines()) == 1


@pytest.mark.parametrize("stored", [{"format": 99, "rows": []}, {"rows": []}, [1]])
def test_another_format_is_refused(tmp_path, stored):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"other\.json is not a result of the kernel suite in format 2 .*measure again"):
        suite_file.read_suite(path)


WHOLE = {"format": 2, **attrs.asdict(SUITE)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"stored\.json cannot be read: No such file or directory"),
        ("{", r"stored\.json is not a result of the kernel suite \(Expecting property name"),
        ('{"machine": {}, "rows": []}', r"in format 2 \(found no format\)"),
        (json.dumps({"format": 2, "rows": []}), r"it lacks 'device'"),
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


def test_convolutions_keep_16_bit_gradients_where_nobody_offers_8_bit_ones():
    both = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
    plain = CallShapes("conv2d", (2, 4, 8, 8), (4, 4, 3, 3), (2, 4, 8, 8))
    strided = attrs.evolve(plain, geometry=Geometry(stride=(2, 2)))
    linear = CallShapes("linear", (2, 4), (4, 4), (2, 4))
    assert offered(both, linear) == both
    assert offered(both, plain) == attrs.evolve(both, grad_weight=Precision.BFLOAT16)
    assert offered(both, strided) == INT8

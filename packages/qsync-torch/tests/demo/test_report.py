"""Drawings and table: what is asked for is there, well-formed, and needs nothing from outside."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Interval, Timeline
from qsync_core.ir.variant import Variant
from qsync_torch.demo.outcome import Outcome, Row, conclusions, print_outcome, room, summarize
from qsync_torch.demo.report import MemoryBar, Strip, draw_memory, draw_precision_strips, draw_sensitivity, draw_timeline
from qsync_torch.demo.workloads import Evaluation

SVG = "{http://www.w3.org/2000/svg}"
LOW, HIGH = Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32)


def boxes(drawing: str, css: str) -> list[ET.Element]:
    return [box for box in ET.fromstring(drawing).iter(f"{SVG}rect") if box.get("class", "").split()[0] == css]


def titles(found: list[ET.Element]) -> list[str]:
    return [box.find(f"{SVG}title").text for box in found]


@pytest.fixture
def dag():
    def operator(name: str, depth: int, flops: int) -> Operator:
        op_id, weight = OpId(name), (4, 4)
        return Operator(op_id, "linear", OpClass.ADJUSTABLE, (), (), (4, 4), weight_shape=weight, flops=flops, depth=depth)

    return PrecisionDag("m", (operator("a<b>", 1, 3_000_000), operator("c", 2, 1_000_000)), ())


def test_a_timeline_has_a_lane_per_rank_and_stream_and_a_box_per_piece():
    pieces = (
        Interval("conv <1>", OpId("conv"), Phase.FORWARD, Resource.COMPUTE, 0, 0, 4_000_000),
        Interval("conv", OpId("conv"), Phase.BACKWARD, Resource.COMPUTE, 1, 4_000_000, 8_000_000),
        Interval("bucket 0", None, Phase.COMMUNICATION, Resource.COMMUNICATION, 1, 12_000_000, 1_000_000),
    )
    timeline = Timeline("predicted", "m", 13_000_000, {0: "train", 1: "infer"}, pieces)
    drawing = draw_timeline(timeline, 26_000_000)
    labels = [text.text for text in ET.fromstring(drawing).iter(f"{SVG}text") if text.get("class") == "label"]
    assert labels == ["train · compute", "infer · communication", "infer · compute"]
    (forward,), (backward,) = boxes(drawing, "phase-forward"), boxes(drawing, "phase-backward")
    assert titles([forward]) == ["conv <1>\nforward, 4.000 ms from 0.000 ms"]
    # 4 ms and 8 ms of a span of 26 ms, and the second begins where the first ends.
    assert float(backward.get("width")) == pytest.approx(2 * float(forward.get("width")), abs=0.02)
    assert float(backward.get("x")) == pytest.approx(float(forward.get("x")) + float(forward.get("width")), abs=0.02)


def test_strips_show_every_operator_once_a_line(dag):
    strips = [Strip("uniform", dict.fromkeys([OpId("a<b>"), OpId("c")], LOW)), Strip("QSync", {OpId("a<b>"): HIGH, OpId("c"): LOW})]
    drawing = draw_precision_strips(dag, strips)
    assert len(boxes(drawing, "precision-bfloat16")) == 3
    (recovered,) = boxes(drawing, "precision-float32")
    assert titles([recovered]) == ["a<b>#0, depth 1: float32, 3 Mflop forward"]


def test_sensitivity_is_ranked_and_coloured_by_choice(dag):
    omega = {OpId("c"): {LOW: 1e-3}, OpId("a<b>"): {LOW: 1e-5}, OpId("zero"): {LOW: 0.0}}
    drawing = draw_sensitivity(Sensitivity("m", "", "", "lossvar", omega), dag, {OpId("c"): HIGH, OpId("a<b>"): LOW})
    assert [text.text for text in ET.fromstring(drawing).iter(f"{SVG}text") if text.get("class") == "label"] == ["c#0", "a<b>#0"]
    assert titles(boxes(drawing, "precision-float32")) == ["c#0: Ω = 0.001"]


def test_memory_over_the_budget_is_marked():
    drawing = draw_memory([MemoryBar("full", 300, 310), MemoryBar("QSync", 190, 199)], 200)
    over = [box.get("class") for box in ET.fromstring(drawing).iter(f"{SVG}rect") if "over" in box.get("class")]
    assert over == ["memory-predicted over", "memory-measured over"]


def row(name: str, measured_ms: float, predicted_ms: float) -> Row:
    return Row(
        name,
        name,
        round(predicted_ms * 1e6),
        round(measured_ms * 1e6),
        0.1,
        {"bfloat16": 2, "float32": 7},
        {"train": 48, "infer": 48},
        0.5,
        Evaluation(0.4, 0.97),
        1 << 20,
        2 << 20,
        name == "full",
        {"full": 0.0, "uniform": 0.012, "qsync": 0.0075}.get(name),
    )


def test_table_and_json_say_the_same():
    rows = (row("full", 200, 210), row("uniform", 100, 100), row("dynamic-batch", 150, 150), row("qsync", 104, 100))
    probes = (row("random 11", 100, 120),)
    outcome = Outcome(
        "resnet", "digits", 60, "a cgroup quota of 64% of its core", 1.56, 1 << 20, rows, probes, 0.47, 0.52, 0.9, 100.0
    )
    text = io.StringIO()
    print_outcome(Console(file=text, width=200), outcome)
    shown = text.getvalue()
    assert "1.56 times the strong one's, memory budget 1 MiB" in shown
    assert "104 ms ± 5" in shown
    assert "2 bfloat16, 7 float32" in shown
    assert "97.0%" in shown
    assert shown.count("over budget") == 1
    assert conclusions(outcome) == [
        "The weak worker may use 1 MiB: QSync's plan fits that with a measured peak of 2 MiB, full precision exceeds it with "
        "2 MiB.",
        "QSync's step takes 0.52 of full precision's and 1.04 of uniform low precision's, with 47% of uniform's "
        "low-precision compute back in float32 (this machine has time for about 52%).",
        "The weak worker's weight gradients are off by 0.75% under QSync's plan and by 1.20% in uniform low precision.",
        "The predicted iteration time was off by 20.0% in the median of 2 configurations, 20.0% at worst.",
        "Other processes were running: the strong worker got only 90% of its core, so expect these figures to scatter; "
        "run the demo again when the machine is idle.",
    ]
    data = summarize(outcome)
    assert data["qsync_over_full"] == pytest.approx(0.52)
    assert data["prediction_errors"] == pytest.approx({"full": 0.05, "random 11": 0.2})
    assert [method["measured_ns"] for method in data["methods"]] == [200_000_000, 100_000_000, 150_000_000, 104_000_000]


@pytest.mark.parametrize(
    "full, uniform, limit, expected",
    [
        (150, 50, 100, 0.5),
        (1500, round(1500 / 2.1), 1000, (1 - 1.5 / 2.1) / (1.5 - 1.5 / 2.1)),  # the formula in the docstring: 0.36
        (150, 120, 100, 0.0),  # even uniform precision does not keep up
        (90, 50, 100, 1.0),
        (100, 100, 100, 0.0),  # low precision saves nothing
    ],
)
def test_the_room_is_the_slack_over_what_low_precision_saves(full, uniform, limit, expected):
    assert room(full, uniform, limit) == pytest.approx(expected, abs=1e-3)

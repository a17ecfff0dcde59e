"""The demo's table, sentences and JSON say the same, and its report shows them before the page of any job."""

from __future__ import annotations

import io

import attrs
import pytest
from rich.console import Console

from qsync_torch.demo.outcome import Outcome, Row, room
from qsync_torch.demo.report import methods_section, print_outcome, stored_section
from qsync_torch.demo.stored_profiles import Stored, StoredRow
from qsync_torch.demo.workloads import Evaluation


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


@pytest.fixture
def outcome():
    rows = (row("full", 200, 210), row("uniform", 100, 100), row("dynamic-batch", 150, 150), row("qsync", 104, 100))
    probes = (row("random 11", 100, 120),)
    return Outcome("resnet", "digits", 60, "a cgroup quota of 64% of its core", 1.56, 1 << 20, rows, probes, 0.47, 0.52, 0.9, 100.0)


def test_table_and_json_say_the_same(outcome):
    text = io.StringIO()
    print_outcome(Console(file=text, width=200), outcome)
    shown = text.getvalue()
    assert "1.56 times the strong one's, memory budget 1 MiB" in shown
    assert "104 ms ± 5" in shown
    assert "2 bfloat16, 7 float32" in shown
    assert shown.count("over budget") == 1
    assert outcome.conclusions == [
        "The weak worker may use 1 MiB: QSync's plan fits that with a measured peak of 2 MiB, full precision exceeds it with "
        "2 MiB.",
        "QSync's step takes 0.52 of full precision's and 1.04 of uniform low precision's, with 47% of uniform's "
        "low-precision compute back in float32 (this machine has time for about 52%).",
        "The weak worker's weight gradients are off by 0.75% under QSync's plan and by 1.20% in uniform low precision.",
        "The predicted iteration time was off by 20.0% in the median of 2 configurations, 20.0% at worst.",
        "Other processes were running: the strong worker got only 90% of its core, so expect these figures to scatter; "
        "run the demo again when the machine is idle.",
    ]
    data = outcome.summary
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


def test_the_report_has_a_row_for_every_method(outcome):
    section = methods_section(outcome)
    (table,) = section.parts
    assert [len(cells) for cells in table.rows] == [len(table.header)] * 5
    shown = dict(zip(table.header, table.rows[3], strict=True))
    assert shown["method"] == "qsync"
    assert shown["held-out accuracy"] == "97.0%"
    uneven = attrs.evolve(outcome.rows[2], local_batches={"train": 60, "infer": 36})
    assert uneven.cells["method"] == "dynamic-batch, 60 + 36"
    assert shown["iteration, measured"] == "104 ms ± 5"
    assert shown["gradient error"] == "0.75%"
    assert "over budget" in table.rows[0][table.header.index("weak worker's peak")]
    assert section.sentences == outcome.conclusions
    assert "its float32 step takes 1.56 times the strong one's, memory budget 1 MiB." in table.note
    assert "fewer samples" in methods_section(attrs.evolve(outcome, notes=("fewer samples",))).parts[0].note


def test_what_was_replayed_is_a_section_of_its_own():
    rows = tuple(
        StoredRow(name, 1_000_000 * ms, {"int8": 3}, 1 << 30, ms / 10)
        for name, ms in (("full", 20), ("uniform", 10), ("qsync", 10))
    )
    section = stored_section(Stored("ResNet50 on GPUs", rows))
    assert section.sentences[0] == "ResNet50 on GPUs."
    assert section.parts[0].rows[2] == ("QSync", "10.0 ms", "3 int8", "1", "1 GiB")

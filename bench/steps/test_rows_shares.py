"""Batches that are tried, rows, and the page of what plans make of a share of the memory."""

import pytest

from steps.rows_shares import GIB, ModelFound, Ran, ShareFound, next_batch, rows
from steps.shares_page import shares_page

AMP = Ran(6 * GIB, GIB, 7 * GIB, (20.0, 22.0, 21.0))
UNIFORM = Ran(5 * GIB, GIB, 6 * GIB, (10.0, 10.0, 10.0))
PLANNED = ShareFound(
    50, 8 * GIB, operators={"int8": 2, "float16": 3, "float32": 1}, chains={"fused": 4, "fused, int8 saved": 1},
    predicted_peak_bytes=4 * GIB, predicted_ms=30.0, run=Ran(4 * GIB, GIB, 5 * GIB, (12.0, 13.0, 11.0)),
    peaks={128: 4 * GIB, 192: 6 * GIB, 200: 6 * GIB + 1},
)  # fmt: skip
TOO_SMALL = ShareFound(30, 5 * GIB, smallest_bytes=6 * GIB)
FAILS = ShareFound(40, 6 * GIB, operators={"int8": 6}, run=Ran(error="OutOfMemoryError: none left"))


@pytest.fixture
def by_id():
    found = ModelFound("resnet50", "ResNet50 b128", 128, 16 * GIB, AMP, UNIFORM, 20.0, (PLANNED, FAILS, TOO_SMALL))
    return {row["id"]: row for row in rows(found, "GPU")}


def test_rows_of_a_share_that_runs(by_id):
    assert by_id["resnet50-50-chosen"]["value"] == 5
    assert by_id["resnet50-50-chosen"]["spread"] == ("2 int8, 3 float16, 1 float32; chains: 4 fused, 1 fused with int8 saved")
    assert by_id["resnet50-50-peak"]["value"] == 4
    assert by_id["resnet50-50-step"]["value"] == pytest.approx(1.2)
    assert by_id["resnet50-50-step"]["spread"].startswith("predicted 1.5 ")
    assert by_id["resnet50-50-batch"]["value"] == 192


def test_rows_of_shares_that_do_not(by_id):
    assert by_id["resnet50-30-least"]["value"] == pytest.approx(6 / 16)
    assert not any(name.startswith("resnet50-30-") for name in by_id.keys() - {"resnet50-30-least"})
    assert "none left" in by_id["resnet50-40-runs"]["spread"]
    assert "resnet50-40-peak" not in by_id


def test_the_page_has_a_line_for_every_share(by_id):
    lines = [line for line in shares_page(list(by_id.values())).splitlines() if line.startswith("| ")]
    assert [line.split(" |")[0] for line in lines] == ["| memory", "| 50%", "| 40%", "| 30%"]
    chosen = by_id["resnet50-50-chosen"]["spread"]
    assert lines[1] == f"| 50% | {chosen} | 4 GiB | 1.2 | 192 |"
    assert lines[3] == "| 30% | no plan fits; one fits 37.5% | – | – | – |"


@pytest.mark.parametrize("per_sample", [3, 7])
@pytest.mark.parametrize("granule", [1, 8])
def test_the_largest_batch_is_found_where_memory_is_linear(per_sample, granule):
    """Against trying every batch; the bytes that do not grow are only nearly known."""
    limit, peaks = 5_000, {128: 100 + 128 * per_sample}
    best = max(batch for batch in range(granule, 5_000, granule) if 100 + batch * per_sample <= limit)
    for _ in range(3):
        batch = next_batch(peaks, 90, limit, granule)
        peaks[batch] = 100 + batch * per_sample
    assert max(batch for batch, peak in peaks.items() if peak <= limit) == best


def test_what_was_measured_counts_before_the_line():
    assert next_batch({100: 1_000, 104: 1_500}, 0, 1_499, 4) == 100
    assert next_batch({100: 1_000, 108: 1_001}, 0, 1_000, 4) == 104 - 4
    assert next_batch({8: 1_000}, 900, 950, 8) == 0

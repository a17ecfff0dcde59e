"""``qsync verify`` of a step of VGG16-BN recorded on half of an H200, random precisions: parts, and one trace of both.

``tests/data/h200/vgg16-bn``: what an operator launched in a row is one interval there, as long as its kernels together.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from qsync_core.cli.root import cli

DATA = Path(__file__).parents[1] / "data" / "h200" / "vgg16-bn"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, str]:
    """What the command prints as JSON, its trace, and what it prints for people."""
    trace = tmp_path_factory.mktemp("trace") / "both.json"
    files = [str(DATA / f"{source}.timeline.qsync") for source in ("predicted", "measured")]
    result = CliRunner().invoke(cli, ["verify", *files, "--json", "--perfetto", str(trace)])
    assert result.exit_code == 0, result.output
    return json.loads(result.output), json.loads(trace.read_text()), CliRunner().invoke(cli, ["verify", *files]).output


def test_every_part_is_near_and_they_add_up(compared):
    printed, _, text = compared
    parts = printed["step_parts"]["infer"]
    cpu_bound = parts.pop("cpu_bound")
    for source in ("predicted", "measured"):
        inside = (part for part in parts if part not in ("total", "dispatch"))
        assert sum(parts[part][source] for part in inside) == parts["total"][source] == printed["iteration_ns"][source]
    # Steps that are not recorded take 60.57 ms; the recorded one took 63.5, because the device waited for the profiled CPU.
    assert parts["total"]["measured"] == 60_568_964
    assert parts["idle"]["measured"] < 200_000
    assert parts["recording"]["measured"] == 0
    for part in ("forward", "backward", "optimizer", "total"):
        assert abs(parts[part]["error"]) < 0.03
    assert cpu_bound == {"predicted": False, "measured": False}
    # The scales and 8-bit copies of many weights are made together, at the start of forward.
    assert [row["phase"] for row in printed["unattributed"] if row["measured"] > 10**6] == ["forward"]
    assert "device idle" in text
    assert "= step" in text
    assert "CPU dispatch" in text
    assert "the CPU is the step" not in text


def test_one_trace_of_both(compared):
    _, trace, _ = compared
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "rank 0 (infer, predicted)", 1: "rank 0 (infer, measured)"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {tracks[0, 1], tracks[0, 2], tracks[1, 1], tracks[1, 2]} == {"CPU dispatch", "compute stream"}
    begin = {}
    for track in tracks:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track)
        assert all(later >= end - 1e-6 for (_, end), (later, _) in pairwise(spans))
        begin[track] = spans[0][0]
    assert begin[0, 2] == begin[1, 2]

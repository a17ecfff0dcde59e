"""The trace of a timeline, as the Trace Event Format wants it."""

from __future__ import annotations

import json

from artifact_strategies import timelines
from hypothesis import given

from qsync_core.artifacts.perfetto import comparison_to_perfetto, to_perfetto
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Interval, Timeline


def test_a_timeline_by_hand() -> None:
    conv = Interval("conv1 int8", OpId("conv1"), Phase.FORWARD, Resource.COMPUTE, 1, 1_500, 2_001)
    bucket = Interval("bucket 0", None, Phase.COMMUNICATION, Resource.COMMUNICATION, 0, 4_000, 10)
    trace = to_perfetto(Timeline("predicted", "resnet", 5_000, {0: "train", 1: "infer"}, (conv, bucket)))
    assert trace["otherData"] == {"model": "resnet", "source": "predicted", "iteration_ns": 5_000}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(complete, key=lambda event: -event["pid"]) == [
        {
            "ph": "X",
            "name": "conv1 int8",
            "cat": "forward",
            "pid": 1,
            "tid": 2,
            "ts": 1.5,
            "dur": 2.001,
            "args": {"phase": "forward", "operator": "conv1#0"},
        },
        {
            "ph": "X",
            "name": "bucket 0",
            "cat": "communication",
            "pid": 0,
            "tid": 3,
            "ts": 4.0,
            "dur": 0.01,
            "args": {"phase": "communication"},
        },
    ]
    names = {(event["name"], event["pid"], event["tid"]): event["args"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names["process_name", 1, 0] == {"name": "rank 1 (infer, predicted)"}
    assert names["thread_name", 1, 2] == {"name": "compute stream"}
    assert names["thread_name", 0, 3] == {"name": "communication stream"}


@given(timelines())
def test_any_timeline(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(to_perfetto(timeline), allow_nan=False))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(timeline.intervals)
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} == named
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)


def _step(rank: int, *rows: tuple[Resource, int, int]) -> tuple[Interval, ...]:
    phase = {Resource.COMMUNICATION: Phase.COMMUNICATION}
    return tuple(Interval(f"{r}", None, phase.get(r, Phase.BACKWARD), r, rank, start, end - start) for r, start, end in rows)


CPU, GPU, LINK = Resource.DISPATCH, Resource.COMPUTE, Resource.COMMUNICATION


def test_a_comparison_by_hand() -> None:
    """Two groups, the second of two ranks: each group's prediction, then its measured ranks, on one scale of time."""
    predicted = Timeline(
        "predicted",
        "m",
        900,
        {0: "fast", 1: "slow"},
        (*_step(0, (GPU, 0, 300), (LINK, 300, 900)), *_step(1, (GPU, 0, 700), (LINK, 700, 900))),
    )
    measured = Timeline(
        "measured",
        "m",
        950,
        {0: "fast", 1: "slow", 2: "slow"},
        (
            *_step(0, (CPU, 0, 50), (GPU, 40, 340), (LINK, 340, 1_000)),
            *_step(1, (GPU, 60, 800), (LINK, 800, 1_010)),
            *_step(2, (GPU, 45, 790), (LINK, 790, 970)),
        ),
    )
    trace = comparison_to_perfetto(predicted, measured)
    assert trace["otherData"] == {"model": "m", "predicted_iteration_ns": 900, "measured_iteration_ns": 950}
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {
        0: "rank 0 (fast, predicted)",
        1: "rank 0 (fast, measured)",
        2: "rank 1 (slow, predicted)",
        3: "rank 1 (slow, measured)",
        4: "rank 2 (slow, measured)",
    }
    spans = {
        (event["pid"], event["tid"]): (round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3))
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    }
    # The measured all-reduces end together at 1000, and the fast rank's device begins at 40, where its prediction does.
    assert spans == {
        (0, 2): (40, 340),
        (0, 3): (340, 940),
        (1, 1): (0, 50),
        (1, 2): (40, 340),
        (1, 3): (340, 1_000),
        (2, 2): (40, 740),
        (2, 3): (740, 940),
        (3, 2): (50, 790),
        (3, 3): (790, 1_000),
        (4, 2): (75, 820),
        (4, 3): (820, 1_000),
    }


@given(timelines(), timelines())
def test_any_comparison(predicted: Timeline, measured: Timeline) -> None:
    trace = json.loads(json.dumps(comparison_to_perfetto(predicted, measured), allow_nan=False))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(predicted.intervals) + len(measured.intervals)
    for what, keys in (("thread_name", ("pid", "tid")), ("process_name", ("pid",))):
        named = [tuple(event[key] for key in keys) for event in trace["traceEvents"] if event["name"] == what]
        assert len(named) == len(set(named))
        assert {tuple(event[key] for key in keys) for event in complete} <= set(named)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)

"""The trace of a timeline, as the Trace Event Format wants it."""

from __future__ import annotations

import json

from artifact_strategies import timelines
from hypothesis import given

from qsync_core.artifacts.perfetto import to_perfetto
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Interval, Timeline


def test_a_timeline_by_hand() -> None:
    conv = Interval("conv1 int8", OpId("conv1"), Phase.FORWARD, Resource.COMPUTE, 1, 1_500, 2_001)
    bucket = Interval("bucket 0", None, Phase.COMMUNICATION, Resource.COMMUNICATION, 0, 4_000, 10)
    trace = to_perfetto(Timeline("predicted", "resnet", 5_000, {0: "train", 1: "infer"}, (conv, bucket)))
    assert trace["otherData"] == {"model": "resnet", "source": "predicted", "iteration_ns": 5_000}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert complete == [
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

"""Ways of a job are measured once, also by a run that was ended."""

from __future__ import annotations

import json

import pytest

from jobs import measured
from jobs.measured import JobOf, measure
from jobs.places import Ended, Machine, Place
from jobs.ways import Planned, train

WAYS = {
    "full": Planned("full", ("a", "b"), 100_000_000),
    "plan": Planned("plan", ("a", "b"), 80_000_000),
    "a alone": Planned("alone", ("a", "b")),
    "of a": Planned("plan", ("a",), 50_000_000),
}


class Fake(Place):
    """A place whose starts end as a function says; keeps what was started."""

    def __init__(self, ends):
        super().__init__((Machine("a", {}, 2), Machine("b", {})), False)
        object.__setattr__(self, "starts", [])
        object.__setattr__(self, "ends", ends)

    def run(self, groups, command, extra, limit_s):
        modes = extra.get("MODES", "").split()
        self.starts.append((tuple(groups), modes, extra.get("FIRST")))
        return self.ends(tuple(groups), modes)


def steps(*modes, ok=True, late=False):
    text = "".join(f"STEP {json.dumps({'mode': mode, 'ms': 100.0, 'samples': 24})}\n" for mode in modes)
    return Ended((0 if ok else 1,), text + ("" if ok else "RuntimeError: it broke\n"), 1.0, late)


def test_all_groups_train_in_one_start_and_what_failed_there_by_itself():
    place = Fake(lambda groups, modes: steps("full", ok=False) if len(modes) > 1 else steps(*(m for m in modes if m != "alone")))
    kept = []
    found, are_all = train(place, WAYS, {}, keep=lambda ways: kept.append(dict(ways)))
    everyone = ("a", "b")
    alone = [(everyone, ["plan"], "2"), (everyone, ["alone"], "2"), (("a",), ["plan"], "2")]
    assert place.starts == [(everyone, ["full", "plan", "alone"], "2"), *alone]
    assert are_all
    assert {name: bool(way.measured) for name, way in found.items()} == {"full": True, "plan": True, "a alone": False, "of a": True}
    assert found["a alone"].failure
    assert found["full"].off == 0
    assert found["full"].rate == 240
    assert [len(ways) for ways in kept] == [1, 2, 3, 4]


def test_a_start_that_the_end_of_the_time_cuts_off_is_not_a_failure():
    place = Fake(lambda groups, modes: steps("full", ok=False, late=True))
    found, are_all = train(place, WAYS, {}, seconds=lambda: 30.0)
    assert (list(found), are_all) == (["full"], False)
    going_on = Fake(lambda groups, modes: steps(*modes))
    found, are_all = train(going_on, WAYS, {}, known=found)
    assert going_on.starts[0][1] == ["plan", "alone"]
    assert (len(found), are_all) == (4, True)


def test_nothing_is_started_without_time():
    place = Fake(lambda groups, modes: steps(*modes))
    assert train(place, WAYS, {}, seconds=lambda: 5.0) == ({}, False)
    assert not place.starts


JOB, HERE = JobOf("job", "a job", "resnet50", "float32"), {"commit": "abc"}


def test_preparing_goes_on_where_a_call_ended_and_counts_all_its_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "prepare", lambda *_: Ended((1, 1), "", 200.0, late=True))
    for calls in (1, 2):
        found = measure(JOB, Fake(None), tmp_path, HERE, lambda: 200.0)
        assert (found.calls, found.prepare_s, found.is_finished, found.why) == (calls, 200.0 * calls, False, "")
    found = measure(JOB, Fake(None), tmp_path, HERE, lambda: 200.0)
    assert found.is_finished
    assert found.why == "prepare has not ended within 600 s"
    monkeypatch.setattr(measured, "prepare", None)  # nothing is tried again
    assert measure(JOB, Fake(None), tmp_path, HERE, lambda: 200.0) == found


@pytest.mark.parametrize("other", [{"commit": "def"}, {"commit": "abc", "device": "H100"}])
def test_what_another_commit_or_device_measured_does_not_count(tmp_path, monkeypatch, other):
    monkeypatch.setattr(measured, "prepare", lambda *_: Ended((1, 1), "RuntimeError: no memory", 20.0))
    assert measure(JOB, Fake(None), tmp_path, HERE, lambda: 200.0).why == "prepare failed: RuntimeError: no memory"
    assert measure(JOB, Fake(None), tmp_path, other, lambda: 1.0).calls == 0

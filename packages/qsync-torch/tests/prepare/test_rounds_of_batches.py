"""How often ``qsync prepare`` measures steps of other local batches, and makes plans of them."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

from qsync_torch.prepare import flow


def test_what_is_measured_goes_into_plans_however_often_these_change_their_batches(monkeypatch):
    done, sizes = [], itertools.count(17)
    planning = SimpleNamespace(
        steps=lambda rungs: [lambda: (done.append("plan") or {}, ())],
        batches_to_measure=lambda: {"fast": next(sizes)},
        last_steps=lambda: [lambda: (done.append("report") or {}, ())],
    )
    monkeypatch.setattr(flow._Flow, "_planning", lambda *_: planning)
    monkeypatch.setattr(flow._Flow, "_write_cluster", lambda *_: None)
    monkeypatch.setattr(flow._Flow, "_in_waves", lambda self, groups, measure: done.extend(group.name for group in groups))
    folder = SimpleNamespace(
        rank=0, together=lambda **_: nullcontext(), told=lambda facts: {0: facts}, publish=lambda made, removed: None
    )
    groups = [SimpleNamespace(name="fast"), SimpleNamespace(name="slow")]
    flow._Flow(None, folder, None)._plan(SimpleNamespace(dag=None), groups, SimpleNamespace(groups=()), "prepare")
    assert done == ["plan", *["fast", "plan"] * flow.BATCH_ROUNDS, "report"]

"""The profiles that come with the package: complete, replayable, and said to be no measurement."""

from __future__ import annotations

from qsync_torch.demo.report import stored_conclusion, stored_section
from qsync_torch.demo.stored_profiles import replay_stored


def test_plans_are_made_for_gpus_that_are_not_here():
    stored = replay_stored()
    assert "NVIDIA H200" in stored.what
    full, uniform, qsync = (stored.row(name) for name in ("full", "uniform", "qsync"))
    assert set(full.operators) == {"float32"}
    assert full.objective == 0 < qsync.objective < uniform.objective
    assert uniform.predicted_ns < full.predicted_ns
    assert qsync.predicted_ns <= uniform.predicted_ns
    assert qsync.operators["float32"] > 0
    section = stored_section(stored)
    assert "replayed, not measured here" in section.title
    assert stored_conclusion(stored) in section.sentences
    assert len(section.parts[0].rows) == 3

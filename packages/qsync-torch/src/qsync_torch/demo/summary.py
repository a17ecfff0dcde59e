"""The demo's outcome as JSON, for ``--json`` and for benchmarks."""

from __future__ import annotations

from typing import Any

import attrs

from qsync_torch.demo.outcome import Outcome, Row


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Everything in the table and in the sentences under it; times in ns, memory in bytes."""
    return {
        "model": outcome.model,
        "steps": outcome.steps,
        "weakness": outcome.weakness,
        "step_ratio": outcome.step_ratio,
        "budget_bytes": outcome.budget_bytes,
        "qsync_over_uniform": outcome.over("uniform"),
        "qsync_over_full": outcome.over("full"),
        "recovered_share": outcome.recovered,
        "room": outcome.room,
        "prediction_errors": dict(outcome.prediction_errors),
        "methods": [_row(row) for row in outcome.rows],
        "probes": [_row(row) for row in outcome.probes],
        "strong_core_share": outcome.strong_core_share,
        "seconds": outcome.seconds,
    }


def _row(row: Row) -> dict[str, Any]:
    return {**attrs.asdict(row), "operators": dict(row.operators), "error": row.error}

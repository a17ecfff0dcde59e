"""Row C10 in seconds: Ω of whole plans of a net whose operators share most masks that flip, against what plans do to gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.omega import Effort, measure


@pytest.mark.nightly
@pytest.mark.slow
def test_whole_plans_of_a_depthwise_net() -> None:
    """Parts of flips that add up by one exponent for all models made 1.8 and 1.5 of the first two."""
    found = measure("depthwise", Effort(warmup=30, updates=12, draws=1, plans=3)).ratios
    assert set(found) == {"int8", "bfloat16", "float16"}
    assert found == {plan: pytest.approx(1.0, abs=0.35) for plan in found}, found

"""How many examples hypothesis tries a law with: few and always the same ones in CI, many and new ones in the nightly environment.

``QSYNC_HYPOTHESIS`` names the profile, ``ci`` or ``nightly``.
"""

from __future__ import annotations

import math
import os
from typing import Any

from hypothesis import settings

PROFILE = os.environ.get("QSYNC_HYPOTHESIS", "ci")
TIMES = {"ci": 0.25, "nightly": 10}
"""How many times the examples that a test asks for are tried, by profile."""

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=500)
settings.load_profile(PROFILE)


def tries(count: int, **others: Any) -> settings:
    """Return the settings of a law that a quarter of ``count`` examples try in CI, and ten times ``count`` nightly."""
    return settings(max_examples=math.ceil(count * TIMES[PROFILE]), **others)

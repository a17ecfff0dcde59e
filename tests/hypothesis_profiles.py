"""How many examples hypothesis tries a law with: few and always the same ones in CI, many and new ones in the nightly environment.

``QSYNC_HYPOTHESIS`` names the profile, ``ci`` or ``nightly``.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

PROFILE = os.environ.get("QSYNC_HYPOTHESIS", "ci")
MOST_IN_CI = 25

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=MOST_IN_CI)
settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=500)
settings.load_profile(PROFILE)


def tries(count: int, **others: Any) -> settings:
    """Return the settings of a law that a quarter of ``count`` examples try in CI, 25 at most, and ten times ``count`` nightly."""
    return settings(max_examples=min(-(-count // 4), MOST_IN_CI) if PROFILE == "ci" else 10 * count, **others)

"""Profiles that take a moment, as scripts that run commands many times need them."""

from __future__ import annotations

from functools import partial

from qsync_torch.profiling import profile
from qsync_torch.profiling.bench import Efforts
from qsync_torch.timing import Effort


def shorten_profiles(most: int, seconds: float) -> None:
    """Let ``qsync profile`` time everything a few times in this process."""
    effort = Effort(min_repeats=2, max_repeats=most, budget_s=seconds, warmup=0)
    profile.ProfileRequest = partial(profile.ProfileRequest, efforts=Efforts(effort, effort, effort))  # type: ignore[misc,assignment]

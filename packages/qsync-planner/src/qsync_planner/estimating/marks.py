"""What is said wherever something rests on an estimated profile."""

from __future__ import annotations

from collections.abc import Mapping

from qsync_core.ir.profile import Profile


def estimated_groups(profiles: Mapping[str, Profile]) -> dict[str, str]:
    """Name the device from whose measurements each group's profile was scaled; measured groups are absent."""
    return {name: profile.estimated_from for name, profile in profiles.items() if profile.estimated_from}


def estimate_notes(estimated: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for every such group."""
    return tuple(f"the costs of group {name} are estimated from {device}, not measured" for name, device in estimated.items())

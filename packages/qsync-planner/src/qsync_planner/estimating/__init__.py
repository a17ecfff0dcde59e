"""Profiles of devices that are not at hand, estimated from a measured one (docs/absent-gpus.md)."""

from qsync_planner.estimating.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]

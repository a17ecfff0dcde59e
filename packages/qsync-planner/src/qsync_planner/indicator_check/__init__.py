"""An indicator beside the measured truth: how well it ranks, what its mistakes cost, and whether its magnitudes are right."""

from qsync_planner.indicator_check.compare import compare
from qsync_planner.indicator_check.truth import Truth, read_kept_inputs, read_truth

__all__ = ["Truth", "compare", "read_kept_inputs", "read_truth"]

"""What people read about plans: explanations, differences, the report of a run and the page of a trade-off."""

from qsync_planner.reporting.page import is_installed, require_pages
from qsync_planner.reporting.report import write_report

__all__ = ["is_installed", "require_pages", "write_report"]

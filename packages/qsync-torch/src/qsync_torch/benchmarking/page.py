"""What was measured as one HTML page: bars of times under every problem, in light and dark, wide and narrow.  No torch here."""

from __future__ import annotations

from importlib import resources

from qsync_core.units import format_ns
from qsync_torch.benchmarking.results import BASELINES, NOT_FINITE, Suite, by_problem, fastest_of, reasons, speedup, standings


def render(suite: Suite) -> str:
    """The page, whole: it loads nothing."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": lambda ns: format_ns(round(ns)), "relative": relative, "figure": figure, "limit": _limit}
    template = environment.from_string(resources.files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    problems = [(key, rows, fastest_of(rows)) for key, rows in by_problem(suite.rows).items()]
    return template.render(
        suite=suite, problems=problems, standings=standings(suite), reasons=reasons(suite), speedup=speedup, baselines=BASELINES
    )


def relative(error: float | None) -> str:
    """A relative error in two digits; a dash where it was not looked at."""
    return "–" if error is None else "not finite" if error == NOT_FINITE else f"{error:.1e}"


def figure(value: float) -> str:
    """A rate in three digits, in whole numbers where it has more."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _limit(rate: float, name: str) -> str:
    return f"{figure(rate / 1e9)} GB/s" if name == "copy" else f"{figure(rate / 1e12)} TFLOP/s"

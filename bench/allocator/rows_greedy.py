"""Rows A4: what greedy plans cost over the optimum, by solver, start and regime."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping

from allocator.bench import PROVEN, Bench, by_seed, quartiles, row
from allocator.greedy_paper import solve_greedy_paper
from allocator.instances import REGIMES, Instance, instance
from allocator.solving import Row
from qsync_planner.allocator.baselines import UniformStart, move_to_uniform, time_limit_ns
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.greedy import move_to_fastest, recover_by_density, solve_greedy
from qsync_planner.allocator.problem import SearchState, build_problem
from qsync_planner.allocator.recovery import move_to_fitting, recover
from qsync_planner.allocator.solution import Solution
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

SEEDS = 6
"""At most; five ways to plan each instance take several seconds."""

Starts = Mapping[str, UniformStart]
Way = Callable[[SearchState, Starts, int], None]


def greedy_rows(bench: Bench) -> Iterator[Row]:
    """A4-REGIME-WAY, over the instances of A1 whose optimum is proven.

    Raises:
        AssertionError: a greedy plan that is better than what was proven to be the best.
    """
    seeds = range(min(bench.seeds, SEEDS))
    for regime in REGIMES:
        ratios: dict[str, list[float]] = {name: [] for name in WAYS}
        unproven = 0
        for name in bench.paper_models:
            for seed in seeds:
                found = instance(name, by_seed(seed), regime, seed)
                optimum = bench.solve(found, "exact")
                if optimum.gap > PROVEN and bench.solver is None:
                    unproven += 1
                    continue
                for way, objective in _objectives(found).items():
                    proven = optimum.bound or 0.0
                    assert objective >= proven * (1 - PROVEN), f"{found.label}: {way} has {objective}, proven is {proven}"
                    ratios[way].append(_ratio(objective, optimum.objective))
        for way, values in ratios.items():
            finite = [value for value in values if math.isfinite(value)]
            if not finite:
                continue
            notes = [f"{len(values) - len(finite)} more where only the optimum is 0"] if len(finite) < len(values) else []
            notes += [f"{unproven} left out, not proven"] if unproven else []
            yield row(
                f"A4-{regime}-{way}",
                f"{DESCRIPTIONS[way]}: Σ Ω over the proven optimum, median; regime {regime}, {len(seeds)} seeds of each model",
                round(statistics.median(finite), 4),
                "ratio",
                "reported",
                "; ".join([quartiles(finite, 4), *notes]),
            )


def _ratio(objective: float, optimum: float) -> float:
    if optimum == 0:
        return 1.0 if objective == 0 else math.inf
    return objective / optimum


def _objectives(found: Instance) -> dict[str, float]:
    """Σ Ω of the plan that each way finds.

    Raises:
        AssertionError: a plan that breaks a limit.
    """
    problem = build_problem(Inputs(found.dag, found.cluster, found.profiles, found.sensitivity))
    objectives = {}
    for name, way in WAYS.items():
        state = SearchState(problem, Replayer(Inputs(found.dag, found.cluster, found.profiles)))
        programs = Programs(state.replayer)
        starts = {group.name: move_to_uniform(state, group.name, programs) for group in problem.groups}
        limit_ns = time_limit_ns(state.prediction.iteration_ns, found.tolerance)
        way(state, starts, limit_ns)
        assert state.prediction.iteration_ns <= limit_ns, f"{found.label}: the plan of {name} takes too long"
        assert Solution.of(state).fits(problem), f"{found.label}: the plan of {name} does not fit"
        objectives[name] = problem.objective(state.all_rungs())
    return objectives


def _greedy(state: SearchState, starts: Starts, limit_ns: int) -> None:
    solve_greedy(state, starts, limit_ns)


def _mended(start: str, order: str) -> Way:
    """One of the recoveries among which ``greedy`` chooses."""

    def run(state: SearchState, starts: Starts, limit_ns: int) -> None:
        if start == "fastest":
            for group in state.problem.groups:
                move_to_fastest(state, group.name)
                if not move_to_fitting(state, group.name):
                    state.move_to(group.name, starts[group.name].rungs)
            if state.prediction.iteration_ns > limit_ns:
                for name, uniform in starts.items():
                    state.move_to(name, uniform.rungs)
        (recover if order == "gain" else recover_by_density)(state, limit_ns)

    return run


def _paper(start: str) -> Way:
    def run(state: SearchState, starts: Starts, limit_ns: int) -> None:
        solve_greedy_paper(state, starts, limit_ns, start=start)

    return run


WAYS: dict[str, Way] = {
    "greedy": _greedy,
    "greedy-fastest": _mended("fastest", "gain"),
    "greedy-uniform": _mended("uniform", "gain"),
    "greedy-paper-fastest": _paper("fastest"),
    "greedy-paper-uniform": _paper("uniform"),
}
DESCRIPTIONS = {
    "greedy": "greedy, best of both starts and orders, pairs raised",
    "greedy-fastest": "greedy from the fastest plan, in the paper's order",
    "greedy-uniform": "greedy from uniform precision, in the paper's order",
    "greedy-paper-fastest": "greedy as the paper prints it, from its own initial plan",
    "greedy-paper-uniform": "greedy as the paper prints it, from uniform precision",
}

"""``exact`` and ``auto``: the best plan with a proof, group by group; no group's deadlines depend on another group's plan.

The proof (docs/design/exact-allocator.md#deadlines) takes collectives for what the buckets of gradients are: started in the
backward pass, of a duration that no plan changes.  Where that does not hold, the solver says so, and replayed trials do the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.units import format_bytes
from qsync_planner.allocator.baselines import UniformStart
from qsync_planner.allocator.exact.choices import TooManyCombinations
from qsync_planner.allocator.exact.program import SolverFailed, is_installed, require_solver
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.exact.search import PROVEN_GAP, Answer, Effort, Progress, Search, TimeLeft
from qsync_planner.allocator.problem import GroupProblem, Problem, SearchState
from qsync_planner.allocator.recovery import History, Refusal, new_history, overruns, slack_ns, sweep_until_stable
from qsync_planner.allocator.solution import Solution, added_time_text, refusal_text, slack_text

_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "sync_batch_norm")


class NoDeadlineForm(PlanError):
    """The job's period is not a matter of deadlines of each group alone."""


NO_PROGRAM = (NoDeadlineForm, TooManyCombinations, SolverFailed)
"""Why a problem may have no program, or none that can be solved; trials by replay do without."""
AUTO = Effort(work=800_000, columns=20_000, labels=30_000, enough=1e-4)
"""``auto`` searches the tree of programs up to this size; larger ones are relaxed and rounded, to a fraction of a percent."""
EXACT = Effort()
RELAXED = Effort(columns=0, rounds=False)
"""The effort for a bound alone."""
_NO_BUDGET = 2**63
"""More than any budget."""
_DEAR = 1.2
"""Times the Σ Ω that would do without contention, from which on a plan's notes speak of it."""
_SURELY_BEST = 2e-9
"""Distance to the bound of plans that labels proved to be the best."""


def check_deadline_form(dag: PrecisionDag) -> None:
    """Refuse a model with a collective inside its forward pass.

    Raises:
        NoDeadlineForm: naming the operator.
    """
    for operator in dag.operators:
        if any(name in operator.kind for name in _COLLECTIVES):
            raise NoDeadlineForm(
                f"operator {operator.op_id} ({operator.kind}) waits for other ranks in the middle of the forward pass, so that no "
                "group's deadlines are its own"
            )


def solve_exactly(
    state: SearchState,
    uniform: Mapping[str, UniformStart],
    limit_ns: int,
    effort: Effort,
    programs: Programs,
    *,
    seconds: float | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """The best plan that keeps ``limit_ns`` and every budget, its bound and reasons.

    Args:
        state: at any plan; left at the plan found.
        uniform: uniform precision of every group, which keeps both limits.
        effort: how far to go for a group.
        programs: of the problem's groups.
        seconds: wall-clock time for all groups together, shared evenly among those that are left.

    Raises:
        PlanError: when HiGHS is not installed.
    """
    require_solver("the exact solver", ", or use --solver greedy")
    check_deadline_form(state.problem.dag)
    left = TimeLeft(seconds)
    starts = {name: start.rungs for name, start in uniform.items()}
    answers = answer(state, programs, starts, limit_ns, effort, seconds=seconds, progress=progress)
    alone = bound = adopt(state, answers)
    if state.prediction.iteration_ns > limit_ns:
        within = attrs.evolve(effort, seconds=left.share())
        bound = max(bound, solve_jointly(state, starts, limit_ns, within, programs, progress))
    fuse_where_faster(state, limit_ns)
    late = seconds is not None and (left.share() or 0.0) < seconds / 2
    solution = with_proof(state, limit_ns, bound, raise_further=not late, explain=not late)
    if not programs.contended:
        return solution
    return attrs.evolve(solution, notes=(*solution.notes, *_dear_contention(state.problem.objective(solution.rungs), alone)))


def fuse_where_faster(state: SearchState, limit_ns: int) -> None:
    """Fuse chains, or leave them, where that makes a group faster and costs no Ω, within the limits: programs take no side then."""
    for group in state.problem.groups:
        for index, unit in enumerate(group.units):
            for rung in range(len(unit.rungs)) if unit.is_chain else ():
                present, before = state.rung(group.name, index), state.prediction.groups[group.name]
                if rung == present or unit.omega[rung] > unit.omega[present]:
                    continue
                found = state.try_moves(group.name, {index: rung})
                after = found.groups[group.name]
                faster = (after.period_ns, after.busy_ns) < (before.period_ns, before.busy_ns)
                if faster and found.iteration_ns <= limit_ns and group.fits(after.peak_bytes):
                    state.accept()
                else:
                    state.reject()


def _dear_contention(objective: float, alone: float) -> tuple[str, ...]:
    """Note that the last percent of time is dear, where Σ Ω could be much less if ranks did not slow each other down."""
    least = max(0.0, alone)
    if objective <= _DEAR * least:
        return ()
    return (
        "ranks that finish together slow each other down, for which this time limit leaves little room: Σ Ω is "
        f"{objective:.4g}, and without that might be {least:.4g}; a --tolerance of 0.005 or 0.01 may give most of it back",
    )


def solve_jointly(
    state: SearchState,
    starts: Mapping[str, Sequence[int]],
    limit_ns: int,
    effort: Effort,
    programs: Programs,
    progress: Progress = lambda text: None,
    budgets: Mapping[str, int] | None = None,
) -> float:
    """Leave the state at a plan that keeps a limit which is not a matter of each group alone, because open collectives delay ranks.

    Groups of one kind and budget, which share their plan, are solved for with all others as they are, until nothing gets better.

    Args:
        starts: a plan that keeps every limit.
        budgets: memory budgets other than the groups' own.

    Returns:
        Σ Ω over all inference devices that no plan is below; minus infinity where more than one group is free.
    """
    groups, bound = state.problem.groups, -math.inf
    budgets = budgets or {group.name: group.group.memory_bytes for group in groups}
    for name, rungs in starts.items():
        state.move_to(name, rungs)
    blocks: dict[tuple[object, ...], list[GroupProblem]] = {}
    for group in groups:
        blocks.setdefault((programs.kind(group), budgets[group.name], tuple(starts[group.name])), []).append(group)
    better = True
    while better:
        better = False
        for block in blocks.values():
            first, present = block[0], state.rungs(block[0].name)
            names = {group.name for group in block}
            program = programs.joint(first, state.problem.variants(state.all_rungs()), names, limit_ns)
            found = Search(first, program, limit_ns, budgets[first.name], effort, progress).run(present)
            if len(groups) == 1:
                bound = first.group.count * found.bound
            if first.omega(found.plan.rungs) < first.omega(present):
                for name in names:
                    state.move_to(name, found.plan.rungs)
                better = len(blocks) > 1
    return bound


def answer(
    state: SearchState,
    programs: Programs,
    starts: Mapping[str, Sequence[int]],
    limit_ns: int,
    effort: Effort,
    *,
    budgets: Mapping[str, int] | None = None,
    seconds: float | None = None,
    progress: Progress = lambda text: None,
) -> dict[str, Answer]:
    """The search of every group from its plan in ``starts``; other memory budgets than the groups' own by name."""
    left, groups = TimeLeft(seconds), state.problem.groups
    found: dict[str, Answer] = {}
    known: dict[int, list[Answer]] = {}
    # Of groups of one kind the roomiest first: a plan that is the best of more plans, and fits, is the best of fewer.
    sizes = {group.name: (group.group.memory_bytes if budgets is None else budgets[group.name]) or _NO_BUDGET for group in groups}
    for number, group in enumerate(sorted(groups, key=lambda group: -sizes[group.name])):
        budget = 0 if sizes[group.name] == _NO_BUDGET else sizes[group.name]
        share = attrs.evolve(effort, seconds=left.share(len(groups) - number), bound_seconds=left.share())
        alike = known.setdefault(programs.kind(group), [])
        fitting = [entry for entry in alike if entry.plan.peak_bytes <= sizes[group.name]]
        if not fitting:
            alike.append(Search(group, programs.of(group), limit_ns, budget, share, progress).run(starts[group.name]))
            fitting = alike[-1:]
        found[group.name] = min(fitting, key=lambda entry: group.omega(entry.plan.rungs))
    return found


def adopt(state: SearchState, answers: Mapping[str, Answer]) -> float:
    """Leave the state at the plans found; returns Σ Ω over all inference devices that no plan is below."""
    for group in state.problem.groups:
        state.move_to(group.name, answers[group.name].plan.rungs)
    return bound_of(state.problem, answers)


def bounded(state: SearchState, found: Solution, limit_ns: int, programs: Programs) -> Solution:
    """Another solver's plan with the bound of the relaxation, where HiGHS is installed."""
    if not is_installed():
        return found
    bound = 0.0
    try:
        check_deadline_form(state.problem.dag)
        for group in state.problem.groups:
            search = Search(group, programs.of(group), limit_ns, group.group.memory_bytes, RELAXED)
            bound += group.group.count * search.run(found.rungs[group.name]).bound
    except NO_PROGRAM:
        return found
    return _with_bound(state, found, bound)


def _with_bound(state: SearchState, solution: Solution, bound: float) -> Solution:
    """A solution with its bound, and a note on how good that proves it."""
    objective = state.problem.objective(solution.rungs)
    bound = min(max(0.0, bound), objective)
    return attrs.evolve(solution, bound=bound, notes=(*solution.notes, proof_note(objective, bound)))


def with_proof(state: SearchState, limit_ns: int, bound: float, *, raise_further: bool = True, explain: bool = True) -> Solution:
    """The state's plan with its bound and reasons.

    Args:
        raise_further: whether single steps that still fit are taken first, unless the bound says that there are none.
        explain: whether the reasons say what other choices would take, which needs a trial for every unit.
    """
    history, objective = new_history(state), state.problem.objective(state.all_rungs())
    if raise_further and relative_gap(objective, bound) > _SURELY_BEST:
        sweep_until_stable(state, limit_ns, history, bound)
    solution = Solution.of(state)
    if explain:
        solution = solution.with_reasons(
            state.problem, lambda group, index, unit, rung: _reason(state, group, index, limit_ns, history[group][index])
        )
    else:
        solution = solution.with_one_reason(state.problem, "part of the best plan that was found in the time given")
    return _with_bound(state, solution, bound)


def proof_note(objective: float, bound: float) -> str:
    """How good the plan is, for people."""
    gap = relative_gap(objective, bound)
    return "proven optimal" if gap <= PROVEN_GAP else f"proven to be within {max(gap, 1e-4):.2%} of the best plan"


def relative_gap(objective: float, bound: float) -> float:
    """Share of the objective by which a better plan could be below it."""
    return (objective - bound) / objective if objective > 0 else 0.0


def _reason(state: SearchState, group: str, index: int, limit_ns: int, history: History) -> str:
    """Why a unit runs as it does, with what the next choice up or down would take."""
    unit, rung, before = state.problem.by_name[group].units[index], state.rung(group, index), state.prediction.groups[group]
    label = unit.rungs[rung].label
    if len(unit.rungs) == 1:
        return f"{label}: the only variant that it may take"
    if rung < unit.top and history.refusals:
        return f"kept {label}: {refusal_text(unit, history.refusals[0])}"
    if rung < unit.top and unit.omega[rung] <= unit.omega[rung + 1]:
        return f"kept {label}: {refusal_text(unit, Refusal(rung + 1, 0, 0, gains=False))}"
    other = rung + 1 if rung < unit.top else rung - 1
    prediction = state.try_moves(group, {index: other})
    after, over = prediction.groups[group], overruns(state, group, prediction, limit_ns)
    state.reject()
    if rung < unit.top and any(over):
        return f"kept {label}: {refusal_text(unit, Refusal(rung + 1, *over, gains=True))}"
    if unit.is_chain and other < rung:
        return f"{label}: {unit.rungs[other].label} would take {added_time_text(after.busy_ns - before.busy_ns)}"
    if other < rung:
        added = added_time_text(before.busy_ns - after.busy_ns)
        return (
            f"raised to {label}: {added} over {unit.rungs[other].label}, {slack_text(slack_ns(state.prediction, group, limit_ns))}"
        )
    added, more = added_time_text(after.busy_ns - before.busy_ns), after.peak_bytes - before.peak_bytes
    memory = f" and {format_bytes(more)} more memory" if more > 0 else ""
    return f"kept {label}: {unit.rungs[other].label} would take {added}{memory}"


def bound_of(problem: Problem, answers: Mapping[str, Answer]) -> float:
    """Σ Ω over all inference devices that no plan is below."""
    return sum(group.group.count * answers[group.name].bound for group in problem.groups)

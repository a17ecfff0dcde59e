"""Plans of all solvers for measured profiles of real models: the tables of ``docs/plans-compared.md``.

    python bench/plans_compared.py [--only bert-base,resnet50]

Each model is planned where time binds (T of uniform precision, no memory budget) and where memory binds (a budget half-way between
the leanest single rung and full precision, any time), if full precision takes more than that; then over series of both limits.
Writes the tables between the markers of the page, and a row per model, limit and solver into ``docs/results/allocator.json``.
Times are processor time.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported

import argparse
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from allocator.greedy_paper import GreedyPaper
from qsync_core.artifacts.files import load
from qsync_core.cluster_file import read_cluster
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes, format_ns
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.replayer.replay import Replayer, plan_variants
from results import ROOT, names_in, write_rows

DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "plans-compared.md"
MODELS = {
    "bert-base": ("BERT-base", "h200"),
    "resnet50": ("ResNet50", "h200"),
    "vgg16-bn": ("VGG16-BN", "cpu"),
    "roberta-base": ("RoBERTa-base", "cpu"),
}
"""Stored profiles: title, and the folder of the device on which they were measured."""
WEAK = {"h200": "half of an H200", "cpu": "two cores of a CPU"}
FEW = 20
"""Operators of a model that are named one by one."""
LOOSE = 10.0
"""Tolerance where memory binds: as good as any time."""
SHARES = tuple(i / 10 for i in range(1, 10))
"""Budgets of the series: of the way from the leanest single rung to full precision."""
TOLERANCES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Tolerances of the other series."""
SOLVERS = ("uniform", GreedyPaper(), "greedy", "exact")
LIMITS = {"time": "time binds", "memory": "memory binds"}
HEADINGS = (
    "solver", "Σ Ω", "times the optimum", "proven gap", "step time", "peak memory", "operators on a weak device", "seconds to plan",
)  # fmt: skip


@attrs.frozen
class Case:
    """A model under one limit."""

    name: str
    limit: str
    dag: PrecisionDag
    cluster: Cluster
    profiles: dict[str, Profile]
    sensitivity: Sensitivity
    tolerance: float

    @property
    def weak(self) -> str:
        """The inference group."""
        return next(group.name for group in self.cluster.groups if group.role is Role.INFER)


@attrs.frozen
class Planned:
    """A plan and the processor time that it took."""

    plan: PrecisionPlan
    seconds: float


def read_case(name: str, limit: str, *, share: float = 0.5, tolerance: float = 0.0) -> Case:
    """A stored model; with ``memory``, given all the time that it wants, and a budget.

    Args:
        name: of :data:`MODELS`.
        limit: of :data:`LIMITS`.
        share: of the way from the leanest single rung to full precision, at which the budget lies.
        tolerance: over T, where time binds.
    """
    folder = DATA / MODELS[name][1] / name
    dag = load(folder / "dag.qsync", PrecisionDag)
    cluster = read_cluster(folder / "cluster.toml")
    profiles = {group.name: load(folder / f"profile.{group.name}.qsync", Profile) for group in cluster.groups}
    sensitivity = load(folder / "sensitivity.qsync", Sensitivity)
    replayer, groups = Replayer(Inputs(dag, cluster, profiles)), []
    for group in cluster.groups:
        if group.role is Role.INFER:
            peaks = [
                replayer.memory(group.name, dict.fromkeys((o.op_id for o in dag.adjustable), rung)).peak_bytes
                for rung in group.ladder
            ]
            group = attrs.evolve(
                group, memory_bytes=min(peaks) + round(share * (peaks[-1] - min(peaks))) if limit == "memory" else 0
            )
        groups.append(group)
    cluster = attrs.evolve(cluster, groups=tuple(groups))
    return Case(name, limit, dag, cluster, profiles, sensitivity, LOOSE if limit == "memory" else tolerance)


def full_precision_keeps_limits(case: Case) -> bool:
    """Whether there is nothing to decide."""
    uniform = allocate(Inputs(case.dag, case.cluster, case.profiles), Request("uniform", tolerance=case.tolerance))
    prediction = Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay({})
    budget = case.cluster.group(case.weak).memory_bytes
    return prediction.iteration_ns <= uniform.time_limit_ns and (not budget or prediction.groups[case.weak].peak_bytes <= budget)


def plan_all(case: Case, solvers: Sequence[str | GreedyPaper] = SOLVERS) -> dict[str, Planned]:
    """Every solver's plan, replayed and found within its limits."""
    found = {}
    for solver in solvers:
        begin = time.process_time()
        plan = allocate(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity), Request(solver, tolerance=case.tolerance))
        found[plan.solver] = Planned(plan, time.process_time() - begin)
        prediction = Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(plan_variants(plan, case.cluster))
        assert prediction.iteration_ns <= plan.time_limit_ns, f"{case.name}: {solver} takes too long"
        for group in plan.groups:
            peak, budget = prediction.groups[group.group].peak_bytes, group.memory_budget_bytes
            assert not budget or peak <= budget, f"{case.name}: {solver} takes too much memory"
    return found


def times_optimum(planned: Planned, best: Planned) -> float:
    """Σ Ω over that of the exact plan."""
    return planned.plan.objective / best.plan.objective if best.plan.objective else 1.0


def operators_by_precision(case: Case, plan: PrecisionPlan) -> str:
    """How many operators of a weak device run in which precision, lowest first."""
    group = next(group for group in plan.groups if group.group == case.weak)
    counts = Counter(assignment.variant for assignment in group.assignments.values())
    ladder = case.cluster.group(case.weak).ladder
    return ", ".join(f"{counts[variant]} {variant.label}" for variant in ladder if counts[variant])


def peak_bytes(case: Case, plan: PrecisionPlan) -> int:
    """Predicted peak of a weak device."""
    return next(group.predicted_peak_bytes for group in plan.groups if group.group == case.weak)


def proven_gap(plan: PrecisionPlan) -> str:
    """The gap in percent, where something was proven."""
    if plan.bound is None:
        return "–"
    gap = (plan.objective - plan.bound) / plan.objective if plan.objective else 0.0
    return "optimal" if gap <= 1e-6 else f"{gap:.2%}"


def table(case: Case, found: dict[str, Planned]) -> Iterator[str]:
    """The side-by-side table of a case."""
    best = found["exact"]
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|" + "---|" * len(HEADINGS)
    for solver, planned in found.items():
        plan = planned.plan
        cells = (
            solver, f"{plan.objective:.3g}", f"{times_optimum(planned, best):.3f}", proven_gap(plan),
            format_ns(plan.predicted_iteration_ns), format_bytes(peak_bytes(case, plan)), operators_by_precision(case, plan),
            f"{planned.seconds:.2f}",
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def differences(case: Case, found: dict[str, Planned]) -> Iterator[str]:
    """What the exact plan does otherwise than greedy's, by kind of layer, each change tried alone in greedy's plan."""
    greedy, best = (plan_variants(found[solver].plan, case.cluster) for solver in ("greedy", "exact"))
    weak, count = case.weak, case.cluster.group(case.weak).count
    ladder = case.cluster.group(weak).ladder
    kinds: dict[tuple[str, int, int], list[OpId]] = defaultdict(list)
    for op_id, variant in greedy[weak].items():
        wanted = best[weak][op_id]
        if variant != wanted:
            kinds[kind_of(op_id), ladder.index(variant), ladder.index(wanted)].append(op_id)
    if not kinds:
        yield "Greedy's plan and the exact plan are the same."
        return
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    before = replayer.replay(greedy).groups[weak]
    yield "What the exact plan does otherwise than greedy's, each line tried alone in greedy's plan:"
    yield ""
    yield "| layers | how many | greedy → exact | Σ Ω | weak device's own time | peak memory |"
    yield "|---|---|---|---|---|---|"
    for (kind, low, high), op_ids in sorted(kinds.items(), key=lambda entry: (entry[0][1] > entry[0][2], -len(entry[1]), entry[0])):
        changed = {**greedy, weak: {**greedy[weak], **{op_id: best[weak][op_id] for op_id in op_ids}}}
        after = replayer.replay(changed).groups[weak]
        omega = count * sum(omega_of(case, op_id, best[weak]) - omega_of(case, op_id, greedy[weak]) for op_id in op_ids)
        time_text = signed(after.busy_ns - before.busy_ns, format_ns)
        memory_text = signed(after.peak_bytes - before.peak_bytes, format_bytes)
        change = f"{ladder[low].label} → {ladder[high].label}"
        yield f"| `{kind}` | {len(op_ids)} | {change} | {omega:+.2g} | {time_text} | {memory_text} |"


def default_solver(case: Case, found: dict[str, Planned]) -> str:
    """How ``auto``, the default, does."""
    planned = plan_all(case, ("auto",))["auto"]
    ratio = times_optimum(planned, found["exact"])
    how = "ends with a plan as good as the exact one" if ratio <= 1 + 1e-6 else f"ends at {ratio:.4f} times the optimum"
    return f"`auto`, the default, {how} (proven gap: {proven_gap(planned.plan)}) after {planned.seconds:.2f} s."


def kept_high(case: Case, plan: PrecisionPlan) -> str:
    """Which operators of a weak device keep the base precision, by kind of layer."""
    group = next(group for group in plan.groups if group.group == case.weak)
    base = case.cluster.group(case.weak).ladder[-1]
    if len(group.assignments) <= FEW:
        names = (f"`{op_id.fqn}`" for op_id, assignment in group.assignments.items() if assignment.variant == base)
        return f"The exact plan keeps in {base.label}: {', '.join(names) or 'nothing'}."
    kinds = Counter(kind_of(op_id) for op_id in group.assignments)
    kept = Counter(kind_of(op_id) for op_id, assignment in group.assignments.items() if assignment.variant == base)
    listed = (f"`{kind}`" if kinds[kind] == 1 else f"{count} of {kinds[kind]} `{kind}`" for kind, count in kept.most_common())
    return f"The exact plan keeps in {base.label}: {', '.join(listed) or 'nothing'}."


def omega_of(case: Case, op_id: OpId, variants: Mapping[OpId, Variant]) -> float:
    """Ω of an operator as a plan has it."""
    return case.sensitivity.omega[op_id].get(variants[op_id], 0.0)


def kind_of(op_id: OpId) -> str:
    """A layer's name without the numbers of its block."""
    return re.sub(r"(?<=\.)\d+(?=\.)|\b\d+$|(?<=layer)\d+", "*", op_id.fqn)


def signed(value: int, text: Callable[[int], str]) -> str:
    """With its sign."""
    return "±0" if not value else ("+" if value > 0 else "−") + text(abs(value))


def section(case: Case, found: dict[str, Planned]) -> list[str]:
    """A case on the page."""
    title, device = MODELS[case.name]
    weak = case.cluster.group(case.weak)
    limit = found["exact"].plan.time_limit_ns
    what = f"T is {format_ns(limit)}; no memory budget."
    if case.limit == "memory":
        what = f"The budget is {format_bytes(weak.memory_bytes)} for each weak device; any time."
    intro = f"{len(case.dag.adjustable)} operators can be lowered on {weak.count} weak devices ({WEAK[device]}), "
    intro += f"{case.dag.batch_size} samples each. {what}"
    return [
        f"### {title}, {LIMITS[case.limit]}",
        "",
        intro,
        "",
        *table(case, found),
        "",
        default_solver(case, found),
        kept_high(case, found["exact"].plan),
        "",
        *differences(case, found),
        "",
    ]


def over_series(name: str) -> Iterator[str]:
    """How far the greedy solvers are from the best plan over series of limits."""
    title, _ = MODELS[name]
    series = {
        "time": ("tolerances of 0 to 50%", [read_case(name, "time", tolerance=tolerance) for tolerance in TOLERANCES]),
        "memory": ("budgets at 10 to 90% of the way", [read_case(name, "memory", share=share) for share in SHARES]),
    }
    lines = []
    for limit, (what, cases) in series.items():
        binding = [case for case in cases if not full_precision_keeps_limits(case)]
        planned = [plan_all(case, (GreedyPaper(), "greedy", "exact")) for case in binding]
        if not planned:
            continue
        for solver in ("greedy-paper", "greedy"):
            ratios = [times_optimum(found[solver], found["exact"]) for found in planned]
            best = sum(ratio <= 1 + 1e-6 for ratio in ratios)
            figures = (f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}", f"{best} of {len(ratios)}")
            cells = (f"{LIMITS[limit]}, {what}", solver, *figures)
            lines.append("| " + " | ".join(cells) + " |")
    if lines:
        yield from (
            f"### {title}, many limits",
            "",
            "| limits | solver | times the optimum, median | worst | optimal |",
            "|---|---|---|---|---|",
        )
        yield from (*lines, "")


def nothing_to_decide(case: Case) -> list[str]:
    """What the page says where full precision keeps the limit."""
    title, _ = MODELS[case.name]
    plan = plan_all(case, ("full",))["full"].plan
    if case.limit == "memory":
        why = f"full precision takes {format_bytes(peak_bytes(case, plan))}, and no single lower precision takes less"
    else:
        uniform, full = (format_ns(plan.baselines[name]) for name in ("uniform", "full"))
        why = f"a step takes {full} in full precision and {uniform} in uniform low precision"
    what = f"{case.limit.capitalize()} cannot bind at {case.dag.batch_size} samples each: {why}."
    return [f"### {title}, {case.limit}", "", what, ""]


def rows(case: Case, found: dict[str, Planned]) -> Iterator[dict[str, object]]:
    """The rows of a case for the results."""
    title, _ = MODELS[case.name]
    for solver, planned in found.items():
        plan = planned.plan
        step, peak = format_ns(plan.predicted_iteration_ns), format_bytes(peak_bytes(case, plan))
        yield {
            "id": f"real-{case.name}-{case.limit}-{solver}",
            "what": f"{title} from measured profiles, {LIMITS[case.limit]}: Σ Ω of {solver}'s plan over that of the best plan",
            "value": round(times_optimum(planned, found["exact"]), 4),
            "unit": "times the optimum",
            "spread": f"proven gap {proven_gap(plan)}; Σ Ω {plan.objective:.4g}; step {step}; peak {peak}; "
            f"{operators_by_precision(case, plan)}; {planned.seconds:.2f} s to plan",
            "target": "reported",
        }


def between_markers(text: str, name: str, lines: list[str]) -> str:
    """The page with one section replaced."""
    begin, end = f"<!-- {name}-BEGIN: written by bench/plans_compared.py -->", f"<!-- {name}-END -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{PAGE.name} has no place for {name}: {begin} … {end}")
    head, rest = text.split(begin, 1)
    return head + begin + "\n\n" + "\n".join(lines).rstrip() + "\n\n" + end + rest.split(end, 1)[1]


def main() -> None:
    """Plan, check and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help=f"models, comma-separated: {', '.join(MODELS)}")
    parser.add_argument(
        "--no-series", action="store_true", help="without the series of limits, to try the script; implies --no-write"
    )
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    options = parser.parse_args()
    write = not (options.no_write or options.no_series)
    names = names_in(options.only, MODELS, "models")
    where = {"directory": options.directory} if options.directory else {}
    plan_all(read_case("bert-base", "time"))  # imports and the first plan, which nobody's time should contain
    for name in names:
        lines: list[str] = []
        for limit in LIMITS:
            case = read_case(name, limit)
            if full_precision_keeps_limits(case):
                lines += nothing_to_decide(case)
                continue
            found = plan_all(case)
            lines += section(case, found)
            if write:
                write_rows("allocator", rows(case, found), "python bench/plans_compared.py", **where)
        lines += over_series(name) if not options.no_series else []
        print("\n".join(lines), flush=True)
        if write:
            PAGE.write_text(between_markers(PAGE.read_text(encoding="utf-8"), name.upper(), lines), encoding="utf-8")


if __name__ == "__main__":
    main()

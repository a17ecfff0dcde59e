"""The trade-off curve: its points against every plan there is, their figures, how to get them, and the page."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import tomllib
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import FULL, LADDERS, Case, random_case

from hypothesis_profiles import tries
from nightly import nightly
from qsync_core.artifacts.files import save
from qsync_core.cluster_file import read_cluster
from qsync_core.errors import InfeasibleError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import OpCost
from qsync_core.ir.variant import Variant
from qsync_core.units import parse_bytes
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact import program
from qsync_planner.allocator.exact.solve import RELAXED
from qsync_planner.allocator.exact.tradeoff import Tradeoff, TradeoffPoint, tradeoff
from qsync_planner.cli.plan import show_tradeoff
from qsync_planner.plugin import qsync_register_commands
from qsync_planner.replayer.replay import Replayer
from qsync_planner.reporting.page import Figure, Table
from qsync_planner.reporting.tradeoff_page import render_page, tradeoff_figure, tradeoff_section

needs_highs = pytest.mark.skipif(
    importlib.util.find_spec("highspy") is None, reason="the curve needs the extra qsync-planner[exact]"
)


def replayed(case: Case, variants: dict[str, dict[OpId, Variant]]) -> tuple[float, int, dict[str, int]]:
    """Σ Ω, step time and peaks of a plan, from scratch."""
    prediction = Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(variants)
    omega = sum(
        case.cluster.group(name).count * sum(rated(case, op_id, variant) for op_id, variant in chosen.items())
        for name, chosen in variants.items()
    )
    return omega, prediction.iteration_ns, {name: group.peak_bytes for name, group in prediction.groups.items()}


def rated(case: Case, op_id: OpId, variant: Variant) -> float:
    """Ω of an operator; where it is not rated with a result in float32, that with one in 16 bits, which is not less."""
    omega = case.sensitivity.omega[op_id]
    return omega[variant] if variant in omega else max(value for other, value in omega.items() if other.in_float32 == variant)


@functools.cache
def every_plan(seed: int) -> list[tuple[float, int, int]]:
    """Σ Ω, step time and peak of every plan of the one group there is, whatever its memory; kept for the next test."""
    case, found = random_case(seed, blocks=2), []
    for variants in case.assignments("infer0"):
        omega, period, peaks = replayed(case, {"infer0": variants})
        found.append((omega, period, peaks["infer0"]))
    return found


def tight_budget(case: Case) -> int:
    """Halfway between the least memory of a single rung and what full precision takes."""
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    peaks = [
        replayer.replay({"infer0": dict.fromkeys((o.op_id for o in case.dag.adjustable), rung)}).groups["infer0"].peak_bytes
        for rung in case.cluster.group("infer0").ladder
    ]
    return (min(peaks) + peaks[-1]) // 2


@needs_highs
@pytest.mark.parametrize("budget", [False, True], ids=["any memory", "a budget"])
@pytest.mark.parametrize("seed", [1, 4, 12])
def test_no_plan_at_all_is_better_than_a_point(seed: int, budget: bool) -> None:
    case = random_case(seed, blocks=2)
    if budget:
        case = case.with_memory(tight_budget(case))
    allowed = case.cluster.group("infer0").memory_bytes or 2**62
    plans = [plan for plan in every_plan(seed) if plan[2] <= allowed]
    found = tradeoff(case.inputs)
    for point in found.points:
        time, peak = point.iteration_ns, point.peak_bytes["infer0"]
        least = min(omega for omega, *rest in plans if rest[0] <= time and rest[1] <= peak)
        assert point.bound <= least * (1 + 1e-9)
        assert least <= point.omega * (1 + 1e-9)
        assert point.omega - least <= point.gap * point.omega + 1e-9
    assert found.points[0].iteration_ns == min(plan[1] for plan in plans)
    slow = max(found.baselines.values())
    assert min(point.omega for point in found.points) <= min(plan[0] for plan in plans if plan[1] <= slow)
    least_memory = min(plan[2] for plan in plans)
    step = 2**20 if max(plan[2] for plan in plans) - least_memory > 100 * 2**20 else 2**10
    assert least_memory <= min(point.peak_bytes["infer0"] for point in found.points) < least_memory + step


@needs_highs
@tries(12)
@given(seed=st.integers(0, 10_000), groups=st.integers(1, 3), train=st.integers(0, 1))
def test_points_are_what_they_say(seed: int, groups: int, train: int) -> None:
    case = random_case(seed, blocks=1, infer_groups=groups, train=train)
    found = tradeoff(case.inputs, budgets=3, limits=5)
    for point in found.points:
        variants = {name: dict(chosen) for name, chosen in point.variants.items()}
        omega, period, peaks = replayed(case, variants)
        assert (period, peaks) == (point.iteration_ns, dict(point.peak_bytes))
        # Who delivers 16 bits together with others counts that rounding also where they do not.
        assert omega <= point.omega * (1 + 1e-9)
        assert 0 <= point.bound <= point.omega
        assert point.fits(found.budgets[-1])
    for a in found.points:
        assert not any(b.dominates(a) for b in found.points)
    for level in range(len(found.budgets)):
        curve = found.curve(level)
        assert curve
        assert all(point.fits(found.budgets[level]) for point in curve)
        assert all(a.iteration_ns < b.iteration_ns and a.omega > b.omega for a, b in itertools.pairwise(curve))
    # More memory never costs Ω, at any time of the smaller budget's curve.
    for less, more in itertools.pairwise(range(len(found.budgets))):
        for point in found.curve(less):
            assert min(p.omega for p in found.curve(more) if p.iteration_ns <= point.iteration_ns) <= point.omega


@needs_highs
@pytest.mark.parametrize("seed", [1, 4, 12])
def test_bounds_hold_where_the_search_was_too_short(seed: int) -> None:
    """Only relaxed: most points are not the best plans, and say by how much they may not be."""
    case = random_case(seed, blocks=2)
    case = case.with_memory(tight_budget(case))
    plans = every_plan(seed)
    points = tradeoff(case.inputs, effort=RELAXED).points
    for point in points:
        within = [omega for omega, *rest in plans if rest[0] <= point.iteration_ns and rest[1] <= point.peak_bytes["infer0"]]
        assert point.bound <= min(within) * (1 + 1e-9)
        assert point.omega - min(within) <= point.gap * point.omega + 1e-9
    assert max(point.gap for point in points) > 0.01


@needs_highs
def test_full_precision_is_the_slow_end_where_it_is_allowed() -> None:
    case = random_case(7, blocks=2)
    full = Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay({})
    slow = tradeoff(case.inputs).points[-1]
    assert slow.omega == 0.0
    assert slow.iteration_ns <= full.iteration_ns
    without = tradeoff(case.with_memory(full.groups["infer0"].peak_bytes - 1).inputs)
    assert all(point.peak_bytes["infer0"] < full.groups["infer0"].peak_bytes for point in without.points)


@needs_highs
def test_where_nothing_can_be_lowered_full_precision_is_the_only_point() -> None:
    case = random_case(5, blocks=1, ladder=(FULL,))
    (point,) = tradeoff(case.inputs).points
    assert (point.omega, point.gap) == (0.0, 0.0)
    assert point.counts == {"infer0": {"float32": len(case.dag.adjustable)}}
    assert point.arguments == ("--tolerance", "0")


@needs_highs
def test_profiles_without_time_are_refused() -> None:
    case = random_case(5, blocks=1, infer_groups=1)
    times = [field.name for field in attrs.fields(OpCost) if field.name.endswith("_ns")]
    timeless = {
        name: attrs.evolve(
            profile,
            costs=tuple(attrs.evolve(cost, **dict.fromkeys(times, 0)) for cost in profile.costs),
            casts=tuple(attrs.evolve(cast, dispatch_ns=0, intercept_ns=0.0, ns_per_element=0.0) for cast in profile.casts),
            optimizer_dispatch_ns=0,
            optimizer_compute_ns=0,
            collective=profile.collective and attrs.evolve(profile.collective, alpha_ns=0.0, beta_ns_per_byte=0.0, measured=()),
        )
        for name, profile in case.profiles.items()
    }
    links = tuple(attrs.evolve(link, alpha_ns=0.0, beta_ns_per_byte=0.0) for link in case.cluster.links)
    cluster = attrs.evolve(case.cluster, links=links)
    with pytest.raises(PlanError, match=r"by these profiles a step takes no time.*; measure them again"):
        tradeoff(Inputs(case.dag, cluster, timeless, case.sensitivity))


@needs_highs
@pytest.mark.parametrize(("seed", "groups"), [(7, 1), *nightly((4, 2))])
def test_arguments_give_the_plan_or_one_as_good(seed: int, groups: int) -> None:
    case = random_case(seed, blocks=2, infer_groups=groups)
    seen = set()
    for point in tradeoff(case.inputs, budgets=3, limits=6).points:
        plan = planned(case, point)
        seen.add(point.arguments[0])
        if point.arguments[0] == "--tolerance":
            assert plan.objective <= point.omega * (1 + 1e-9)
            assert plan.objective >= point.bound * (1 - 1e-9) or plan.predicted_iteration_ns > point.iteration_ns
        else:
            assert plan.objective <= float(point.arguments[-1])
            assert plan.predicted_iteration_ns <= point.iteration_ns * (1 + 2e-4)
        assert all(plan.group(name).predicted_peak_bytes <= parse_bytes(size) for name, size in sizes(point).items())
    assert seen == {"--tolerance", "--minimise"}


def sizes(point: TradeoffPoint) -> dict[str, str]:
    """The memory lines as the cluster file's reader sees them."""
    return {name: str(tomllib.loads(line)["memory"]) for name, line in point.memory.items()}


def planned(case: Case, point: TradeoffPoint) -> PrecisionPlan:
    """What ``qsync plan`` makes of a point's arguments."""
    for name, size in sizes(point).items():
        case = case.with_memory(parse_bytes(size), name)
    options = dict(zip(point.arguments[::2], point.arguments[1::2], strict=True))
    if "--tolerance" in options:
        return allocate(case.inputs, Request(tolerance=float(options["--tolerance"])))
    return allocate(case.inputs, Request(objective=options["--minimise"], omega_limit=float(options["--omega-limit"])))


@needs_highs
def test_the_same_inputs_give_the_same_curve() -> None:
    first, second = (json.dumps(tradeoff(random_case(2, infer_groups=2).inputs).as_dict()) for _ in range(2))
    assert first == second


# Bad input


def test_without_a_sensitivity() -> None:
    case = random_case(0, blocks=1)
    with pytest.raises(PlanError, match=r"needs a sensitivity; make one with 'qsync indicate'"):
        tradeoff(Inputs(case.dag, case.cluster, case.profiles))


def test_without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "is_installed", lambda: False)
    with pytest.raises(PlanError, match=r"^the trade-off curve needs HiGHS; install it with: pip install \S.*\[exact\]'$"):
        tradeoff(random_case(0, blocks=1).inputs)


@needs_highs
def test_too_little_memory_names_the_group_and_what_would_do() -> None:
    case = random_case(0, blocks=1)
    with pytest.raises(InfeasibleError, match=r"memory of group 'infer0'.*smallest feasible budget"):
        tradeoff(case.with_memory(10).inputs)
    with pytest.raises(InfeasibleError, match=r"base precision of a training group does not fit the memory of group 'train0'"):
        tradeoff(case.with_memory(10, "train0").inputs)


@needs_highs
@pytest.mark.parametrize("numbers", [{"budgets": 0}, {"limits": 2}])
def test_too_few_points(numbers: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"at least 1 memory budget and 3 time limits"):
        tradeoff(random_case(0, blocks=1).inputs, **numbers)


# One point against another


def test_a_point_dominates_what_is_nowhere_better() -> None:
    point = drawn().points[1]
    slower = attrs.evolve(point, iteration_ns=point.iteration_ns + 1)
    larger = attrs.evolve(point, peak_bytes={"infer": point.peak_bytes["infer"] + 1})
    assert point.dominates(slower)
    assert point.dominates(larger)
    assert not slower.dominates(point)
    assert not point.dominates(point)
    assert not slower.dominates(larger)
    assert not larger.dominates(slower)


# The page


def drawn(model: str = "model", group: str = "infer") -> Tradeoff:
    """A curve of three plans and two budgets."""
    op = OpId("a<b>", 0)
    half = {group: {op: Variant.parse("float16")}}
    full = {group: {op: FULL}}
    points = (
        TradeoffPoint(2e-3, 2e-3, 10_000_000, {group: 1 << 20}, half, ("--tolerance", "0"), {group: 'memory = "1 MiB"'}),
        TradeoffPoint(1e-3, 0.9e-3, 20_000_000, {group: 3 << 20}, half, ("--tolerance", "0.5")),
        TradeoffPoint(0.0, 0.0, 40_000_000, {group: 4 << 20}, full, ("--tolerance", "1")),
    )
    budgets = ({group: 1 << 20}, {group: 0})
    return Tradeoff(model, "lossvar", budgets, budgets, points, {"full": 40_000_000, "uniform": 15_000_000})


def test_every_dot_leads_to_a_row_that_says_all() -> None:
    (figure, table) = tradeoff_section(drawn(), "Plans").parts
    assert isinstance(figure, Figure)
    assert isinstance(table, Table)
    dots = figure.chart["layer"][1]["data"]["values"]
    assert [dot["row"] for dot in dots] == [f"#{table.anchor}-{number}" for number in (1, 2, 3)]
    assert list(table.rows[0]) == [
        *("1", "10.00 ms", "0.25", "0.002", "optimal", "1 MiB", "1 float16"),
        '--tolerance 0\n[group infer] memory = "1 MiB"',
    ]
    assert list(table.rows[1]) == ["2", "20.00 ms", "0.50", "0.001", "10.0%", "3 MiB", "1 float16", "--tolerance 0.5"]


def test_an_omega_of_zero_stands_below_all_others() -> None:
    figure = tradeoff_figure(drawn(), 20_000_000)
    axis = figure.chart["layer"][1]["encoding"]["y"]["axis"]
    heights = [dot["y"] for dot in figure.chart["layer"][1]["data"]["values"]]
    assert heights[:2] == [2e-3, 1e-3]
    assert heights[2] == axis["values"][0] < 0.9e-3
    lines = figure.chart["layer"][2]["data"]["values"]
    assert [(line["text"], line["x"]) for line in lines] == [
        ("uniform precision", 15),
        ("the chosen plan", 20),
        ("full precision", 40),
    ]


def test_names_are_escaped() -> None:
    evil = "</script><script>alert('&')</script>"
    text = render_page(drawn(model=evil, group=f'"{evil}'))
    assert "alert('" not in text
    assert text.count("<script") == 2  # the chart's data, and what draws it
    assert "&lt;script&gt;" in text


def test_one_plan_alone_is_drawn() -> None:
    whole = drawn()
    figure = tradeoff_figure(attrs.evolve(whole, points=whole.points[2:]))
    assert [dot["x"] for dot in figure.chart["layer"][1]["data"]["values"]] == [40]


# The command


def shown(case: Case, output: Path | None, json_flag: bool) -> str:
    """What the command prints."""

    @click.command()
    def command() -> None:
        show_tradeoff(case.inputs, output, json_flag)

    result = CliRunner().invoke(command)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@needs_highs
def test_command_prints_and_writes_the_page(tmp_path: Path) -> None:
    case = random_case(0, blocks=1)
    found = tradeoff(case.inputs)
    page = tmp_path / "curve.html"
    text = shown(case, page, json_flag=False)
    assert page.read_text(encoding="utf-8") == render_page(found)
    for point in found.points:
        assert " ".join(point.arguments) in text
    data = json.loads(shown(case, None, json_flag=True))
    assert data == {"output": None, **json.loads(json.dumps(found.as_dict()))}
    assert [entry["points"] for entry in data["curves"]][-1][0] == 0


@needs_highs
def test_a_page_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot write .*nowhere.*No such file"):
        shown(random_case(0, blocks=1), tmp_path / "nowhere" / "curve.html", json_flag=False)


def test_a_plan_is_not_overwritten_by_a_page(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"ends in \.html, got .*plan\.qsync"):
        shown(random_case(0, blocks=1), tmp_path / "plan.qsync", json_flag=False)


@needs_highs
def test_from_the_command_line(tmp_path: Path) -> None:
    case = random_case(6, blocks=1, ladder=LADDERS[0])
    (train, infer), counts = case.cluster.groups, [group.count for group in case.cluster.groups]
    text = "".join(
        f'[[group]]\nname = "{g.name}"\ndevice = "{g.device}"\ncount = {n}\nrole = "{g.role}"\n'
        for g, n in zip((train, infer), counts, strict=True)
    )
    ladder = ", ".join(f'"{variant}"' for variant in infer.ladder)
    link = '[[link]]\nbetween = ["train0", "infer0"]\nlatency_us = 1\nbandwidth_gbps = 16\n'
    (tmp_path / "cluster.toml").write_text(f"{text}ladder = [{ladder}]\n{link}", encoding="utf-8")
    save(case.dag, tmp_path / "dag.qsync")
    save(case.sensitivity, tmp_path / "sensitivity.qsync")
    arguments = ["plan", "--pareto", "--dag", tmp_path / "dag.qsync", "--cluster", tmp_path / "cluster.toml"]
    arguments += ["--sensitivity", tmp_path / "sensitivity.qsync"]
    for name, profile in case.profiles.items():
        save(profile, tmp_path / f"{name}.qsync")
        arguments += ["--profile", f"{name}={tmp_path / name}.qsync"]
    group = click.Group()
    qsync_register_commands(group)
    result = CliRunner().invoke(group, [str(argument) for argument in [*arguments, "--json"]], catch_exceptions=False)
    data = json.loads(result.stdout)
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert (
        data["points"]
        == json.loads(json.dumps(tradeoff(Inputs(case.dag, cluster, case.profiles, case.sensitivity)).as_dict()))["points"]
    )
    result = CliRunner().invoke(group, [str(argument) for argument in [*arguments, "--solver", "greedy"]])
    assert "--pareto goes through all limits" in result.stderr

"""The report's figures are those of the plan and the replayer, its rows are complete, and what is missing is said."""

from __future__ import annotations

import html
import itertools
import json
import random
import re
import shutil
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Case, leanest, random_case, random_costs
from report_cases import EVIL, job_of, measured_like, stored_run

from qsync_core.artifacts.files import save
from qsync_core.cli.root import cli
from qsync_core.errors import ArtifactError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import OpCost
from qsync_core.ir.variant import Variant
from qsync_core.plugins.installing import pip_install
from qsync_core.run_folder import RunFolder
from qsync_planner.reporting import page as pages
from qsync_planner.reporting import write_report
from qsync_planner.reporting.charts import (
    layer_of,
    layers,
    memory_figure,
    precisions_figure,
    sensitivity_figure,
    shorten,
    steps_figure,
    timeline_figure,
)
from qsync_planner.reporting.page import Figure, Page, Table, render
from qsync_planner.reporting.report import read_job, report_page
from qsync_planner.reporting.ways_to_run import predicted_timeline, ways_to_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return stored_run(tmp_path_factory.mktemp("run") / "run")


def rows_of(figure: Figure, layer: int = 0) -> list[dict[str, object]]:
    return list(figure.chart["layer"][layer]["data"]["values"])


def texts(page: Page) -> str:
    return " ".join([page.verdict, *(f"{fact.name} {fact.value} {fact.beside}" for fact in page.facts)])


@pytest.mark.parametrize("seed", range(6))
def test_ways_to_run_are_those_that_the_plan_was_compared_with(seed: int) -> None:
    job = job_of(random_case(seed, infer_groups=1 + seed % 2))
    alone, full, uniform, planned, *others = ways_to_run(job)
    assert job.plan.verdict is not None
    best = job.plan.recommended_way
    assert best is not None
    if others:  # another plan is recommended than this one
        (way,) = others
        assert (way.iteration_ns, way.samples_per_second) == (best.iteration_ns, pytest.approx(best.samples_per_second))
        assert way.title == f"qsync prepare or plan … {best.options}"
        assert set(way.parts) == set(best.groups)
    assert bool(others) == (best.options not in ("", "--solver full"))
    assert (full.iteration_ns, uniform.iteration_ns) == (job.plan.baselines["full"], job.plan.baselines["uniform"])
    assert planned.iteration_ns == job.plan.predicted_iteration_ns
    assert planned.samples_per_second / alone.samples_per_second == pytest.approx(job.plan.verdict.speedup)
    assert alone.title == f"{' and '.join(alone.parts)} alone"
    assert f" with {alone.title}" in job.plan.verdict.sentence
    assert f"{job.plan.verdict.speedup:.2f} × {alone.title}" in texts(report_page(job, None, None))
    for way in (alone, full, uniform, planned):
        for name, parts in way.parts.items():
            assert parts.total == way.iteration_ns
            assert 0 <= way.waiting_ns[name] <= parts.communication


def test_where_the_training_group_is_the_slow_one_the_page_compares_with_the_other() -> None:
    case = random_case(1)
    slow = attrs.evolve(case.profiles["train0"], costs=tuple(slower(cost, 50) for cost in case.profiles["train0"].costs))
    alone, *_ = ways_to_run(job_of(attrs.evolve(case, profiles={**case.profiles, "train0": slow})))
    assert alone.title == "infer0 alone"


def slower(cost: OpCost, factor: int) -> OpCost:
    times = {name: getattr(cost, name) * factor for name in ("forward_compute_ns", "backward_compute_ns")}
    return attrs.evolve(cost, **times)


def test_full_precision_that_does_not_fit_is_shown_all_the_same() -> None:
    case = random_case(2)
    free = job_of(case)
    needed = free.plan.group("infer0").predicted_peak_bytes
    full = ways_to_run(free)[1]
    tight = job_of(case.with_memory((leanest(case) + needed) // 2))
    (shown,) = (way for way in ways_to_run(tight) if way.title == full.title)
    assert (shown.iteration_ns, shown.note) == (full.iteration_ns, "does not fit in memory")


def test_bars_of_a_step_fill_it_without_gaps() -> None:
    job = job_of(random_case(1, infer_groups=2))
    predicted = predicted_timeline(job)
    assert predicted is not None
    ways = ways_to_run(job, measured_like(predicted))
    figure = steps_figure(ways, {group.name: group.count for group in job.cluster.groups})
    found: dict[object, list[tuple[float, float]]] = {}
    for piece in rows_of(figure):
        found.setdefault(piece["y"], []).append((piece["x"], piece["x2"]))  # type: ignore[arg-type]
    lengths = [parts.total for way in ways for parts in way.parts.values()]
    assert len(found) == len(lengths) == 1 + 3 * 5  # the recommended way, with uneven batches, is one of its own
    longest = max(way.iteration_ns for way in ways)
    furthest = max(pieces[-1][1] for pieces in found.values())
    for pieces, total in zip(found.values(), lengths, strict=True):
        assert pieces[0][0] == 0
        assert all(one[1] == pytest.approx(other[0], abs=2e-6) for one, other in itertools.pairwise(pieces))
        assert pieces[-1][1] / furthest == pytest.approx(total / longest, rel=1e-4)


def test_every_operator_has_a_cell_in_every_group_and_a_reason(run: RunFolder) -> None:
    job, _ = read_job(run)
    figure = precisions_figure(job.dag, job.plan)
    cells = rows_of(figure)
    assert len(cells) == 2 * 54
    infer = {str(op_id): a for op_id, a in job.plan.group("infer").assignments.items()}
    for cell in cells:
        if cell["Group"] == "infer":
            chosen = infer[str(cell["Operator"])]
            assert (cell["Runs as"], cell["Because"]) == (chosen.variant.label, chosen.reason)
            assert cell["colour"] == f"var(--{chosen.variant.compute})"
    places = {(cell["x"], cell["y"]) for cell in cells}
    assert len(places) == len(cells)
    assert all(0 <= cell["x"] < cell["x2"] <= 1 for cell in cells)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fqn", "layer"),
    [
        ("layer1.0.conv1", "layer1.0"),
        ("layer1.0.downsample.0", "layer1.0"),
        ("features.12", "features"),
        ("bert.encoder.layer.3.attention.self.query", "bert.encoder.layer.3"),
        ("bert.pooler.dense", "bert.pooler"),
        ("fc", "fc"),
    ],
)
def test_the_layer_of_an_operator(fqn: str, layer: str) -> None:
    assert layer_of(OpId(fqn)) == layer


def test_long_layers_take_several_rows_of_about_one_length() -> None:
    job = job_of(random_case(0))
    one = next(iter(job.dag.adjustable))
    many = [attrs.evolve(one, op_id=OpId(f"features.{i}"), depth=i) for i in range(35)]
    rows = layers(many)
    assert [len(members) for _, members in rows] == [12, 12, 11]
    assert [o.op_id for _, members in rows for o in members] == [o.op_id for o in many]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("layer1.0.conv1", "layer1.0.conv1"),
        ("bert.encoder.layer.11.attention.output.dense", "…11.attention.output.dense"),
        ("a_module_with_a_very_long_name_of_its_own.weight", "…ng_name_of_its_own.weight"),
        ("student.backbone.layers.3.mlp.fc1#1", "…3.mlp.fc1#1"),
    ],
)
def test_long_names_keep_what_tells_them_apart(name: str, short: str) -> None:
    assert shorten(name) == short


def test_filled_dots_are_the_chosen_variants(run: RunFolder) -> None:
    job, _ = read_job(run)
    figure = sensitivity_figure(job.sensitivity, job.plan)
    assert figure is not None
    dots = rows_of(figure, 1)
    filled = {(dot["Operator"], dot["Precision"]) for dot in dots if dot["fill"] != "var(--paper)"}
    lowered = {
        (str(op_id), a.variant.label)
        for op_id, a in job.plan.group("infer").assignments.items()
        if job.sensitivity.omega[op_id].get(a.variant, 0.0) > 0
    }
    assert filled == lowered
    assert len(filled) > 10


def test_memory_of_a_group_ends_where_its_parts_do(run: RunFolder) -> None:
    """A part may be negative: a measured step that takes less than its parts."""
    job, _ = read_job(run)
    figure = memory_figure(job.plan)
    ends: dict[object, float] = {}
    for piece in rows_of(figure):
        ends[piece["y"]] = max(ends.get(piece["y"], 0.0), float(str(piece["x2"])))
    totals = [sum(job.plan.memory[group.group].values()) / 2**30 for group in job.plan.groups]
    assert list(ends.values()) == pytest.approx(totals, abs=1e-5)
    (budget,) = rows_of(figure, 2)
    assert budget["x"] == pytest.approx(40)


def test_a_timeline_that_is_drawn_covers_what_was_there(run: RunFolder) -> None:
    """Short neighbours come together in one piece, so there are fewer; together they are as long."""
    job, measured = read_job(run)
    predicted = predicted_timeline(job)
    assert predicted is not None
    assert measured is not None
    figure = timeline_figure(predicted, measured)
    assert figure is not None
    drawn = sum(piece["x2"] - piece["x"] for piece in rows_of(figure))  # type: ignore[operator, misc]
    there = sum(i.duration_ns for timeline in (predicted, measured) for i in timeline.intervals) / 1e6
    assert drawn == pytest.approx(there, rel=5e-3)
    assert len(rows_of(figure)) < len(predicted.intervals) + len(measured.intervals)


def test_the_page_says_what_the_plan_says(run: RunFolder) -> None:
    job, measured = read_job(run)
    assert measured is not None
    page = report_page(job, None, measured, [(("infer", "train"), job.plan), (("train",), job.plan)])
    tables = [part for section in page.sections for part in section.parts if isinstance(part, Table)]
    assert len(tables) >= 5
    assert all(len(row) == len(table.header) for table in tables for row in table.rows)
    assert job.plan.verdict is not None
    assert page.verdict[1:] == f"{job.plan.verdict.sentence[1:]}."
    assert f"measured {measured.iteration_ns / 1e6:.2f} ms (-2.9%)" in texts(page)
    lowered = sum(a.variant.compute != "float32" for a in job.plan.group("infer").assignments.values())
    assert f"Lowered on infer {lowered} of 54" in texts(page)


def test_the_command_writes_a_report_with_its_trace_and_says_where(run: RunFolder) -> None:
    result = CliRunner().invoke(cli, ["report", str(run.path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"output": str(run.report), "perfetto": str(run.trace)}
    assert "When groups are missing" in run.report.read_text(encoding="utf-8")
    trace = json.loads(run.trace.read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"rank {r} ({g}, {s})" for r, g in ((0, "train"), (1, "infer")) for s in ("predicted", "measured")}


def test_of_batches_that_differ_there_is_a_page_without_a_trace(run: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    plan, names = run.load_plan(["train", "infer"]), ["train", "infer"]
    save(attrs.evolve(plan, local_batches={"train": 200, "infer": 56}), run.plan(names))
    run.timeline("measured", names).unlink()
    run.trace.write_text("of another plan")
    result = CliRunner().invoke(cli, ["report", str(run.path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"output": str(run.report), "perfetto": None}
    assert not run.trace.exists()
    result = CliRunner().invoke(cli, ["report", str(run.path)])
    assert " ".join(result.output.split()).startswith("wrote ")
    assert "perfetto" not in result.output


@pytest.mark.slow
def test_the_page_says_what_to_type(run: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    run.start.write_text(f"train by:\n  torchrun train.py {EVIL}\n", encoding="utf-8")
    assert write_report(run) == run.path / "report.html"
    text = run.report.read_text(encoding="utf-8")
    assert f"<h2>How to train</h2>\n<pre>{run.start.read_text().strip()}</pre>" in html.unescape(text)
    assert EVIL not in text


def test_show_and_explain_take_the_folder(run: RunFolder) -> None:
    whole, alone = run.load_plan(["train", "infer"]), run.load_plan(["train"])
    shown = json.loads(CliRunner().invoke(cli, ["show", str(run.path), "--json"]).stdout)
    assert [group["name"] for group in shown["groups"]] == ["train", "infer"]
    assert [(plan["groups"], plan["iteration_ns"]) for plan in shown["plans"]] == [
        (["infer", "train"], whole.predicted_iteration_ns),
        (["train"], alone.predicted_iteration_ns),
    ]
    assert whole.verdict is not None
    told = CliRunner().invoke(cli, ["show", str(run.path)])
    assert whole.verdict.sentence in " ".join(told.stdout.split())
    of_folder, of_plan = (
        CliRunner().invoke(cli, ["explain", str(path), "layer1", "--json"]) for path in (run.path, run.plan(["train", "infer"]))
    )
    assert of_folder.exit_code == 0, of_folder.output
    assert of_folder.stdout == of_plan.stdout


@pytest.mark.parametrize("command", ["show", "explain"])
def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(cli, [command, str(tmp_path)])
    assert done.exit_code == 1
    assert f"the run folder {tmp_path} has no cluster.toml; 'qsync prepare JOB -o {tmp_path}' makes it" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(("train", "infer", "ways"), [(0, 1, 3), (1, 0, 1), (2, 0, 2), (2, 3, 4)])
def test_jobs_of_any_groups_have_a_page(train: int, infer: int, ways: int) -> None:
    job = job_of(random_case(2, train=train, infer_groups=infer))
    page = report_page(job, predicted_timeline(job), None)
    assert page.verdict.startswith("A step is predicted to take") == (not train or train + infer < 2)
    assert sum(not way.title.startswith("qsync prepare or plan") for way in ways_to_run(job)) == ways
    assert render(page).startswith("<!doctype html>")


def test_where_nothing_is_sensitive_no_chart_says_so() -> None:
    case = random_case(2, infer_groups=1)
    silent = attrs.evolve(case.sensitivity, omega={op_id: dict.fromkeys(by, 0.0) for op_id, by in case.sensitivity.omega.items()})
    titles = [section.title for section in report_page(job_of(attrs.evolve(case, sensitivity=silent)), None, None).sections]
    assert "Sensitivity" not in titles


def test_batches_that_differ_are_shown_without_phases() -> None:
    job = job_of(random_case(4))
    first, second = job.plan.groups
    uneven = {first.group: job.dag.batch_size + 2, second.group: job.dag.batch_size - 2}
    job = attrs.evolve(job, plan=attrs.evolve(job.plan, local_batches=uneven))
    assert predicted_timeline(job) is None
    said = f"with the same batch of 4 samples, but under the plan with 6 of {first.group}, 2 of {second.group}."
    assert said in report_page(job, None, None).sections[0].sentences[0]
    planned = next(way for way in ways_to_run(job) if way.title == "QSync")
    counts = [group.count for group in job.cluster.groups]
    assert planned.samples == sum(n * batch for n, batch in zip(counts, uneven.values(), strict=True))
    assert all(parts.total >= job.plan.predicted_iteration_ns for parts in planned.parts.values())


def test_a_folder_that_is_not_finished_is_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the run folder .*nothing is not there; 'qsync prepare JOB -o"):
        write_report(RunFolder(tmp_path / "nothing"))
    (tmp_path / "half").mkdir()
    half = RunFolder(tmp_path / "half")
    half.cluster.write_bytes(run.cluster.read_bytes())
    with pytest.raises(PlanError, match="has no plan for a job of infer, train"):
        write_report(half)
    (half.path / "plans").mkdir()
    half.plan(["train", "infer"]).write_bytes(run.plan(["train", "infer"]).read_bytes())
    with pytest.raises(ArtifactError, match=re.escape(str(half.dag))):
        write_report(half)
    assert not half.report.exists()


def test_collectives_of_other_numbers_of_ranks_than_planned_are_left_out(run: RunFolder, tmp_path: Path) -> None:
    """The cluster file may say other counts than the processes that measured: the plan is made without what they measured."""
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    inputs = read_job(copy)[0].inputs
    groups = tuple(attrs.evolve(group, count=group.count + 1) for group in inputs.cluster.groups)
    case = Case(inputs.dag, attrs.evolve(inputs.cluster, groups=groups), inputs.profiles, inputs.sensitivity)
    costs = copy.communication([group.name for group in groups])
    costs.parent.mkdir(exist_ok=True)
    save(random_costs(case, random.Random(0)), costs)
    assert write_report(copy).is_file()
    assert read_job(copy)[0].inputs.communication is None


def test_a_plan_or_sensitivity_of_another_job_is_named(run: RunFolder, tmp_path: Path) -> None:
    mixed = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    job, other = read_job(mixed)[0], job_of(random_case(0))
    plan = attrs.evolve(job.plan, model=other.plan.model, dag_digest=other.plan.dag_digest)
    for file, foreign, words in (
        (mixed.plan(["train", "infer"]), plan, "the plan is for another graph"),
        (mixed.sensitivity, other.inputs.sensitivity, "the sensitivity is of another graph"),
    ):
        save(foreign, file)
        with pytest.raises(PlanError, match=words):
            write_report(mixed)


def test_without_the_extra_there_is_a_sentence_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=re.escape(pip_install("qsync-planner", "report"))):
        write_report(RunFolder(tmp_path))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=80), st.randoms(use_true_random=False))
def test_pieces_of_a_timeline_come_together_without_losing_time(durations: list[int], rng: object) -> None:
    from qsync_planner.reporting.charts import _runs

    begin, events = 0.0, []
    for number, duration in enumerate(durations):
        events.append({"ts": begin, "dur": float(duration), "cat": "forward" if number % 7 else "backward", "name": str(number)})
        begin += duration
    runs = list(_runs(events, begin / 1500))
    assert [event for run in runs for event in run] == events
    assert all(len({event["cat"] for event in run}) == 1 for run in runs)


def test_where_no_other_plan_is_better_a_sentence_says_so() -> None:
    """All rungs but the base gone: there is one plan."""
    case = random_case(1, ladder=(Variant.of(Precision.FLOAT32),))
    (section,) = (section for section in report_page(job_of(case), None, None).sections if section.title == "Other plans")
    assert section.sentences == ("No other plan is better than this one in Ω, in step time or in memory.",)
    assert not section.parts


def test_the_drawing_script_is_bundled_once_for_a_user(tmp_path, monkeypatch):
    """What is kept is what is bundled; where nothing can be kept, the script is made all the same."""
    vl_convert = pytest.importorskip("vl_convert")
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda own: f"{len(own)} </script")
    monkeypatch.setenv("QSYNC_TUNING", str(tmp_path / "tuning.sqlite"))
    script = pages._drawing_script.__wrapped__()
    assert script.endswith(" <\\/script")
    (kept,) = (tmp_path / "pages").iterdir()
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda own: "another")
    assert pages._drawing_script.__wrapped__() == script
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + b"\xff")
    assert pages._drawing_script.__wrapped__() == "another"
    kept.write_bytes(whole)
    assert pages._drawing_script.__wrapped__() == script
    for folder in (kept.parent, tmp_path):
        folder.chmod(0o777)  # so that others may have written it, or put another folder in its place
        assert pages._drawing_script.__wrapped__() == "another"
        kept.write_bytes(whole)
        folder.chmod(0o700)
    assert pages._drawing_script.__wrapped__() == script
    monkeypatch.setattr(pages, "version", lambda package: "0.0")
    assert pages._drawing_script.__wrapped__() == "another"
    (tmp_path / "file").touch()
    monkeypatch.setenv("QSYNC_TUNING", str(tmp_path / "file" / "tuning.sqlite"))
    assert pages._drawing_script.__wrapped__() == "another"

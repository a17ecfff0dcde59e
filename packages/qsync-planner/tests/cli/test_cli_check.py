"""``qsync indicate --check``: what it prints, writes and refuses, on a truth that is at hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from synthetic import BFLOAT16, INT8
from test_indicator_check import A, B, C, checked, graph, observed
from test_indicators import Flat

from qsync_core.artifacts.files import digest, load, save
from qsync_core.artifacts.summary import summarize
from qsync_core.errors import ArtifactError, ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.plugins.hooks import TruthRequest
from qsync_core.plugins.registry import Registry
from qsync_planner.cli.indicate import CheckRequest, run_check
from qsync_planner.indicate import indicate
from qsync_planner.indicator_check import compare, read_truth
from qsync_planner.indicator_check.page import agreement_table, number, render_page, scatter
from qsync_planner.plugin import qsync_register_commands

I8, B16 = Variant.of(INT8), Variant.of(BFLOAT16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graph, its truth, and observations of lossvar that rank as the truth does in int8 and the other way in bfloat16."""
    dag, rows, _ = checked()
    values = {(A, I8): 8.0, (B, I8): 5.0, (C, I8): 1.2, (A, B16): 1.0, (B, B16): 2.0, (C, B16): 3.0}
    share = {terms.X_VAR_GRAD: 0.5, terms.W_VAR_GRAD: 0.5, terms.Y_VAR_GRAD: 0.0}
    series = [
        Series(op_id, variant, terms.LOSSVAR, term, (value * part, value * part))
        for (op_id, variant), value in values.items()
        for term, part in share.items()
    ]
    seen = Observations(dag.model, digest(dag), (10, 11), 2, "budget", tuple(series), {"seed": "0"})
    save(dag, tmp_path / "dag.qsync")
    save(seen, tmp_path / "o.qsync")
    save(attrs.evolve(observed(dag, rows), settings={"seed": "0"}), tmp_path / "t.qsync")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin whose indicator ``flat`` needs no observations."""
    monkeypatch.setattr(Registry, "collect", lambda self, hook, *problem: [Flat()] if hook == "qsync_register_indicators" else [])


def run(*arguments: str) -> Result:
    @click.group()
    def root() -> None:
        pass

    qsync_register_commands(root)
    return CliRunner().invoke(root, ["indicate", *arguments])


def check(*arguments: str) -> Result:
    return run("o.qsync", "--dag", "dag.qsync", "--indicator", "lossvar", "--check", *arguments)


@pytest.mark.usefixtures("flat")
def test_every_indicator_that_the_observations_allow(folder: Path) -> None:
    result = check("--truth", "t.qsync", "--json")
    data = json.loads(result.stdout)
    assert data["output"] is None
    assert data["check"]["indicators"] == ["lossvar", "flat"]
    sixteen, eight = data["check"]["variants"]
    assert [v["agreement"]["lossvar"]["tau"] for v in (eight, sixteen)] == [1.0, -1.0]
    assert eight["agreement"]["lossvar"]["regret"] == {"10": 1.0, "25": 1.0, "40": 1.0, "50": 1.0}
    assert data["check"]["decrements"][0]["from"] == "int8"


@pytest.mark.usefixtures("flat")
def test_named_indicators_a_sensitivity_and_a_page(folder: Path) -> None:
    result = check("--truth", "t.qsync", "--against", "flat", "-o", "s.qsync", "--page", "p.html")
    assert result.exit_code == 0, result.output
    assert (folder / "s.qsync").exists()
    assert (folder / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    assert ["int8", "lossvar", "1.00", "1.00", "1.000", "1.000", "1.000", "1.000", "0.83", "100%", "67%", "0.89"] in rows
    assert any(row[:2] == ["int8", "truth (batches)"] for row in rows)
    assert any(row[:2] == ["int8 → bfloat16", "lossvar"] for row in rows)
    assert "int8: all operators together move the gradients by 0.50 of the sum of their parts" in result.output
    assert "wrote p.html" in result.output


@pytest.mark.usefixtures("flat")
def test_observations_that_hold_the_truth_themselves(folder: Path) -> None:
    dag, rows, _ = checked()
    seen = observed(dag, rows)
    save(seen, folder / "both.qsync")
    result = run("both.qsync", "--dag", "dag.qsync", "--indicator", "flat", "--check", "--json")
    assert json.loads(result.stdout)["check"]["indicators"] == ["flat"]


def test_a_truth_of_fewer_updates_is_said(folder: Path) -> None:
    dag, rows, _ = checked()
    first = {key: tuple(half[:1] for half in halves) for key, halves in rows.items()}
    save(attrs.evolve(observed(dag, first), settings={"seed": "0"}), folder / "one.qsync")
    said = "the truth was measured at 1 of the 2 observed updates: magnitudes differ by as much as batches do"
    assert said in " ".join(check("--truth", "one.qsync").output.split())
    assert "of the 2 observed updates" not in check("--truth", "t.qsync").output


def test_omega_is_printed_with_its_standard_error(folder: Path) -> None:
    seen = load(folder / "o.qsync", Observations)
    norms = Series(None, None, terms.RUN, terms.GRADIENT_SQ_NORM, (1.0, 4.0))
    save(attrs.evolve(seen, series=(*seen.series, norms)), folder / "o.qsync")
    arguments = ("o.qsync", "--dag", "dag.qsync", "--indicator", "lossvar", "-o", "s.qsync")
    # 8 at both updates, of ‖g‖² 1 and 4: 2 · (8 / 1 + 8 / 4) / 2, and 2 · (8 / 1 - 8 / 4) / 2.
    assert re.search(r"a#0 +int8 +10 ± 6", run(*arguments).output)
    row = json.loads(run(*arguments, "--json").stdout)["omega"][0]
    assert (row["operator"], row["omega"], row["error"]) == ("a#0", pytest.approx(10.0), pytest.approx(6.0))
    assert ("Ω int8", "10 ± 6  a#0") in summarize(load(folder / "s.qsync", Sensitivity))


def test_a_truth_of_other_updates_is_said(folder: Path) -> None:
    dag, rows, _ = checked()
    save(attrs.evolve(observed(dag, rows), batch_size=4, settings={"seed": "7"}), folder / "other.qsync")
    output = check("--truth", "other.qsync").output
    assert "the truth was measured on batches of 4 samples, the indicators were observed on 2: magnitudes differ" in output
    assert "the truth was measured with seed 7, the indicators were observed with 0: other updates" in output


@pytest.mark.usefixtures("flat")
def test_an_indicator_that_can_not_be_computed_is_left_out_unless_it_was_named(folder: Path) -> None:
    dag, rows, _ = checked()
    half = Series(A, I8, terms.HUTCHINSON, terms.OPERANDS, (1.0, 1.0))
    seen = observed(dag, rows)
    save(attrs.evolve(seen, series=(*seen.series, half)), folder / "o.qsync")
    arguments = ["o.qsync", "--dag", "dag.qsync", "--indicator", "flat", "--check"]
    assert "hutchinson is left out: the observations lack hutchinson." in run(*arguments).output
    named = run(*arguments, "--against", "hutchinson")
    assert isinstance(named.exception, ObservationError)
    assert isinstance(run(*arguments, "--against", "tarot").exception, ObservationError)


@pytest.mark.parametrize("budget", ["nan", "inf", "-inf", "0", "-1"])
def test_a_budget_is_a_finite_number_of_seconds(folder: Path, budget: str) -> None:
    result = check("--truth", "t.qsync", "--budget", budget)
    assert result.exit_code == 2
    assert f"'--budget': {budget}" in result.stderr or f"'--budget': {float(budget)}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--truth", "none.qsync"), "there is no file none.qsync; add --job JOB to measure the truth and write it there"),
        (("--truth", "o.qsync"), "hold no truth: no operator has terms of the collector 'montecarlo'"),
        (("--truth", "foreign.qsync"), "the truth is of another graph ('net', digest"),
        (("--truth", "narrow.qsync"), "the truth was not measured in bfloat16; it has int8"),
        (("--truth", "t.qsync", "--page", "p.pdf"), "give --page a name that ends in .html, got p.pdf"),
    ],
)
def test_one_sentence_for_what_does_not_fit(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    dag, rows, _ = checked()
    save(observed(graph("a", "b"), {(A, I8): ([1.0], [1.0])}), folder / "foreign.qsync")
    save(observed(dag, {key: value for key, value in rows.items() if key[1] == I8}), folder / "narrow.qsync")
    error = check(*arguments).exception
    assert isinstance(error, ObservationError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--truth", "no/t.qsync"), "write no/t.qsync: there is no folder {folder}/no; make it, or name another"),
        (("--truth", "new.qsync", "--page", "no/p.html"), "write no/p.html: there is no folder {folder}/no; make it, or"),
        (("--page", "p.html"), "write p.html: it is a folder; name a file in it"),
    ],
)
def test_what_can_not_be_written_is_refused_before_anything_is_measured(
    folder: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "p.html").mkdir()
    monkeypatch.setattr(Registry, "measure_truth", lambda *_: pytest.fail("it was measured"))
    error = check("--job", "mine", *arguments).exception
    assert isinstance(error, ArtifactError)
    assert message.format(folder=folder) in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("o.qsync", "--dag", "dag.qsync", "-o", "s", "--truth", "t.qsync"), "--truth is for --check; add it"),
        (("o.qsync", "--dag", "dag.qsync", "-o", "s", "--job", "x"), "--job is for --check"),
        (("o.qsync", "--dag", "dag.qsync", "--check"), "--check needs the truth: --truth FILE that has it, or --job JOB"),
        (("--dag", "dag.qsync", "--check", "--indicator", "flat", "--cluster", "c.toml"), "--check needs OBSERVATIONS"),
        (("o.qsync", "--dag", "dag.qsync", "--check", "--job", "x", "--budget", "0"), "Invalid value for '--budget'"),
    ],
)
@pytest.mark.usefixtures("flat")
def test_usage(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "c.toml").write_text(
        '[[group]]\nname = "a"\ndevice = "cpu"\ncount = 1\nrole = "infer"\nladder = ["int8", "float32"]\n'
        '[[group]]\nname = "t"\ndevice = "cpu"\ncount = 1\nrole = "train"\n'
    )
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_truth_is_measured_through_the_hook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dag, rows, _ = checked()
    asked: list[TruthRequest] = []

    def measure(self: Registry, request: TruthRequest) -> Observations | None:
        asked.append(request)
        request.announce("12 passes, about 3 s")
        return observed(dag, rows) if request.job == "mine" else None

    monkeypatch.setattr(Registry, "measure_truth", measure)
    result = check("--job", "mine", "--budget", "7", "--device", "cuda:1", "--truth", "new.qsync", "--json")
    assert json.loads(result.stdout)["check"]["iterations"] == 2
    assert result.stderr == "12 passes, about 3 s\n"
    (request,) = asked
    assert (request.budget_s, request.device, request.variants) == (7.0, "cuda:1", [B16, I8])
    assert (folder / "new.qsync").exists()
    error = check("--job", "yours").exception
    assert str(error).startswith("no installed package can measure the truth of yours; install qsync-torch")


def test_numbers_in_tables() -> None:
    assert [number(value) for value in (None, math.inf, -0.456, 12345.6)] == ["–", "∞", "-0.46", "1.2e+04"]


def test_a_chart_for_each_indicator_with_a_dot_for_each_operator_and_variant() -> None:
    dag, rows, omega = checked()
    halved = {op_id: {variant: value / 2 for variant, value in by.items()} for op_id, by in omega.items()}
    halved[C] = dict.fromkeys(halved[C], 0.0)
    found = compare({"good": omega, "half": halved}, read_truth(observed(dag, rows), dag))
    charts = {name: scatter(found, name).chart["layer"] for name in found.indicators}
    dots = {name: layers[1]["data"]["values"] for name, layers in charts.items()}
    assert [len(each) for each in dots.values()] == [2 * 3, 2 * 3]
    assert [sum(dot["fill"] == "var(--paper)" for dot in each) for each in dots.values()] == [0, 2]
    low, high = charts["half"][1]["encoding"]["y"]["scale"]["domain"]
    assert all(low <= dot["y"] <= high for dot in dots["half"])
    assert {dot["y"] for dot in dots["half"] if dot["fill"] == "var(--paper)"} == {low}
    ticks = charts["half"][1]["encoding"]["y"]["axis"]["values"]
    assert all(low <= tick <= high for tick in ticks)
    text = render_page(found)
    for row in agreement_table(found).rows:
        assert all(f">{cell}</td>" in text for cell in row)


def test_names_are_text_on_the_page() -> None:
    dag, rows, omega = checked()
    evil = '</script><script>alert("1")</script>'
    found = compare({evil: omega}, read_truth(observed(dag, rows), dag), [evil])
    text = render_page(attrs.evolve(found, model=evil, subjects=(evil,) * 3))
    assert text.count("<script") == 2  # the chart's data, and what draws it
    assert 'alert("' not in text
    assert "&lt;script&gt;" in text


def test_a_check_without_16_bit_has_no_decrements() -> None:
    dag, rows, omega = checked()
    only = {key: value for key, value in rows.items() if key[1] == I8}
    found = compare({"x": {op_id: {I8: by[I8]} for op_id, by in omega.items()}}, read_truth(observed(dag, only), dag))
    assert found.decrements == ()
    assert "What the allocator compares" not in render_page(found)
    seen = attrs.evolve(observed(dag, only), settings={})
    request = CheckRequest(None, None, 1.0, "", "", None)
    assert run_check(indicate(seen, dag, [I8], Flat()), seen, dag, request).decrements == ()

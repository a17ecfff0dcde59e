"""Every row of docs/compatibility.md is run by tests, and every test of that suite is in a row."""

from __future__ import annotations

import configparser
import re

import pytest

from compatibility.page import ANSWERS, PAGE, REFUSED, ROOT, Row, places, rows, suite

ROBUSTNESS = ROOT / "bench" / "robustness"
OF_THE_DEMO = {"safetensors", "transformers"}
"""What ``qsync-torch[demo]`` brings along, which both environments have."""
NOT_IN_CI = ("two_ranks", "spawned", "compiled_")
"""Scripts that test_scripts.py leaves out."""


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what)
def test_a_row_names_tests_that_exist(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        assert len(places(test)) == 1, test


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what)
def test_a_row_says_what_it_has_to(row: Row) -> None:
    assert row.answer in ANSWERS
    assert bool(row.sentences) >= (row.answer == REFUSED), "a refusal has a sentence"
    assert row.text or row.answer not in (REFUSED, "with a condition")
    assert row.since.count(".") == 1


def test_no_feature_has_two_rows() -> None:
    names = [row.what for row in rows()]
    assert len(names) == len(set(names)) >= 50


def test_every_test_of_the_suite_has_a_row() -> None:
    assert sorted({test.partition("[")[0] for row in rows() for test in row.tests} & set(suite())) == sorted(suite())


@pytest.mark.parametrize(
    ("environment", "folder"), [("integration", "tests/compatibility"), ("torch", "packages/qsync-torch/tests")]
)
def test_libraries_that_tests_need_are_where_they_run(environment: str, folder: str) -> None:
    """What a test skips itself without, it has in the environment of all that is run for every change."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    installed = set(re.findall(r"^[\w-]+", tox[f"testenv:{environment}"]["deps"], re.MULTILINE))
    texts = [path.read_text() for path in (ROOT / folder).rglob("test_*.py")]
    needed = {name for text in texts for name in re.findall(r'importorskip\("([\w.]+)', text)}
    needed = {"tensorboard" if "tensorboard" in name else name.partition(".")[0] for name in needed}
    assert {"bitsandbytes", "peft"} <= needed
    assert sorted(needed - installed - OF_THE_DEMO) == []


def test_scripts_that_a_row_names_are_run() -> None:
    named = [test.partition("[")[2].rstrip("]") for row in rows() for test in row.tests if test.startswith("test_scripts.py")]
    text = "".join(path.read_text() for path in (ROBUSTNESS / "wrong").glob("*.py"))
    assert [name for name in named if f"\ndef {name}() -> Pair:" not in text or name.startswith(NOT_IN_CI)] == []
    assert f"ELSEWHERE = {NOT_IN_CI!r}".replace("'", '"') in (ROBUSTNESS / "test_scripts.py").read_text()


def test_the_page_is_one_table() -> None:
    assert PAGE.read_text().count("\n|---") == 1

"""What the ledger keeps, and what it forgets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.errors import QSyncError
from qsync_core.printable import is_printable
from qsync_core.run_folder import RunFolder
from qsync_torch.prepare.ledger import Part, Parts, difference, read_parts, relative_file, sha256_of, write_parts

TEXTS = st.text(st.characters().filter(is_printable), max_size=8)
NAMES = st.from_regex(r"(probe|tuning|plan) [a-z0-9]{1,8}", fullmatch=True)
PARTS = st.dictionaries(NAMES, st.builds(Part, inputs=st.dictionaries(TEXTS, TEXTS, max_size=3), value=TEXTS), max_size=4)


def folder_with(path: Path, parts: Parts) -> RunFolder:
    """A run folder that has nothing but a ledger."""
    run = RunFolder(path)
    run.ledger.parent.mkdir()
    write_parts(run.ledger, parts)
    return run


@given(parts=PARTS)
def test_parts_come_back_as_they_were(tmp_path_factory, parts):
    run = folder_with(tmp_path_factory.mktemp("ledger"), parts)
    assert read_parts(run) == parts


def test_a_file_that_was_changed_or_removed_is_made_again(tmp_path):
    parts = {name: Part({}, relative_file(name), sha256_of(b"as made")) for name in ("graph", "sensitivity", "observations")}
    run = folder_with(tmp_path, parts)
    for name in parts:
        (tmp_path / relative_file(name)).write_bytes(b"as made")
    run.sensitivity.write_bytes(b"as a person has it")
    run.observations.unlink()
    assert set(read_parts(run)) == {"graph"}


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    run = folder_with(tmp_path, {"graph": Part({}, "job.dag.qsync", sha256_of(b""))})
    os.mkfifo(run.dag)
    assert read_parts(run) == {}


@pytest.mark.parametrize(
    "name, file",
    [
        ("cluster", "cluster.toml"),
        ("profile t4.a", "profiles/t4.a.qsync"),
        ("communication b+a", "communication/a+b.qsync"),
        ("plan a+b", "plans/a+b.qsync"),
        ("timeline a", "timelines/predicted/a.qsync"),
        ("trace", "report.perfetto.json"),
        ("tuning a", ""),
    ],
)
def test_a_parts_file_follows_from_its_name(name, file):
    assert relative_file(name) == file


@pytest.mark.parametrize(
    "name",
    [
        "",
        "profile",
        "profile ",
        "profile a+b",
        "profile ../a",
        "profile /etc/passwd",
        "profile a\\b",
        "plan a+",
        "probe ..",
        "probe a/b",
        "script",
        "profile a\n",
        "profile \u202ea",
        "lock",
        "profile .a",
        "timeline a+../b",
    ],
)
def test_no_other_names_are_those_of_parts(name):
    with pytest.raises(QSyncError, match=r"names no file of a run folder|no part called"):
        relative_file(name)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"format": 2, "parts": {}}',
        '{"format": 1, "parts": {"graph": 3}}',
        '{"format": 1, "parts": [1]}',
        "[" * 99_999,
    ],
)
def test_a_damaged_ledger_has_nothing(tmp_path, content):
    run = folder_with(tmp_path, {})
    run.ledger.write_text(content)
    assert read_parts(run) == {}


def test_the_ledger_is_readable_by_people(tmp_path):
    write_parts(tmp_path / "ledger.json", {"graph": Part({"torch": "2.13"}, "job.dag.qsync", "abc")})
    assert json.loads((tmp_path / "ledger.json").read_text())["parts"]["graph"]["inputs"] == {"torch": "2.13"}


@pytest.mark.parametrize(
    "was, now, said",
    [
        ({"torch": "2.11"}, {"torch": "2.11"}, ""),
        ({"torch": "2.11", "cuda": "12"}, {"torch": "2.13", "cuda": "13"}, "its torch was 2.11 and is 2.13 now"),
        ({}, {"cuda": "13"}, "its cuda was nothing and is 13 now"),
        ({"graph": "ab12cd34" * 8}, {"graph": "99" * 32}, "its graph was ab12cd34 and is 99999999 now"),
        ({"ladder": "float32;x=row"}, {"ladder": "int8;x=row float32;x=row"}, "its ladder was float32 and is int8 float32 now"),
        ({"ladder": "int8;w=channel"}, {"ladder": "int8;w=tensor"}, "its ladder was int8;w=channel and is int8;w=tensor now"),
        ({"rungs": "x" * 99}, {}, f"its rungs was {'x' * 60}… and is nothing now"),
    ],
)
def test_why_a_part_is_made_again(was, now, said):
    assert difference(was, now) == said

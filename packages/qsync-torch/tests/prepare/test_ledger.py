"""What the ledger keeps, and what it forgets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_torch.prepare.ledger import Part, difference, read_parts, sha256_of, write_parts

TEXTS = st.text(max_size=8)
PARTS = st.dictionaries(TEXTS, st.builds(Part, inputs=st.dictionaries(TEXTS, TEXTS, max_size=3), value=TEXTS), max_size=4)


@given(parts=PARTS)
def test_parts_come_back_as_they_were(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("ledger")
    write_parts(folder / "ledger.json", parts)
    assert read_parts(folder / "ledger.json", folder) == parts


def test_a_file_that_was_changed_or_removed_is_made_again(tmp_path):
    parts = {name: Part({}, name, sha256_of(b"as made")) for name in ("kept", "changed", "removed")}
    for name in parts:
        (tmp_path / name).write_bytes(b"as made")
    write_parts(tmp_path / "ledger.json", parts)
    (tmp_path / "changed").write_bytes(b"as a person has it")
    (tmp_path / "removed").unlink()
    assert set(read_parts(tmp_path / "ledger.json", tmp_path)) == {"kept"}


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
    (tmp_path / "ledger.json").write_text(content)
    assert read_parts(tmp_path / "ledger.json", tmp_path) == {}


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

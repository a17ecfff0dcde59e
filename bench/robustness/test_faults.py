"""Rows T4 and T5 in seconds: few files and few interruptions, always the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import SERVED
from robustness import damaged, kills


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return damaged.make_files()


def test_damaged_files_are_accepted_or_refused_in_a_sentence(files: dict[str, bytes]) -> None:
    found = damaged.check(range(150), 1, files)
    assert found["failures"] == []
    assert set(found["outcomes"]) == {"accepted", "refused"}
    assert set(found["kinds"]) >= {"damaged", "inconsistent", "text"}


@pytest.mark.parametrize("item", damaged._ITEMS, ids=lambda item: repr(item[:4]))
def test_bombs_take_little_memory(item: bytes, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = damaged._announced(damaged.BOMB_BYTES // len(item), item)
    header = files["plan.qsync"][: damaged.HEADER_BYTES]
    for content in (listed, damaged._inside(files["plan.qsync"], listed)):
        Path("plan.qsync").write_bytes(damaged.reseal(header + content))
        outcome, detail, memory = damaged.run_command(["show", "plan.qsync"])
        assert outcome == "refused", detail
        assert memory < damaged.MEMORY_LIMIT_BYTES


def test_interrupted_commands_end_as_if_nothing_had_happened() -> None:
    found = kills.in_fresh_process(5, 1, SERVED)
    assert found.failures == []
    assert found.hits.total() >= 5

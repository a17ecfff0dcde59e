"""The README's example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(readme), "exec"), {})
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)

"""docs/absent-gpus.md: its commands run as they stand there, from the repository's root, and its table is the source's."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from contracts.environment import ROOT
from forked import run_forked
from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import DATASHEETS

PAGE = (ROOT / "docs" / "absent-gpus.md").read_text()


def test_the_pages_commands_plan_16_v100_and_16_t4(tmp_path: Path):
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
    for name in ("tests", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = ""
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        command = [*(["-m", "qsync_core.cli"] if program == "qsync" else []), *arguments]
        (done,) = run_forked([command], [{**os.environ, "COLUMNS": "500"}], cwd=tmp_path, timeout_s=300)
        assert done.status == 0, (line, done.output)
        said += done.output
    assert "int8>float32 is left out: V100 has no int8 hardware" in said
    assert "verdict: estimated: use infer: 100.0% more throughput" in said
    plan = load(tmp_path / "plan.qsync", PrecisionPlan)
    assert plan.estimated == {"train": "NVIDIA H200", "infer": "NVIDIA H200"}
    labels = [assignment.variant.label for assignment in plan.group("infer").assignments.values()]
    assert labels.count("float32") == 6, "the page says six operators"
    assert plan.predicted_iteration_ns == pytest.approx(510e6, rel=0.01)


def test_the_pages_table_is_that_of_the_source():
    lines = PAGE.split("## The chips", 1)[1].splitlines()
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line)}
    assert set(rows) == {"chip", "---", *DATASHEETS}
    formats = (Precision.FLOAT16, Precision.BFLOAT16, Precision.INT8, Precision.FLOAT8_E4M3FN)
    for name, sheet in DATASHEETS.items():
        chip = sheet.chip
        peaks = [f"{chip.peak_tera[p]:g}" if p in chip.precisions else "–" for p in formats]
        tf32 = f"{sheet.tf32_tera:g}" if sheet.tf32_tera else "–"
        figures = [str(sheet.multiprocessors), f"{chip.peak_tera[Precision.FLOAT32]:g}", tf32, *peaks]
        assert rows[name] == [name, *figures, str(chip.memory_gb), str(chip.bandwidth_gb_s), sheet.source]

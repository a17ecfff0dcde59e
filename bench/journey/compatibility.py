"""Row U6: how many rows of docs/compatibility.md are run by a test that passes here.

A machine with GPUs runs what needs them, for row U6-gpu; one without runs everything else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from compatibility import page

ON_GPUS = "tests/gpu"


def rows() -> list[dict[str, Any]]:
    """Run every test that the page names, or those on GPUs, and count the rows of which one passes and none fails."""
    on_gpus = torch.cuda.is_available()
    named = {row.what: [test for test in row.tests if _on_gpus(test) or not on_gpus] for row in page.rows()}
    named = {what: tests for what, tests in named.items() if tests}
    tests = sorted({test for found in named.values() for test in found})
    ended, seconds = outcomes(tests)
    kinds = {what: set[str]().union(*(ended[test] for test in found)) for what, found in named.items()}
    passed = [what for what, found in kinds.items() if "passed" in found <= {"passed", "skipped"}]
    skipped = [what for what, found in kinds.items() if found == {"skipped"}]
    failed = [what for what in kinds if what not in (*passed, *skipped)]
    notes = [f"skipped, for they need a GPU (U6-gpu): {', '.join(skipped)}"] * bool(skipped)
    notes += [f"failed: {', '.join(failed)}"] * bool(failed)
    which = f"rows of the compatibility page, of {len(named)}" + " with tests on GPUs" * on_gpus
    row = {
        "id": "U6-gpu" if on_gpus else "U6",
        "what": f"{which}, that a test runs; {len(tests)} tests, {seconds:.0f} s",
        "value": len(passed),
        "unit": "rows",
        "spread": "; ".join(notes),
        "target": f"all {len(named)}",
    }
    return [row | ({"device": torch.cuda.get_device_name()} if on_gpus else {})]


def _on_gpus(test: str) -> bool:
    return page.places(test)[0].startswith(ON_GPUS)


def outcomes(tests: list[str]) -> tuple[dict[str, set[str]], float]:
    """By test, as the page names it, how its cases ended; and the seconds that all took."""
    nodes = [f"{page.ROOT / page.places(test)[0]}::{test.partition('::')[2]}" for test in tests]
    with tempfile.TemporaryDirectory(prefix="qsync-compatibility-") as folder:
        report = Path(folder) / "report.xml"
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *nodes]
        subprocess.run(command, cwd=page.ROOT, check=False)
        seconds = time.monotonic() - started
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, set[str]] = {test: set() for test in tests}
    for case in cases:
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"} or {"passed"}
        name = f"{case.attrib['classname'].rpartition('.')[2]}.py::{case.attrib['name']}"
        for key in {name, name.partition("[")[0]} & set(found):
            found[key] |= kinds
    return found, seconds

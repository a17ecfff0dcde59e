"""Rows W8: what README's two commands are, and how long the first takes in a fresh clone, from nothing to the demo's report.

The commands are those of README's section, typed as they stand there in a clone of the latest commit, with its own environment and
none of the variables that QSync reads.  What is downloaded comes from wherever pip is told to look.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOUND_S = 240
SECTION = re.compile(r"^## Two commands\n(.*?)^## ", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
SUMMARY = re.compile(r"quickstart: OK \([\d.]+=setup\[([\d.]+)\]\+cmd\[([\d.,]+)\] seconds\)")
"""What tox says at its end."""
FORGOTTEN = ("PYTHONPATH", "VIRTUAL_ENV", "TORCHINDUCTOR_CACHE_DIR")


def commands() -> tuple[list[str], list[str]]:
    """The lines to type for the main job, and for the tests.

    Raises:
        RuntimeError: when README's section has other blocks than these two.
    """
    found = SECTION.search((ROOT / "README.md").read_text(encoding="utf-8"))
    blocks = [block.strip().splitlines() for block in BLOCK.findall(found[1] if found else "")]
    if len(blocks) != 2:
        raise RuntimeError(f"README.md has {len(blocks)} blocks of commands below 'Two commands', and not 2")
    return blocks[0], blocks[1]


def rows() -> Iterator[dict[str, Any]]:
    """Count what is typed, then type the first.

    Raises:
        RuntimeError: when a command fails, or leaves no report.
    """
    main_job, tests = commands()
    yield {
        "id": "W8b",
        "what": "commands that README tells to type in a fresh clone for the main job, and for the tests",
        "value": f"{len(main_job)} and {len(tests)}",
        "unit": "commands",
        "spread": "; ".join([*main_job, *tests]),
        "target": "1 and 1",
    }
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "qsync"
        subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, clone], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QSYNC_") and name not in FORGOTTEN}
        load, start = os.getloadavg()[0], time.monotonic()
        done = subprocess.run(["bash", "-c", "\n".join(main_job)], cwd=clone, env=kept, capture_output=True, text=True)
        seconds = time.monotonic() - start
        told = SUMMARY.search(done.stdout)
        if done.returncode or told is None or not (clone / "qsync-demo" / "report.html").is_file():
            raise RuntimeError(f"the main job ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    installed, worked = float(told[1]), sum(map(float, told[2].split(",")))
    yield {
        "id": "W8",
        "what": "README's command for the main job in a fresh clone, without a GPU: seconds from the command to the report",
        "value": round(seconds, 1),
        "unit": "s",
        "spread": f"of these {seconds - installed - worked:.0f} s for tox itself, {installed:.0f} s for installing what "
        f"the job needs, and {worked:.0f} s for the job, on {os.cpu_count()} cores at a load of {load:.1f} before",
        "target": f"≤ {BOUND_S}",
    }

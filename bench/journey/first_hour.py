"""Row W5: from three scripts of other styles to training, as the README says it: commands, edits, and warnings on the way.

The README's line is written into each, both of its commands run on two CPU workers, each a group of its own, and what was
edited, what was typed and what was warned of is counted.  On a busy machine a rank is slow, which is said in a warning too: the
machine's load is in the row.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from journey.scripts import STYLES
from journey.two_commands import both_machines

WARNING = re.compile(r"\b\w*Warning: .*|\bwarning: .*", re.IGNORECASE)
COMMANDS = (("-m", "qsync", "prepare", "train.py", "-o", "run"), ("train.py",))


def rows() -> Iterator[dict[str, Any]]:
    """Take the way with each script."""
    warned, said, loads = [], [], [os.getloadavg()[0]]
    for script in STYLES:
        with tempfile.TemporaryDirectory() as folder:
            lines, seconds = _take(Path(folder), script.hybrid)
        warned += [f"{script.name}: {line}" for line in lines]
        loads.append(os.getloadavg()[0])
        added = " ".join(line for line in script.added() if "qsync.hybrid" in line)
        said.append(f"{script.name}: {added}, {' and '.join(f'{second:.0f} s' for second in seconds)}")
    yield {
        "id": "W5",
        "what": "from three scripts of other styles (a loop with accumulation, a trainer class, functions with a closure and a "
        "schedule) to training under a plan by the README alone, two CPU workers: commands, and places that are edited in each, "
        "its import aside",
        "value": f"{len(COMMANDS)} commands, {max(script.edits() for script in STYLES)} edit",
        "unit": "counted",
        "spread": "; ".join(said),
        "target": "2 commands, 1 edit each",
    }
    yield {
        "id": "W5b",
        "what": "warnings on that way, three scripts, both commands, both workers",
        "value": len(warned),
        "unit": "warnings",
        "spread": f"load of the machine {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores"
        + "".join(f"; {line}" for line in warned),
        "target": "0",
    }


def _take(folder: Path, text: str) -> tuple[list[str], list[float]]:
    """Prepare and train; the warnings of both, and how long each took."""
    (folder / "train.py").write_text(text)
    lines, seconds = [], []
    for number, command in enumerate(COMMANDS):
        took, output = both_machines(command, folder, 29651 + number)
        seconds.append(took)
        lines += [match[0] for match in map(WARNING.search, output.splitlines()) if match]
    return lines, seconds

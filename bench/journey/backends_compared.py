"""Row W4: from wheels alone, in an environment with nothing else, to the page of ``qsync bench`` with a backend of one's own.

The wheels are built on the spot: qsync-core, qsync-torch, and the example of a backend that docs/first-backend.md tells.  The
environment has what they declare, and PyTorch as constraints.txt holds it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from contracts.environment import Venv, run  # noqa: E402

SOURCES = (ROOT / "packages" / "qsync-core", ROOT / "packages" / "qsync-torch", ROOT / "examples" / "qsync-kernels-example")
BOUND_S, RUNS = 90, 3


def rows(folder: Path | None) -> Iterator[dict[str, Any]]:
    """Build, install, and time the command.

    Args:
        folder: of the environment, which is kept for the next time; None for one that is thrown away.

    Raises:
        RuntimeError: when a step fails, or the page lacks the backend.
    """
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        venv = _bare_environment(folder or work / "venv", work / "wheels")
        page, load, seconds = work / "page.html", os.getloadavg()[0], []
        for _ in range(RUNS):
            page.unlink(missing_ok=True)
            start = time.monotonic()
            done = venv.qsync("bench", "--device", "cpu", "--html", page, "--json")
            seconds.append(time.monotonic() - start)
            if done.returncode or not page.is_file():
                raise RuntimeError(f"qsync bench ended with {done.returncode}: {done.stderr}")
        found = json.loads(done.stdout)
        names = {row["contender"] for row in found["rows"]}
        if not {"aten", "example", "bfloat16"} <= names or ">example<" not in page.read_text(encoding="utf-8"):
            raise RuntimeError(f"the page does not show the backend: {', '.join(sorted(names))}")
        brought = ", ".join(sorted(name for name in venv.installed() if name.startswith("qsync")))
        size = page.stat().st_size
    times, who = ", ".join(f"{one:.1f}" for one in seconds), ", ".join(sorted(names))
    yield {
        "id": "W4",
        "what": f"qsync bench --html in an environment with {brought} from wheels, {len(found['rows'])} measurements on "
        f"{found['device']}: seconds to the page, the longest of {RUNS}",
        "value": round(max(seconds), 1),
        "unit": "s",
        "spread": f"{times}, at a load of {load:.1f} before; {size} bytes; contenders {who}",
        "target": f"≤ {BOUND_S}",
    }


def _bare_environment(folder: Path, wheels: Path) -> Venv:
    """An environment with the wheels as they are now, and what they declare."""
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels)
    if (done := run(*build, *SOURCES)).returncode:
        raise RuntimeError(f"the wheels cannot be built: {done.stderr}")
    venv = Venv(folder, wheels)
    names = [name for name in venv.installed() if name.startswith("qsync")]
    if names:
        run(sys.executable, "-m", "pip", "--python", venv.python, "uninstall", "--quiet", "--yes", *names)
    venv.install("qsync-torch", "qsync-kernels-example")
    return venv

"""Draws the picture of the demo's report that README.md shows; needs Chromium or Chrome, and the report of `qsync demo`.

tox run -e quickstart
python docs_build/report_picture.py qsync-demo/report.html --browser chromium
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo-report.png"
MAX_BYTES = 300_000
"""What a README may cost its readers."""


def draw(report: Path, picture: Path, browser: str, width: int, height: int) -> None:
    """Write the top of a page, in light colours, as a PNG of that many pixels.

    Raises:
        RuntimeError: when the browser fails, or the picture is larger than :data:`MAX_BYTES`.
    """
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "report.png"
        command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
        command += [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={drawn}"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
        command.append("--virtual-time-budget=20000")  # the page draws its charts once it is loaded
        if os.geteuid() == 0:  # Chromium's sandbox does not work for root, and this page is our own
            command.append("--no-sandbox")
        done = subprocess.run([*command, report.resolve().as_uri()], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode or not drawn.exists():
            raise RuntimeError(f"{browser} drew nothing of {report}: {done.stderr.strip()[-500:]}")
        content = drawn.read_bytes()
    if len(content) > MAX_BYTES:
        raise RuntimeError(f"the picture has {len(content):,} bytes, more than {MAX_BYTES:,}; choose a smaller --height")
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(content)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("report", type=Path, help="report.html of `qsync demo`")
    parser.add_argument("--browser", default="chromium", help="its program [chromium]")
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=1060)
    parser.add_argument("--height", type=int, default=1330)
    chosen = parser.parse_args()
    try:
        draw(chosen.report, chosen.output, chosen.browser, chosen.width, chosen.height)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"no picture: {error}", file=sys.stderr)
        return 1
    print(f"wrote {chosen.output} ({chosen.output.stat().st_size:,} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The paper's Fig. 3, 6 and 8 and the errors of predictions as pictures in ``docs/images``.

    python bench/hybrid_pictures.py [--results docs/results] [--timelines UNIFORM QSYNC] [--out docs/images]

Drawn from committed files alone: profiles of ``tests/data/h200`` and plans for them, rows of ``docs/results/kernels.json`` and
``hybrid.json``.  A picture for which rows are missing is not drawn, which is told.  ``--timelines`` draws two timelines of ``qsync
replay`` or of a training script, predicted or measured, instead of the stored model's predicted ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pictures.backends import NEEDED, draw_backends
from pictures.composition import draw_composition
from pictures.errors import draw_errors, predictions
from pictures.timelines import draw_timelines, planned_timelines
from qsync_core.artifacts.files import load
from qsync_core.ir.timeline import Timeline
from results import RESULTS, ROOT


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a results file by id; none where there is no file."""
    return {row["id"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} if path.exists() else {}


def main() -> None:
    """Draw what there is data for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of kernels.json and hybrid.json.")
    parser.add_argument("--timelines", type=Path, nargs=2, metavar=("UNIFORM", "QSYNC"), help="Timelines to draw.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    pictures = {"cost-composition": draw_composition(("resnet50", "bert-base"))}
    if options.timelines:
        uniform, qsync = (load(path, Timeline) for path in options.timelines)
        title = uniform.model
    else:
        uniform, qsync = planned_timelines("resnet50")
        title = "ResNet50, two H200 and two halves of one"
    pictures["uniform-against-qsync"] = draw_timelines(title, uniform, qsync)
    kernels, points = read_rows(options.results / "kernels.json"), list(predictions(read_rows(options.results / "hybrid.json")))
    missing = sorted(NEEDED - set(kernels))
    if not missing:
        pictures["low-precision-by-backend"] = draw_backends(kernels)
    else:
        print(f"no picture of backends: {options.results / 'kernels.json'} lacks {', '.join(missing)}")
    if points:
        pictures["prediction-errors"] = draw_errors(points)
    else:
        print(f"no picture of errors: {options.results / 'hybrid.json'} lacks rows H1-<model>-<configuration>-measured, -predicted")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        (options.out / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(f"{options.out / name}.svg")


if __name__ == "__main__":
    main()

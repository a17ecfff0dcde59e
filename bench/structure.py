"""Rows S1 to S15 of ``docs/results/structure.json``: how the source is arranged, and what a step under a plan does.

    python bench/structure.py --only S1,S2,S3,S5,S6

S1 and S2 say what the source has to do with PyTorch's insides, S3 and S4 how long it is, S5 where it names kinds of operators and
what a new one touches, S6 what a new rung does. S7 and S8 follow a call and time it, S9 is the test command, S10 to S13 are of
steps under a plan: forwards that run again, micro-batches, compiled graphs, other numbers without a word. S15 compares plans. S8
and S9 want a quiet machine; S9 runs all tests in a fresh clone, or reads what ``.ci/run`` printed there (``--only S9 --log
FILE``). S14 is written by ``bench/kernels/checksum_cost.py`` on a GPU.

Import cycles, the sizes of rooms, floors and citations are limits of ``tests/contracts/test_structure.py``.

``--tree DIR`` measures another checkout and prints only; ``--profile`` prints where the time of S8 goes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from results import ROOT, names_in, write_rows
from structure.kinds import NEW_KIND, NEW_RUNG, files_of_patch, files_that_name_kinds
from structure.private_names import Use, frame_walks, names_as_text, private_uses
from structure.rows import Row, row, shortened
from structure.running import run_in, step_profile
from structure.training_rows import (
    compiled_rows,
    host_time_rows,
    micro_batch_rows,
    path_rows,
    plan_rows,
    repeated_rows,
    silence_rows,
    test_command_rows,
)


def replaced_rows(tree: Path) -> Iterator[Row]:
    """S1."""
    found = json.loads(run_in(tree, "replaced.py"))
    what = f"of {found['places']} functions, classes, methods and properties of PyTorch, those that are other objects after"
    after, in_force = found["after"], found["in force"]
    yield row("S1", f"{what} import qsync_torch, apply_, a step and remove()", len(after), "", "; ".join(shortened(after)), "0")
    yield row("S1a", f"{what} a step, while the plan is in force", len(in_force), "", "; ".join(shortened(in_force)))
    what = "TorchFunctionModes entered in a step of a model under a plan, forward and backward"
    yield row("S1b", what, found["modes"], "", "", "0")


def insides_rows(tree: Path) -> Iterator[Row]:
    """S2."""
    uses, walks = private_uses(tree), frame_walks(tree)
    names = sorted({use.name for use in uses})
    yield row("S2", "private names of PyTorch in packages/*/src", len(names), "names", ", ".join(names), "≤ 25")
    yield row("S2a", "places in packages/*/src where a private name of PyTorch stands", len(uses), "")
    asked = names_as_text(tree)
    what = "private names that packages/*/src ask for with getattr or hasattr"
    yield row("S2c", what, len({use.name for use in asked}), "names", ", ".join(sorted({use.name for use in asked})))
    yield row("S2b", "walks of Python frames in packages/*/src", len(walks), "", "; ".join(map(_place, walks)), "≤ 2")


def _place(use: Use) -> str:
    return f"{use.module}:{use.line} {use.name}"


def kind_rows(tree: Path) -> Iterator[Row]:
    """S5."""
    found = [path.partition("/src/")[2] for path in files_that_name_kinds(tree)]
    what = "files of packages/*/src that name a kind of operators, outside of kinds, kernels and models"
    yield row("S5", what, len(found), "files", ", ".join(found), "≤ 6")
    touched = files_of_patch(tree, NEW_KIND)
    what = "files that a new kind touches (conv_transpose3d, in float formats), beside its tests"
    yield row("S5b", what, len(touched), "files", ", ".join(path.rpartition("/src/")[2] for path in touched), "≤ 6")


def rung_rows(tree: Path) -> Iterator[Row]:
    """S6."""
    touched = files_of_patch(tree, NEW_RUNG)
    what = "files that a rung with block scales touches (int8, one scale per 128 columns, aten), beside its tests"
    yield row("S6", what, len(touched), "files", ", ".join(path.partition("/src/")[2] for path in touched), "≤ 8")


def size_rows(tree: Path) -> Iterator[Row]:
    """S3 and S4, and what each package and each folder of tests has, by its rooms."""
    packages = [path for path in sorted((tree / "packages").iterdir()) if path.is_dir()]
    yield from _size_rows(
        "S3", "lines of packages/*/src: Python, C++ and templates", "≤ 54000", {path.name: path / "src" for path in packages}
    )
    folders = {name: tree / name for name in ("tests", "bench", "examples")}
    folders |= {f"{path.name}/tests": path / "tests" for path in packages}
    yield from _size_rows("S4", "lines of tests, benchmarks and examples", "≤ 68000", folders)


def _size_rows(id: str, what: str, target: str, folders: Mapping[str, Path]) -> Iterator[Row]:
    parts = {name: _lines(folder.rglob("*")) for name, folder in folders.items()}
    yield row(id, what, sum(parts.values()), "lines", _listed(parts), target)
    for name, folder in folders.items():
        room = next(iter(folder.glob("qsync_*")), folder)  # below src lies the package's one folder
        rooms = {inner.name: _lines(inner.rglob("*")) for inner in room.iterdir() if inner.is_dir()}
        largest = dict(sorted(((inner, count) for inner, count in rooms.items() if count), key=lambda entry: -entry[1]))
        yield row(f"{id}-{name.replace('/', '-')}", f"of these, {name}, by its rooms", parts[name], "lines", _listed(largest))


def _lines(paths: Iterable[Path]) -> int:
    return sum(
        path.read_bytes().count(b"\n") for path in paths if path.suffix in (".py", ".h", ".hpp", ".cu", ".cuh", ".inl", ".j2")
    )


def _listed(parts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} {count}" for name, count in parts.items())


ROWS = {
    "S1": replaced_rows, "S2": insides_rows, "S3": size_rows, "S5": kind_rows, "S6": rung_rows, "S7": path_rows,
    "S8": host_time_rows, "S10": repeated_rows, "S11": micro_batch_rows, "S12": compiled_rows,
    "S13": silence_rows, "S15": plan_rows,
}  # fmt: skip


def show(rows: list[Row]) -> None:
    """Print rows one a line."""
    for entry in rows:
        text = f"{entry['value']:.3g}" if isinstance(entry["value"], float) else entry["value"]
        print(f"{entry['id']:5} {text:>7} {entry['unit']:8} target {entry['target']:9} {entry['what']}", flush=True)


def main() -> None:
    """Measure, print, and write ``docs/results/structure.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout: its rows are printed, none are written")
    parser.add_argument("--profile", action="store_true", help="print where the time of S8 goes")
    parser.add_argument(
        "--only", default=",".join(ROWS), help=f"rows to measure, comma-separated: {','.join(ROWS)}; S4 comes with S3"
    )
    parser.add_argument("--log", type=Path, help="what .ci/run has printed, for S9: all tests are not run then")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    if arguments.profile:
        print(step_profile(tree))
        return
    measures = ROWS | {"S9": partial(test_command_rows, log=arguments.log)}
    rows = [entry for id in names_in(arguments.only, measures, "rows") for entry in measures[id](tree)]
    show(rows)
    if tree == ROOT:
        path = write_rows("structure", rows, f"python bench/structure.py --only {arguments.only}")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

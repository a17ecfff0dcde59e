"""Rows H1 to H10 and S1 to S15 of ``docs/results/structure.json``: how the source is arranged, and what that costs when it runs.

    python bench/structure.py [--test-command 18.5 | --measure-tests] [--rounds 3]
    python bench/structure.py --only S1,S2,S3,S5,S6

S1 and S2 say what the source has to do with PyTorch's insides, S3 and S4 how long it is, S5 where it names kinds of operators, S6
what a new rung touches. S7 and S8 follow a call and time it, S9 is the test command, S10 to S13 are of steps under a plan: forwards
that run again, micro-batches, compiled graphs, other numbers without a word. S15 compares plans. S8 and S9 want a quiet machine; S9
runs the tests twice. S14 is written by ``bench/kernels/checksum_cost.py`` on a GPU.

Each H row is measured in this tree and, as ``H…-before``, at commit c2de34d, whose arrangement was another. Cycles, floors, sizes
and citations are read from the source; H5 and H6 from a traced call; H7 is processor time of fresh processes that take turns.

``--tree DIR`` measures another checkout and prints only; ``--list`` prints every cycle, citation and frame behind the rows,
``--profile`` where the time of H7 goes, both instead of writing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from results import ROOT, write_rows
from structure.imports import cycles, floors, import_graph, modules, room_graph, room_sizes, within
from structure.kinds import files_of_commit, files_of_patch, files_that_name_kinds
from structure.private_names import Use, frame_walks, private_uses
from structure.rows import Row, row, shortened
from structure.running import KINDS, Round, call_path, checkout, run_in, step_profile, times_in_turns
from structure.texts import Citations, source_lines, text_files, written_apart
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

BEFORE = "c2de34d"
DIRECTLY = {"H2a": ("qsync_torch", 12), "H2b": ("qsync_core", 10), "H2c": ("qsync_planner", 8)}


def import_rows(tree: Path) -> Iterator[Row]:
    """H1 to H4."""
    files = modules(tree)
    graph, at_import = import_graph(files), import_graph(files, at_import=True)
    of_modules, of_rooms = cycles(graph), cycles(room_graph(graph))
    what = "import cycles, lazy and typing imports counted"
    yield row("H1", f"{what}: among modules and among rooms, together", len(of_modules) + len(of_rooms), "", "", "0")
    yield row("H1a", f"{what}: among modules", len(of_modules), "", _groups(of_modules))
    yield row("H1b", f"{what}: among rooms (a folder of a package, or a module beside them)", len(of_rooms), "", _groups(of_rooms))
    sizes = room_sizes(tree)
    for id, (package, most) in DIRECTLY.items():
        yield row(id, f"modules directly in {package}/, beside __init__.py", sizes[package], "modules", target=f"≤ {most}")
    others = {folder: size for folder, size in sizes.items() if folder not in {package for package, _ in DIRECTLY.values()}}
    largest = max(others, key=lambda folder: others[folder])
    yield row("H3", "modules in the largest other room, without __init__.py", others[largest], "modules", f"{largest}/", "≤ 18")
    torch, torch_at_import = within(graph, "qsync_torch"), within(at_import, "qsync_torch")
    what = "import floors of qsync_torch: longest chain of"
    yield row("H4", f"{what} rooms; rooms in a cycle count one by one", floors(room_graph(torch)), "floors", "", "≤ 10")
    yield row("H4a", f"{what} modules, only what is imported when they are", floors(torch_at_import), "floors")
    yield row("H4b", f"{what} modules, all imports", floors(torch), "floors")


def _groups(found: list[list[str]]) -> str:
    return "; ".join(" ↔ ".join(group) for group in found)


def call_rows(tree: Path) -> Iterator[Row]:
    """H5 and H6, of the second forward of ``nn.Linear`` in int8 on the CPU, with the backend ``aten``."""
    path = call_path(tree)
    stacks, deepest = path["stacks"], path["deepest"]
    what = "files to read for one int8 linear's forward"
    yield row(
        "H5", f"{what}: any with a frame from the replaced forward to its kernels' calls (casts too), and what installs it",
        len(path["way"]), "files", ", ".join(path["way"]), "≤ 8",
    )  # fmt: skip
    on_stack = sorted({file for file, _ in stacks["product"]} | {path["installer"]})
    yield row("H5a", f"{what}: those on the stack at its kernel's call alone, and the one that installs it", len(on_stack), "files")
    yield row("H5b", f"{what}: with a frame in apply_, the forward or inside its kernels", len(path["with_apply"]), "files")
    what = "Python frames from the replaced forward of an int8 linear to"
    product, cast = "the kernel of its product", "the kernel that casts its activation"
    yield row("H6a", f"{what} {product}, which is counted", len(stacks["product"]), "frames", _frames(stacks["product"]), "≤ 6")
    yield row("H6b", f"{what} {cast}, which is counted", len(stacks["cast"]), "frames", _frames(stacks["cast"]), "≤ 8")
    yield row("H6c", f"{what} the deepest point in {product}", len(deepest["product"]), "frames", _frames(deepest["product"]))
    yield row("H6d", f"{what} the deepest point in {cast}", len(deepest["cast"]), "frames", _frames(deepest["cast"]))


def _frames(stack: list[list[str]]) -> str:
    return " → ".join(f"{file.rpartition('/')[2]}:{function.rpartition('.')[2]}" for file, function in stack)


def text_rows(tree: Path) -> Iterator[Row]:
    """H8 and H9."""
    yield row("H8", "lines of packages/*/src/**/*.py", source_lines(tree), "lines", f"{len(modules(tree))} files", "≤ 37000")
    texts = text_files(tree)
    dead, apart = Citations(tree, texts).dead(), written_apart(texts)
    yield row("H9a", "citations that lead nowhere, in all text files", len(dead), "", "; ".join(shortened(dead)), "0")
    in_source = sum("/src/" in place for place in apart)
    yield row("H9b", 'times that "cannot" is two words, in all text files', len(apart), "", f"{in_source} in packages/*/src", "0")


def time_rows(rounds: Sequence[Round]) -> Iterator[Row]:
    """H7."""
    what = "host time of int8 layers, forward and backward, with kernels that do nothing, against before"
    for id, kinds in (("H7", KINDS), ("H7a", KINDS[:1]), ("H7b", KINDS[1:])):
        ratios = [round_.ratio(kinds) for round_ in rounds]
        layers = []
        for kind in kinds:
            now, before = (statistics.median(times) for times in zip(*(round_.time_us(kind) for round_ in rounds), strict=True))
            plain = statistics.median(round_.time_us(f"{kind} in PyTorch")[0] for round_ in rounds)
            layers.append(f"{kind} {now:.0f} µs a layer, before {before:.0f} µs, in PyTorch's float32 {plain:.0f} µs")
        spread = "; ".join([f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds", *layers])
        target = "≤ 0.7" if id == "H7" else "reported"
        yield row(id, f"{what}: {' and '.join(kinds)}", round(statistics.median(ratios), 3), "", spread, target)


def test_row(minutes: float) -> Row:
    """H10."""
    return row("H10", "the test command (tox run)", minutes, "min", "", "≤ 20, on a quiet machine with AVX-512")


def measured_tests() -> float:
    """Minutes that the test command takes, environments that are installed already left as they are.

    Raises:
        subprocess.CalledProcessError: when a test fails.
    """
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "tox", "run"], cwd=ROOT, check=True)
    return (time.monotonic() - start) / 60


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
    yield row("S2b", "walks of Python frames in packages/*/src", len(walks), "", "; ".join(map(_place, walks)), "≤ 2")


def _place(use: Use) -> str:
    return f"{use.module}:{use.line} {use.name}"


def kind_rows(tree: Path) -> Iterator[Row]:
    """S5."""
    found = [path.partition("/src/")[2] for path in files_that_name_kinds(tree)]
    what = "files of packages/*/src that name a kind of operators, outside of kinds, kernels and models"
    yield row("S5", what, len(found), "files", ", ".join(found), "≤ 6")
    if (tree / ".git").exists():
        touched = files_of_commit(tree, NEW_KIND)
        what = "files that the commit which adds conv1d touches beside its own tests"
        yield row("S5b", what, len(touched), "files", ", ".join(touched), "≤ 6")


def rung_rows(tree: Path) -> Iterator[Row]:
    """S6."""
    touched = files_of_patch(tree)
    what = "files that a rung with block scales touches (int8, one scale per 128 columns, aten), beside its tests"
    yield row("S6", what, len(touched), "files", ", ".join(path.partition("/src/")[2] for path in touched), "≤ 8")


NEW_KIND = "conv1d is an adjustable kind"
"""Subject of the commit that added one."""


def size_rows(tree: Path) -> Iterator[Row]:
    """S3 and S4."""
    parts = {f"{path.name}": _lines((path / "src").rglob("*")) for path in sorted((tree / "packages").iterdir()) if path.is_dir()}
    yield row("S3", "lines of packages/*/src: Python, C++ and templates", sum(parts.values()), "lines", _listed(parts), "≤ 54000")
    rest = {name: _lines((tree / name).rglob("*")) for name in ("tests", "bench", "examples")}
    rest["packages/*/tests"] = sum(_lines((path / "tests").rglob("*")) for path in (tree / "packages").iterdir())
    yield row("S4", "lines of tests, benchmarks and examples", sum(rest.values()), "lines", _listed(rest), "≤ 68000")


def _lines(paths: Iterable[Path]) -> int:
    return sum(
        path.read_bytes().count(b"\n") for path in paths if path.suffix in (".py", ".h", ".hpp", ".cu", ".cuh", ".inl", ".j2")
    )


def _listed(parts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} {count}" for name, count in parts.items())


INSIDES = {
    "S1": replaced_rows, "S2": insides_rows, "S3": size_rows, "S5": kind_rows, "S6": rung_rows, "S7": path_rows,
    "S8": host_time_rows, "S9": test_command_rows, "S10": repeated_rows, "S11": micro_batch_rows, "S12": compiled_rows,
    "S13": silence_rows, "S15": plan_rows,
}  # fmt: skip
"""Rows that ``--only`` measures by themselves."""


def rows_of(tree: Path) -> list[Row]:
    """H1 to H6, H8 and H9 of a tree."""
    return [*import_rows(tree), *call_rows(tree), *text_rows(tree)]


def show(rows: list[Row], spread: bool = False) -> None:
    """Print rows one a line."""
    for entry in rows:
        text = f"{entry['value']:.3g}" if isinstance(entry["value"], float) else entry["value"]
        print(f"{entry['id']:11} {text:>7} {entry['unit']:8} target {entry['target']:9} {entry['what']}", flush=True)
        if spread and entry["spread"]:
            print(f"{'':28} {entry['spread']}")


def show_details(tree: Path) -> None:
    """Print rows in full, and every citation and word behind H9."""
    show(rows_of(tree), spread=True)
    texts = text_files(tree)
    print("", "citations that lead nowhere:", *Citations(tree, texts).dead(), sep="\n  ")
    print("", '"cannot" as two words:', *written_apart(texts), sep="\n  ")
    print("", "private names of PyTorch:", *map(_place, private_uses(tree)), sep="\n  ")


def main() -> None:
    """Measure, print, and write ``docs/results/structure.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout: its rows are printed, none are written")
    parser.add_argument("--list", action="store_true", help="print what is behind every row")
    parser.add_argument("--profile", action="store_true", help="print where the time of H7 goes")
    parser.add_argument("--only", default="", help=f"rows to measure alone, comma-separated: {','.join(INSIDES)}")
    parser.add_argument("--rounds", type=int, default=3, help="of H7; 0 leaves it out")
    parser.add_argument("--test-command", type=float, metavar="MINUTES", help="H10, measured by hand on the machine of this run")
    parser.add_argument("--measure-tests", action="store_true", help="H10: run the test command and take its time")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    if arguments.only:
        measure_insides(arguments.only.split(","), tree)
    elif arguments.profile:
        print(step_profile(tree))
    elif arguments.list:
        show_details(tree)
    elif tree != ROOT:
        show(rows_of(tree))
    else:
        measure(arguments.rounds, measured_tests() if arguments.measure_tests else arguments.test_command)


def measure_insides(ids: Sequence[str], tree: Path) -> None:
    """Some of these rows alone; written where the tree is this one."""
    rows = [entry for id in ids for entry in INSIDES[id](tree)]
    show(rows)
    if tree == ROOT:
        path = write_rows("structure", rows, f"python bench/structure.py --only {','.join(ids)}")
        print(f"wrote {path.relative_to(ROOT)}")


def measure(rounds: int, test_minutes: float | None) -> None:
    """Every row, here and before."""
    rows = rows_of(ROOT)
    with checkout(ROOT, BEFORE) as old:
        rows += [entry | {"id": f"{entry['id']}-before", "target": ""} for entry in rows_of(old)]
        if rounds:
            rows += time_rows([times_in_turns(ROOT, old) for _ in range(rounds)])
    if test_minutes is not None:
        rows.append(test_row(test_minutes))
    for entry in rows:
        if entry["id"].endswith("-before"):
            entry["what"] += f", at {BEFORE}"
    show(sorted(rows, key=lambda entry: (int(entry["id"][1:3].rstrip("abcd-")), entry["id"].endswith("-before"), entry["id"])))
    path = write_rows("structure", rows, "python bench/structure.py")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""T5: damaged and inconsistent files through the commands that read them.

Each of at least 20,000 files is one of a small job's, damaged: bits, cuts, insertions, lengths, structure (most with a digest that
matches again), values that are of the right type and do not fit the rest, bombs of several megabytes, and the text files likewise.
Every command that reads such a file then has to accept it or to end with one sentence, within a time limit and 200 MB above what
the process had before; a command that refuses leaves no output.  The commands run inside worker processes, because starting Python
takes longer than most of them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import msgpack
from click.testing import CliRunner

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages/qsync-core/tests"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages/qsync-planner/tests"))

from artifact_mutations import HEADER_BYTES, MUTATIONS, mutate, reseal
from inconsistent import MUTATIONS as INCONSISTENT
from inconsistent import content, relinked, sealed
from synthetic import BFLOAT16, INT8, hybrid_profiles, transformer

from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.ir import observations as terms
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.tuning.record import Measurement
from qsync_core.tuning.store import TuningStore
from results import write_rows

TIME_LIMIT_S = 30
"""For one command on one file; most take a few milliseconds, those that plan a tenth of a second."""
MEMORY_LIMIT_BYTES = 200_000_000
BOMB_BYTES = 5_000_000

CLUSTER = """name = "hybrid"
[[group]]
name = "train"
device = "V100"
count = 2
role = "train"
[[group]]
name = "infer"
device = "T4"
count = 2
role = "infer"
memory = "15 GiB"
ladder = ["int8>float32", "float16", "float32"]
[[link]]
between = ["train", "infer"]
latency_us = 20
bandwidth_gbps = 32
"""
PLAN = [
    "plan",
    "--dag",
    "dag.qsync",
    "--cluster",
    "cluster.toml",
    "--profile",
    "train=train.qsync",
    "--profile",
    "infer=infer.qsync",
]
GREEDY = [*PLAN, "--sensitivity", "sensitivity.qsync", "--solver", "greedy", "-o", "out"]
REPLAY = ["replay", "plan.qsync", *PLAN[1:], "-o", "out"]
INDICATE = ["indicate", "observations.qsync", "--dag", "dag.qsync", "-o", "out"]
COMMANDS: dict[str, list[list[str]]] = {
    "dag.qsync": [
        ["show", "dag.qsync"],
        GREEDY,
        REPLAY,
        INDICATE,
        ["backends", "dag.qsync"],
        [*PLAN, "--solver", "uniform", "-o", "out"],
    ],
    "train.qsync": [["show", "train.qsync", "--json"], GREEDY, REPLAY, [*PLAN, "--solver", "full", "-o", "out"]],
    "infer.qsync": [["show", "infer.qsync"], GREEDY, REPLAY, [*PLAN, "--solver", "uniform", "-o", "out"]],
    "sensitivity.qsync": [["show", "sensitivity.qsync"], GREEDY, [*GREEDY, "--tolerance", "0.2"]],
    "observations.qsync": [["show", "observations.qsync"], INDICATE, [*INDICATE, "--cluster", "cluster.toml"]],
    "plan.qsync": [
        ["show", "plan.qsync"],
        ["explain", "plan.qsync"],
        ["explain", "plan.qsync", "--json"],
        ["plan", "--diff", "plan.qsync", "other.qsync"],
        ["plan", "--diff", "other.qsync", "plan.qsync", "--json"],
        REPLAY,
    ],
    "predicted.qsync": [["show", "predicted.qsync"], ["verify", "predicted.qsync", "measured.qsync"]],
    "measured.qsync": [["show", "measured.qsync"], ["verify", "predicted.qsync", "measured.qsync", "--json"]],
    "cluster.toml": [GREEDY, [*INDICATE, "--cluster", "cluster.toml"]],
    "tuning.sqlite": [
        ["tune", "--merge", "tuning.sqlite", "-o", "out"],
        ["backends", "dag.qsync", "--device", "cuda", "--device-name", "T4", "--tuning", "tuning.sqlite"],
    ],
}
"""What reads each file."""


class TooSlowError(BaseException):
    """A command took longer than the time limit; no command catches it."""


def make_files() -> dict[str, bytes]:
    """The files of a small job, by name, that fit together: every command above accepts them."""
    dag = transformer(layers=1, batch=2, tokens=32)
    profiles = {name: attrs.evolve(p, dag_digest=artifact.digest(dag)) for name, p in hybrid_profiles(dag).items()}
    variants = (Variant.of(INT8), Variant.of(INT8, sixteen_bit=BFLOAT16), *profiles["infer"].cost_index[dag.adjustable[0].op_id])
    series = [
        Series(operator.op_id, variant, terms.LOSSVAR, term, (float(1 + i + j), float(2 + i + j)))
        for i, operator in enumerate(dag.adjustable)
        for j, variant in enumerate(dict.fromkeys(variants))
        for term in (terms.X_VAR_GRAD, terms.W_VAR_GRAD, terms.Y_VAR_GRAD)
    ]
    observed = Observations(dag.model, artifact.digest(dag), (10, 11), 2, "budget", tuple(series), {"seed": "0"})
    made = {"dag.qsync": dag, "observations.qsync": observed, "train.qsync": profiles["train"], "infer.qsync": profiles["infer"]}
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for file, content in made.items():
            artifact.save(content, file)
        Path("cluster.toml").write_text(CLUSTER)
        store = TuningStore(Path("tuning.sqlite"), "T4", {"torch": "2"})
        request = KernelRequest(Op.QUANTIZE, Variant.of(INT8), ((64, 64),), device_kind="cuda", compute_capability="7.5")
        for count in range(1, 9):
            store.add_measurement(store.key("aten", request), f"tile={count}", Measurement(1_000 * count, 3))
        for arguments, output in (
            ([*INDICATE, "--cluster", "cluster.toml"], "sensitivity.qsync"),
            (GREEDY, "plan.qsync"),
            ([*PLAN, "--solver", "uniform", "-o", "out"], "other.qsync"),
            (REPLAY, "predicted.qsync"),
        ):
            result = CliRunner().invoke(cli, arguments)
            if result.exit_code:
                raise SystemExit(f"qsync {' '.join(arguments)} failed on files that are as they should be:\n{result.output}")
            Path("out").rename(output)
        artifact.save(attrs.evolve(artifact.load("predicted.qsync"), source="measured"), "measured.qsync")
        return {path.name: path.read_bytes() for path in Path().iterdir() if path.suffix in (".qsync", ".toml", ".sqlite")}


# Damage

_EXTREMES: dict[type, tuple[Any, ...]] = {
    int: (0, 1, 2, 3, 2**31, 2**62 - 1, 2**62),
    float: (0.0, -1.0, 1e-300, 1e300, 1.5),
    bool: (True, False),
}


def change_values(rng: random.Random, data: bytes) -> bytes:
    """Change values and keep their types: what is left decodes, has a matching digest, and does not fit the rest."""
    tree = content(data)
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2))):
            rng.choice(INCONSISTENT)(rng, tree)
        return sealed(data, tree)
    names = [name for name in _strings(tree) if "#" in name] or [""]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change_value(rng, tree, names)
    return sealed(data, tree)


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (list, dict)):
        for entry in [*tree, *tree.values()] if isinstance(tree, dict) else tree:
            yield from _strings(entry)


def _change_value(rng: random.Random, tree: Any, names: list[str]) -> None:
    container = tree
    while True:
        children = list(container.values()) if isinstance(container, dict) else container
        inner = [child for child in children if isinstance(child, (dict, list)) and child]
        if not inner or rng.random() < 0.25:
            break
        container = rng.choice(inner)
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    if not keys:
        return
    key = rng.choice(keys)
    value = container[key]
    if isinstance(value, list) and rng.random() < 0.6:
        container[key] = rng.choice((value[1:], value[:-1], value * 2, value[::-1], []))
    elif isinstance(value, dict) and any("#" in name or ";" in name for name in value) and rng.random() < 0.6:
        gone = rng.choice(list(value))
        renamed = {
            rng.choice([*names, gone + "x"]) if name == gone and rng.random() < 0.5 else name: v for name, v in value.items()
        }
        renamed.pop(gone, None)
        container[key] = dict(sorted(renamed.items()))
    elif isinstance(value, str):
        container[key] = rng.choice((rng.choice(names), value + "x", "", value.upper(), "linear", "conv2d", "relu", "1,1", "0"))
    elif type(value) in _EXTREMES:
        container[key] = rng.choice(_EXTREMES[type(value)])
    elif isinstance(container, list):
        rng.shuffle(container)


def change_text(rng: random.Random, data: bytes) -> bytes:
    """Cut, repeat, move or replace lines, words and bytes of a text file."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(7):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 2:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        case 3:
            words = (
                b"nan",
                b"inf",
                b"-1",
                b"0",
                b"1e400",
                b"9" * 40,
                b'""',
                b"[]",
                b"{}",
                b"true",
                b'"x"',
                b"[" * 2000,
                b"1979-05-27",
            )
            key, _, _ = lines[at].partition(b"=")
            lines[at] = key + b"= " + rng.choice(words)
        case 4:
            lines[at] = lines[at].replace(b"1", rng.choice((b"0", b"-1", b"1e30", b"999999999999")), 1)
        case 5:
            lines[at] = lines[at].replace(b":", rng.choice((b": [", b": {", b": -", b": 1e999 ")), 1)
        case 6:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 3, 20))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
    return b"\n".join(lines)


def _announced(count: int, item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


def _inside(data: bytes, value: bytes) -> bytes:
    """The content with ``value`` as its first field's value, so that the bomb lies inside an artifact's own form."""
    tree = msgpack.unpackb(data[HEADER_BYTES:])
    first, *others = tree.items()
    packed = bytes([0x80 | len(tree)]) if len(tree) < 16 else b"\xde" + struct.pack(">H", len(tree))
    packed += msgpack.packb(first[0]) + value
    return packed + b"".join(msgpack.packb(name) + msgpack.packb(entry) for name, entry in others)


_ITEMS = (
    b"\x80",
    b"\x90",
    b"\x81\xa0\xc0",
    b"\x91\xc0",
    b"\xa2ab",
    b"\xcd\xff\xff",
    b"\x91" * 500 + b"\xc0",
    b"\xcb" + b"\x40" * 8,
)


def bomb(rng: random.Random, data: bytes) -> bytes:
    """Megabytes that would take many times as much memory, with a digest that matches."""
    item = rng.choice(_ITEMS)
    listed = _announced(rng.choice((BOMB_BYTES, BOMB_BYTES // 10)) // len(item), item)
    content = rng.choice(
        (listed, _inside(data, listed), b"\x91" * BOMB_BYTES + b"\xc0", b"\xdd\xff\xff\xff\xff" + b"\x90" * BOMB_BYTES)
    )
    return reseal(data[:HEADER_BYTES] + content)


def text_bomb(rng: random.Random, data: bytes) -> bytes:
    """The same for a text file: as large as it may be, or larger."""
    size = rng.choice((1 << 20, BOMB_BYTES)) - len(data) - 100
    line = rng.choice((b"\n", b"12\n", b"{}\n", b"[[group]]\n", b"[a.b.c.d]\n", b"# \n", b'"' + b"x" * 60 + b'"\n'))
    nested = rng.choice((b"[", b'{"a":', b"a = [", b"a." * 50 + b"a = 1\n"))
    long_value = b'x = "' + b"x" * size + b'"\n'
    return data + rng.choice((line * (size // len(line)), nested * (size // len(nested)), long_value))


Damage = Callable[[random.Random, bytes], bytes]
_STRUCTURAL: list[Damage] = [
    lambda rng, data, mutation=mutation, resealed=resealed: mutate(rng, data, mutation, resealed)  # type: ignore[misc]
    for mutation, resealed in MUTATIONS
]


def damage(rng: random.Random, name: str, data: bytes) -> tuple[str, bytes]:
    """What was done to a file, and the file."""
    if not name.endswith(".qsync"):
        return ("text bomb", text_bomb(rng, data)) if rng.random() < 0.02 else ("text", change_text(rng, data))
    drawn = rng.random()
    if drawn < 0.01:
        return "bomb", bomb(rng, data)
    if drawn < 0.45:
        return "inconsistent", change_values(rng, data)
    return "damaged", rng.choice(_STRUCTURAL)(rng, data)


# Running


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End what runs for longer, by an alarm.

    Raises:
        TooSlowError: then.
    """

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def run_command(arguments: list[str]) -> tuple[str, str, int]:
    """Run a command in this process: ``accepted`` or ``refused``, else what is wrong with how it ended; and the memory it took."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    existing = Path("out").exists()
    try:
        with limited(TIME_LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = CliRunner().invoke(cli, arguments)
    except TooSlowError:
        return "hang", "", 0
    memory = _status("VmHWM") - before
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return "traceback", "".join(traceback.format_exception(error))[-1500:], memory
    if memory > MEMORY_LIMIT_BYTES:
        return "memory", f"{memory / 1e6:.0f} MB", memory
    if result.exit_code == 0:
        return "accepted", "", memory
    said = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "Error: "))]
    if len(said) != 1 or "Traceback" in result.stderr or " failed with " in said[0]:
        return "no sentence", result.stderr[-1500:], memory
    if len(said[0]) > 2_000:
        return "no sentence", f"{len(said[0])} characters: {said[0][:300]}", memory
    if Path("out").exists() and not existing:
        return "output left", said[0], memory
    return "refused", said[0], memory


def check(numbers: range, seed: int, originals: dict[str, bytes]) -> dict[str, Any]:
    """Damage the files of these numbers and run a command on each; returns what happened."""
    names = list(COMMANDS)
    linked = {name: originals[name] for name in originals if name.endswith(".qsync") and name != "dag.qsync"}
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    slowest, heaviest = (0.0, ""), (0, "")
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for name, data in originals.items():
            Path(name).write_bytes(data)
        for arguments in (command for commands in COMMANDS.values() for command in commands):  # so that imports count for no file
            run_command(arguments)
            Path("out").unlink(missing_ok=True)
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            name = rng.choice(names)
            arguments = COMMANDS[name][0] if rng.random() < 0.4 else rng.choice(COMMANDS[name])  # most first ones are fast
            done, changed = damage(rng, name, originals[name])
            kinds[done] += 1
            Path(name).write_bytes(changed)
            others = relinked({"dag": changed, **linked}) if name == "dag.qsync" and done == "inconsistent" else {}
            for other in linked if others else ():
                Path(other).write_bytes(others[other])
            Path("out").unlink(missing_ok=True)
            start = time.monotonic()
            outcome, detail, memory = run_command(arguments)
            slowest = max(slowest, (time.monotonic() - start, f"file {number} ({name}, {done})"))
            heaviest = max(heaviest, (memory, f"file {number} ({name}, {done})"))
            outcomes[outcome] += 1
            if outcome not in ("accepted", "refused"):
                failures.append(f"file {number} ({name}, {done}): qsync {' '.join(arguments)}: {outcome}: {detail}")
            for restored in (name, *(linked if others else ())):
                Path(restored).write_bytes(originals[restored])
            if number % 50 == 0:
                gc.collect()
    return {
        "outcomes": dict(outcomes),
        "kinds": dict(kinds),
        "failures": failures,
        "slowest": slowest,
        "heaviest": heaviest,
    }


def check_all(count: int, seed: int, processes: int, first: int = 0) -> dict[str, Any]:
    """The same in worker processes, put together."""
    originals = make_files()
    share = max(1, min(2_500, count // processes))
    tasks = [(range(start, min(start + share, first + count)), seed, originals) for start in range(first, first + count, share)]
    total: dict[str, Any] = {"outcomes": Counter(), "kinds": Counter(), "failures": [], "slowest": (0.0, ""), "heaviest": (0, "")}
    with multiprocessing.get_context("forkserver").Pool(processes) as pool:
        for found in pool.starmap(check, tasks, chunksize=1):
            total["outcomes"].update(found["outcomes"])
            total["kinds"].update(found["kinds"])
            total["failures"] += found["failures"]
            for name in ("slowest", "heaviest"):
                total[name] = max(total[name], found[name])
    return total


def main() -> None:
    """Run, print, and write the rows T5."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=24_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file, to repeat one that failed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    start = time.monotonic()
    found = check_all(options.count, options.seed, options.processes, options.first)
    outcomes, failures = found["outcomes"], found["failures"]
    print("\n\n".join(failures[:40]))
    print(json.dumps({**found, "failures": len(failures), "seconds": round(time.monotonic() - start)}, indent=2))
    detail = (
        f"{found['kinds']['damaged']} damaged, {found['kinds']['inconsistent']} inconsistent with a matching digest, "
        f"{found['kinds']['text']} text files, {found['kinds']['bomb'] + found['kinds']['text bomb']} bombs; "
        f"{outcomes['refused']} refused in one sentence, {outcomes['accepted']} accepted; slowest {found['slowest'][0]:.1f} s"
    )
    rows = [
        {
            "id": "T5",
            "what": "damaged and inconsistent files through the commands",
            "value": options.count,
            "unit": "files",
            "spread": detail,
            "target": "≥ 20,000",
        },
        {
            "id": "T5b",
            "what": "of them, neither accepted nor refused in a sentence: tracebacks, hangs, over 200 MB, output left behind",
            "value": len(failures),
            "unit": "files",
            "target": "0",
        },
        {
            "id": "T5c",
            "what": "most memory that one command took above the start",
            "value": round(found["heaviest"][0] / 1e6),
            "unit": "MB",
            "target": "≤ 200",
        },
    ]
    if not options.no_write:
        write_rows("robustness", rows, f"python bench/robustness/damaged.py --count {options.count} --seed {options.seed}")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

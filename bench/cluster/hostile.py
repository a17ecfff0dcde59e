"""C7: run folders that an attacker has written, through all that reads them.

A real run folder is prepared once.  Each of at least 5,000 copies is then changed as an attacker could who may write the folder, or
who is one rank of the job: the ledger's names, files and types; links, pipes and folders in the place of files; the cluster file;
damaged and inconsistent artifacts, with the digests that the ledger has of them; text that a terminal obeys in every string; what a
rank says.  ``prepare`` (with stored measurements in the place of measuring), ``report``, ``show``, ``explain``, ``plan --diff``,
``verify``, ``launch``, and ``apply_`` read it.  An audit hook sees every file that is opened, removed or renamed outside of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "robustness"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages/qsync-core/tests"))

import msgpack
import torch.distributed as dist
from artifact_mutations import MUTATIONS, mutate
from click.testing import CliRunner
from damaged import TooSlowError, change_values, limited
from inconsistent import content, sealed

from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.profile import Profile
from qsync_core.printable import is_printable
from qsync_core.run_folder import RunFolder
from qsync_torch import apply_
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.nccl import process_group_options
from qsync_torch.load_job import load_job
from qsync_torch.prepare import flow, measuring
from qsync_torch.prepare.folder import Folder, Made, merge_disks, open_folder
from qsync_torch.prepare.ledger import sha256_of
from results import parser_of, write_rows

LIMIT_S = 30
"""For one folder; most take a few hundredths of a second."""
FAULTS = ("touched", "tracebacks", "obeyed")
OBEYED = ("\x1b[2J\x1b]0;mine\x07", "\x9b1A", "\r\x1b[1A", "\u202egnp.exe", "\u2066x\u2069", "\x08\x08\x7f", "\U000e0041", "\x1bc")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""Of rich's own; no hostile text has one."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
JOB = """
import torch
from torch import nn
from qsync_torch.job import Batch, Job


def make_job():
    torch.manual_seed(0)

    def batch(step, size):
        generator = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, 32, generator=generator),), target=torch.arange(size) % 3)

    return Job(
        "tiny",
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3)),
        batch,
        lambda output, batch: nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
"""


class Watch:
    """Files outside of the run folder that were touched, by an audit hook that stays for the life of the process."""

    def __init__(self) -> None:
        self.on, self.run, self.outside = False, "", ""
        self.touched: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or event not in _EVENTS:
            return
        self.on = False
        try:
            for path in arguments[: _EVENTS[event]]:
                if isinstance(path, (str, bytes, os.PathLike)):
                    self._judge(event, os.fsdecode(path), arguments)
        finally:
            self.on = True

    def _judge(self, event: str, path: str, arguments: tuple[Any, ...]) -> None:
        # A name is removed or exchanged itself; what is opened is what it leads to.
        real = os.path.realpath(path)
        if event != "open":
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if real.startswith(self.run + os.sep) or real == self.run:
            return
        writes = event != "open" or bool((arguments[2] or 0) & _WRITES)
        if real.startswith(self.outside) or real == "/etc/passwd" or (writes and not _is_harmless(real)):
            self.touched.append(f"{event} {real}")


_EVENTS = {"open": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2, "os.symlink": 2,
           "os.chmod": 1, "os.chown": 1, "shutil.rmtree": 1, "os.utime": 1}  # fmt: skip
"""Audit events of changes, and how many of their arguments are paths."""


def _is_harmless(path: str) -> bool:
    return "__pycache__" in path or path in (os.devnull, "/dev/tty")


_NOTHING_LEFT = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Where an earlier attack has left nothing that a later one could change."""

# Attacks: each changes the folder; the names are counted


def _file(path: Path) -> Path:
    """A path at which an earlier attack has left a file, and no pipe or device, which would be read without end.

    Raises:
        FileNotFoundError: otherwise.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    return path


def _ledger(run: Path) -> dict[str, Any]:
    return json.loads(_file(run / ".prepare" / "ledger.json").read_text())


def _write_ledger(run: Path, ledger: Any) -> None:
    _file(run / ".prepare" / "ledger.json").write_text(json.dumps(ledger))


def _targets(run: Path) -> list[str]:
    outside = run.parent / "outside"
    return ["../outside/train.py", str(outside / "train.py"), "profiles/../../outside/train.py",
            "..\\outside\\train.py", "/etc/passwd",
            "../outside", ".", "..", "", "/dev/zero", "/dev/stdin", "CON", "NUL", "C:\\x",
            "//x/y", "a\x00b", "~/.bashrc", "$HOME/x",
            "profiles/train.qsync/../../../outside/train.py", "\u202e../outside/train.py", "x" * 5000]  # fmt: skip


_ODD: tuple[Any, ...] = (None, True, -1, 1e308, 2**80, "", "x", [], {}, [[]], {"a": 1}, "\x1b[2J", [None] * 9, {"": {}})


def ledger_names(rng: random.Random, run: Path) -> None:
    ledger, target = _ledger(run), rng.choice(_targets(run))
    name = rng.choice(
        [*ledger["parts"], "profile ../../outside/train", f"profile {target}", f"plan {target}", "script", "timeline x"]
    )
    part = ledger["parts"].setdefault(name, {"inputs": {}, "file": "", "sha256": "", "value": ""})
    part["file"] = target
    if rng.random() < 0.7:
        part["sha256"] = sha256_of((run.parent / "outside" / "train.py").read_bytes())
    _write_ledger(run, ledger)


def ledger_types(rng: random.Random, run: Path) -> None:
    ledger = _ledger(run)
    place: Any = ledger
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        inner = [key for key in place if isinstance(place[key], dict) and place[key]]
        if not inner:
            break
        place = place[rng.choice(inner)]
    place[rng.choice(list(place) or ["x"])] = rng.choice((*_ODD, rng.choice(OBEYED)))
    _write_ledger(run, ledger)


def ledger_text(rng: random.Random, run: Path) -> None:
    data = bytearray(_file(run / ".prepare" / "ledger.json").read_bytes())
    for _ in range(rng.choice((1, 1, 4, 32))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    hostile = rng.choice(
        (bytes(data), bytes(data[: rng.randrange(len(data))]), b"[" * 50_000, b"\xff\xfe", b"", b'{"format": 1e999}')
    )
    (run / ".prepare" / "ledger.json").write_bytes(hostile)


def link(rng: random.Random, run: Path) -> None:
    inside = [*run.rglob("*"), run / "profiles" / "train.qsync.partial", run / "timelines" / "measured"]
    place, outside = rng.choice(inside), run.parent / "outside"
    if not place.parent.is_dir():
        place.parent.mkdir(parents=True)
    target: Any = (
        outside / "folder" if place.is_dir() else rng.choice((outside / "train.py", outside / "plan.qsync", "/etc/passwd"))
    )
    kind = rng.random()
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif place.is_symlink() or place.exists():
        place.unlink()
    if kind < 0.6:
        place.symlink_to(rng.choice((target, os.path.relpath(target, place.parent), outside / "new", place, "/dev/zero")))
    elif kind < 0.75:
        os.mkfifo(place)
    elif kind < 0.9:
        (place / "x-y").mkdir(parents=True)
    else:
        (run / ".prepare").mkdir(exist_ok=True)
        (run / ".prepare" / "a-b").symlink_to(outside / "train.py")


def cluster_file(rng: random.Random, run: Path) -> None:
    path = _file(run / "cluster.toml")
    text = path.read_text()
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    obeyed = "".join(f"\\U{ord(letter):08X}" for letter in rng.choice(OBEYED))
    odd = rng.choice(
        ('"' + obeyed + '"', "7", "-1", "[]", "{}", "true", "1e999", "nan", '"../x"', '"x/y"', "[[]]", '"[/bold]"', "''")
    )
    key = lines[at].partition("=")[0]
    lines[at] = (
        f"{key or 'name '}= {odd}" if rng.random() < 0.7 else rng.choice((lines[at] * 2, "", "[[group]]", f'"{obeyed}" = 1'))
    )
    path.write_text("\n".join(lines) if rng.random() < 0.9 else text[: rng.randrange(len(text))])


def _artifacts(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*.qsync") if path.is_file() and not path.is_symlink())


def _put(rng: random.Random, run: Path, path: Path, data: bytes) -> None:
    """Exchange an artifact, most often with its digest in the ledger."""
    path.write_bytes(data)
    with contextlib.suppress(*_NOTHING_LEFT):
        ledger = _ledger(run)
        for part in ledger["parts"].values():
            if part["file"] == path.relative_to(run).as_posix() and rng.random() < 0.8:
                part["sha256"] = sha256_of(data)
        _write_ledger(run, ledger)


def damaged_artifact(rng: random.Random, run: Path) -> None:
    if found := _artifacts(run):
        path = rng.choice(found)
        mutation, resealed = rng.choice(MUTATIONS)
        _put(rng, run, path, mutate(rng, _file(path).read_bytes(), mutation, resealed))


def changed_values(rng: random.Random, run: Path) -> None:
    if found := _artifacts(run):
        path = rng.choice(found)
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            _put(rng, run, path, change_values(rng, _file(path).read_bytes()))


def no_times(rng: random.Random, run: Path) -> None:
    def without(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: without(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [without(entry, key) for entry in value]
        return type(value)(0) if key.endswith(("_ns", "ns_per_byte", "ns_per_element")) and type(value) in (int, float) else value

    for path in _artifacts(run):
        if rng.random() < 0.5:
            with contextlib.suppress(ValueError, msgpack.UnpackException):
                _put(rng, run, path, sealed(_file(path).read_bytes(), without(content(path.read_bytes()))))


def obeyed_text(rng: random.Random, run: Path) -> None:
    share = rng.choice((0.02, 0.2, 1.0))

    def hostile(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: hostile(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [hostile(entry, key) for entry in value]
        return value + rng.choice(OBEYED) if isinstance(value, str) and rng.random() < share else value

    if found := _artifacts(run):
        path = rng.choice(found)
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            _put(rng, run, path, sealed(_file(path).read_bytes(), hostile(content(path.read_bytes()))))


def text_files(rng: random.Random, run: Path) -> None:
    path = run / rng.choice(("start.txt", "report.html", ".prepare/lock", "cluster.toml"))
    if path.parent.is_dir() and not path.is_dir() and not path.is_symlink() and not path.is_fifo():
        path.write_bytes(
            rng.choice((b"\x1b[2J" * 9, b"\xff\xfe\x00", "".join(OBEYED).encode(errors="replace"), b"", b"</script>" * 99))
        )


def odd_names(rng: random.Random, run: Path) -> None:
    name = rng.choice(("\x1b[2J", "a+", "..", "\u202ex", "train+train", "train+infer", "-o", "x" * 200, "train\n", "+", " "))
    with contextlib.suppress(OSError):
        (run / "plans").mkdir(exist_ok=True)
        shutil.copy(next(iter(_artifacts(run)), __file__), run / "plans" / f"{name}.qsync")


ATTACKS: tuple[Callable[[random.Random, Path], None], ...] = (
    ledger_names, ledger_types, ledger_text, link, cluster_file, damaged_artifact, changed_values, no_times, obeyed_text,
    text_files, odd_names,
)  # fmt: skip


# What reads a folder


def command(*arguments: str) -> Callable[[random.Random, Path], str]:
    """A command of ``qsync`` in this process, with what it prints on a terminal of colours."""

    def run_command(rng: random.Random, run: Path) -> str:
        files = [str(path) for path in _artifacts(run)] or [str(run / "job.dag.qsync")]
        chosen = [argument.format(run=run, file=rng.choice(files), other=rng.choice(files)) for argument in arguments]
        result = CliRunner().invoke(cli, chosen, env={"FORCE_COLOR": "1"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if "Traceback (most recent call last)" in result.stderr:
            raise AssertionError(result.stderr[-1500:])
        return result.output

    return run_command


def prepare(rng: random.Random, run: Path) -> str:
    return command("prepare", str(run.parent.parent / "job.py") + ":make_job", "-o", "{run}", "--device", "cpu")(rng, run)


def train(rng: random.Random, run: Path) -> str:
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (
            lambda: process_group_options(run),
            lambda: apply_(load_job(f"{run.parent.parent / 'job.py'}:make_job", None).model, run),
        ):
            try:
                call()
            except QSyncError as error:
                said.append("".join(traceback.format_exception(error)))
    return "".join((*said, *(str(warning.message) for warning in caught)))


_honest_told = Folder.told


def two_ranks(rng: random.Random, run: Path) -> str:
    """Rank 1 has the hostile disk, or is hostile itself; rank 0 has an empty one beside what is outside."""
    other, store = run.parent / "run-of-rank-0", dist.HashStore()
    lies: dict[str, str] = {}
    if rng.random() < 0.5:
        target = rng.choice(_targets(run))
        part = {"inputs": {}, "file": rng.choice((target, "job.dag.qsync")), "sha256": "", "value": rng.choice(OBEYED)}
        parts = rng.choice(
            (json.dumps({rng.choice(("graph", f"profile {target}", target)): part}), json.dumps(rng.choice(_ODD)), "{", "")
        )
        lies["parts"] = parts
        if rng.random() < 0.3:
            lies[rng.choice(("pieces", "removed"))] = json.dumps(rng.choice(_ODD))

    def told(folder: Folder, facts: dict[str, str]) -> Any:
        return _honest_told(folder, {**facts, **lies} if folder.rank == 1 and "parts" in facts else facts)

    def work(rank: int) -> str:
        try:
            with open_folder((other, run)[rank], Mailbox(rank, range(2), dist.PrefixStore("job", store), 20.0)) as folder:
                merge_disks(folder)
                folder.publish({"profile train": Made({}, b"new")} if rank else {}, [rng.choice(_targets(run))] if rank else [])
        except QSyncError as error:
            return str(error)
        return ""

    Folder.told = told  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(2) as pool:
            return "\n".join(pool.map(work, range(2)))
    finally:
        Folder.told = _honest_told  # type: ignore[method-assign]


READERS: tuple[tuple[float, str, Callable[[random.Random, Path], str]], ...] = (
    (8, "prepare", prepare), (2, "report", command("report", "{run}")), (5, "show", command("show", "{file}")),
    (2, "show --json", command("show", "{file}", "--json")), (2, "explain", command("explain", "{file}")),
    (2, "plan --diff", command("plan", "--diff", "{file}", "{other}")), (2, "verify", command("verify", "{file}", "{other}")),
    (2, "launch", command("launch", "{run}", "script.py")), (5, "apply_", train), (2, "two ranks", two_ranks),
)  # fmt: skip


def stored_measurements(base: RunFolder) -> None:
    """From now on, what ``prepare`` would measure is what the base folder has."""
    dag = artifact.load(base.dag, PrecisionDag)
    profile = artifact.load(next(iter((base.path / "profiles").glob("*.qsync"))), Profile)
    observations = artifact.load(base.observations, Observations)
    flow.trace = lambda job: dag  # type: ignore[assignment]
    measuring.trace = flow.trace
    measuring.profile = lambda *_, **__: profile  # type: ignore[assignment]
    measuring.observe = lambda *_, **__: observations  # type: ignore[assignment]


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(count: int, seed: int, first: int = 0) -> dict[str, Any]:
    """Change and read as many folders; returns what happened."""
    found: dict[str, Any] = {**{kind: [] for kind in FAULTS}, "readers": Counter(), "attacks": Counter(), "refused": 0}

    def tell(kind: str, what: str) -> None:
        found[kind].append(f"{label}: {what}")
        print(found[kind][-1], file=sys.stderr, flush=True)

    watch = Watch()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        os.environ |= {"XDG_CACHE_HOME": str(scratch / "cache"), "QSYNC_GROUP": "train", "QSYNC_RANK_TIMEOUT_S": "10"}
        (scratch / "job.py").write_text(JOB)
        base = scratch / "base"
        prepared = CliRunner().invoke(cli, ["prepare", f"{scratch / 'job.py'}:make_job", "-o", str(base), "--device", "cpu"])
        if prepared.exit_code:
            raise SystemExit(f"the folder could not be prepared:\n{prepared.output}")
        stored_measurements(RunFolder(base))
        place, weights = scratch / "place", [weight for weight, *_ in READERS]
        for number in range(first, first + count):
            rng = random.Random(f"{seed} {number}")
            shutil.rmtree(place, ignore_errors=True)
            run, outside = place / "run", place / "outside"
            shutil.copytree(base, run)
            (outside / "folder").mkdir(parents=True)
            for kept in ("train.py", "folder/mine.qsync", "folder/a-b"):
                (outside / kept).write_text("mine")
            shutil.copy(next((base / "plans").glob("*.qsync")), outside / "plan.qsync")
            attacks = rng.sample(ATTACKS, rng.choice((1, 1, 1, 2, 3)))
            for attack in attacks:
                with contextlib.suppress(*_NOTHING_LEFT):
                    attack(rng, run)
                found["attacks"][attack.__name__] += 1
            _, reader, read = rng.choices(READERS, weights)[0]
            found["readers"][reader] += 1
            label = f"folder {number} ({', '.join(attack.__name__ for attack in attacks)}; {reader})"
            before = snapshot(outside)
            watch.run, watch.outside, watch.touched, watch.on = str(run), str(outside), [], reader != "two ranks"
            said = ""
            try:
                with limited(LIMIT_S), warnings.catch_warnings():
                    if reader != "apply_":
                        warnings.simplefilter("ignore")
                    said = read(rng, run)
            except TooSlowError:
                tell("tracebacks", f"it takes longer than {LIMIT_S} s")
            except BaseException as error:  # the very thing that is looked for
                tell("tracebacks", "".join(traceback.format_exception(error))[-1500:])
            finally:
                watch.on = False
            touched = [one for one in watch.touched if str(scratch / "cache") not in one]
            if touched or snapshot(outside) != before:
                tell("touched", str(touched[:5] or "content"))
            if not is_printable(_STYLE.sub("", said)):
                tell("obeyed", repr(said[-300:]))
            found["refused"] += "rror: " in said or (reader == "two ranks" and bool(said.strip()))
    return found


# Memory

_MEASURE = """
import sys
from pathlib import Path
from qsync_core.artifacts import files
from qsync_core.errors import QSyncError
from qsync_core.run_folder import RunFolder
from qsync_torch.prepare.ledger import read_parts

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1024

run = RunFolder(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
try:
    read_parts(run) if sys.argv[2] == "ledger" else files.load(run.dag)
except QSyncError:
    pass
print(status("VmHWM") - before)
"""


def dense(kind: str, nbytes: int) -> bytes:
    """A file of that size, as dense as its format allows."""
    if kind == "ledger of empty mappings":
        return b'{"format": 1, "parts": {"x": [' + b"{}," * (nbytes // 3) + b"{}]}}"
    if kind == "ledger of short keys":
        entries = (f'"{number:x}":{{}}' for number in range(nbytes // 10))
        return ('{"format": 1, "parts": {' + ",".join(entries) + "}}").encode()
    items = 2_000
    chunk: Any = {
        "small mappings": [{"a": 1}] * items, "empty mappings": [{}] * items, "empty lists": [[]] * items,
        "short strings": [f"{number % 99:02}" for number in range(items)], "integers": [300] * items, "ones": [1] * items,
        "nested": [[[[[[]]]]]] * items,
    }[kind]  # fmt: skip
    packed = msgpack.packb(chunk)
    chunks = nbytes // len(packed)
    front = artifact._FRONT.pack(artifact.MAGIC, b"PrecisionDag", 2, 0)
    body = b"\xdd" + chunks.to_bytes(4, "big") + packed * chunks
    front = artifact._FRONT.pack(artifact.MAGIC, b"PrecisionDag", 2, len(body))
    return front + artifact._sha256(front, body) + body


def memory(nbytes: int) -> dict[str, float]:
    """MiB above the start for each MiB of file, by kind of file."""
    kinds = ("small mappings", "empty mappings", "empty lists", "short strings", "integers", "ones", "nested",
             "ledger of empty mappings", "ledger of short keys")  # fmt: skip
    found = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            run = RunFolder(name)
            path = run.ledger if "ledger" in kind else run.dag
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(dense(kind, nbytes))
            command = [sys.executable, "-c", _MEASURE, name, "ledger" if "ledger" in kind else "artifact"]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind] = float(ended.stdout) / (path.stat().st_size / 2**20)
    return found


def main() -> None:
    """Run, print, and write the rows C7."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first folder, to repeat one that failed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mib", type=int, default=57, help="size of the dense files")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    start = time.monotonic()
    found = check(options.count, options.seed, options.first)
    taken = memory(options.mib << 20)
    for kind in FAULTS:
        print(f"\n\n{kind}:\n" + "\n\n".join(found[kind][:25]))
    worst = max(taken, key=lambda kind: taken[kind])
    print(json.dumps({**{k: v for k, v in found.items() if not isinstance(v, list)}, "MiB per MiB": taken}, indent=1))
    print({kind: len(found[kind]) for kind in FAULTS}, f"{time.monotonic() - start:.0f} s")
    if options.no_write:
        return
    many = f"{options.count} hostile run folders"
    detail = ", ".join(f"{count} by {reader}" for reader, count in found["readers"].items())
    first = {kind: (found[kind][0][:200] if found[kind] else None) for kind in FAULTS}
    sizes = ", ".join(f"{kind} {ratio:.1f}" for kind, ratio in taken.items())
    rows = [
        {"id": "C7", "what": f"{many} ({detail}): those by which a file outside was touched", "value": len(found["touched"]),
         "unit": "folders", "spread": first["touched"], "target": "0, of ≥ 5,000"},
        {"id": "C7b", "what": f"{many}: tracebacks, and readings that end in no {LIMIT_S} s", "value": len(found["tracebacks"]),
         "unit": "folders", "spread": first["tracebacks"], "target": "0"},
        {"id": "C7c", "what": f"{many}: raw control characters on a terminal", "value": len(found["obeyed"]), "unit": "folders",
         "spread": first["obeyed"], "target": "0"},
        {"id": "C7d", "what": f"memory above the start per size of file, {options.mib} MiB as dense as can be; most, by {worst}",
         "value": round(taken[worst], 2), "unit": "MiB per MiB", "spread": sizes, "target": "≤ 10"},
    ]  # fmt: skip
    write_rows("cluster", rows, f"python bench/cluster/hostile.py --count {options.count} --seed {options.seed}",
               directory=options.out)  # fmt: skip


if __name__ == "__main__":
    main()

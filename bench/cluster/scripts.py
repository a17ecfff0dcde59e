"""Row C4: scripts in two ranks that communicate, and others beside them, under a plan and without one.

    python bench/cluster/scripts.py [--only momentum,gather] [--out FOLDER] [--new]

The scripts of ``script_kinds`` run in one pair of processes, in turn: each compares outputs, gradients and buffers of every rank
with those of the same script in float32, within the error of its formats.  Then rows T1 and T2 are run again (not with ``--new``).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import attrs
import torch
import torch.distributed as dist

from cluster.script_kinds.script import SCRIPTS, Outcome, run
from processes import free_port
from results import parser_of, write_rows

KINDS = ("cluster.script_kinds.collectives", "cluster.script_kinds.lone")
"""Importing them enters their scripts."""
WAIT_S = 30
COMMAND = "python bench/cluster/scripts.py"


def all_names() -> list[str]:
    """Of all scripts."""
    for kind in KINDS:
        importlib.import_module(kind)
    return list(SCRIPTS)


def run_on_two_ranks(names: Sequence[str]) -> dict[str, list[Outcome]]:
    """By script, what became of it on each rank."""
    found: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        left = list(names)
        while left:  # a rank that is killed takes the rest along, which two new ones run
            results = [Path(folder, f"{len(left)}-{rank}.jsonl") for rank in range(2)]
            run_pair(left, free_port(), results)
            lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in results]
            done = min(map(len, lines))
            for name, *outcomes in zip(left[:done], *lines, strict=False):
                found[name] = [Outcome(**outcome) for outcome in outcomes]
            if done < len(left):
                found[left[done]] = [Outcome("failed", "a rank ended in it")] * 2
            left = left[done + 1 :]
    return found


def run_pair(names: Sequence[str], port: int, results: Sequence[Path]) -> None:
    """Two processes that run scripts in turn, until all are done or one of the processes has ended."""
    bench = Path(__file__).resolve().parents[1]
    paths = [str(bench), str(bench.parent / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank, path in enumerate(results):
        path.touch()
        command = [sys.executable, "-m", "cluster.scripts", "--rank", str(rank), str(port), str(path), *names]
        started.append(subprocess.Popen(command, env={**os.environ, **common}))
    end = time.monotonic() + 60 + 5 * len(names)
    try:
        while time.monotonic() < end and all(process.poll() is None for process in started):
            time.sleep(0.1)
        if not any(process.returncode for process in started):  # else one waits for the other in vain
            for process in started:
                process.wait(timeout=WAIT_S)
    finally:
        for process in started:
            process.kill()


def be_rank(rank: int, port: int, path: Path, names: Sequence[str]) -> None:
    """Run scripts in turn, and write a line for each."""
    all_names()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=2 * WAIT_S))
    _join(store, rank, "start")
    with path.open("w") as file:
        for name in names:
            outcome = run(SCRIPTS[name], rank)
            file.write(json.dumps(attrs.asdict(outcome)) + "\n")
            file.flush()
            store.set(f"{name}/{rank}", outcome.status)
            if any(store.get(f"{name}/{other}") not in (b"right", b"silent") for other in range(2)):
                dist.destroy_process_group()  # whose ranks may be at different collectives
                _join(store, rank, name)
    store.set(f"end/{rank}", "")
    if rank == 0:  # which holds the store
        store.wait(["end/1"])
    sys.stdout.flush()
    os._exit(0)  # without the destructors of wrappers and a process group, which now and then abort


def _join(store: dist.Store, rank: int, name: str) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=2, timeout=timedelta(seconds=WAIT_S))


def earlier_rows() -> dict[str, dict[str, Any]]:
    """Rows T1 and T2, measured now."""
    found = {}
    for script in ("zoo_runs", "wrong_scripts"):
        path = Path(__file__).resolve().parents[1] / "robustness" / f"{script}.py"
        printed = subprocess.run([sys.executable, str(path), "--no-write"], stdout=subprocess.PIPE, text=True, check=False).stdout
        found |= {row["id"]: row for row in json.loads(printed)}
    return found


def row_of(found: Mapping[str, Sequence[Outcome]], earlier: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The row C4."""
    worst = {name: min((outcome.status for outcome in outcomes), key=_ORDER.index) for name, outcomes in found.items()}
    count = Counter(worst.values())
    kinds = {re.sub(r"\[.*", "", name) for name in found}
    parts = [
        f"{len(found)} new scripts of {len(kinds)} kinds on two ranks: {count['right']} right, "
        f"{count['refused']} refused in a sentence, {count['silent']} silent, {count['failed']} failed"
    ]
    parts += [f"{key}: {earlier[key]['value']} of {earlier[key]['spread']}" for key in ("T1", "T2") if key in earlier]
    parts += [] if earlier else ["T1 and T2 not run again"]
    parts += [f"{name}: {status}" for name, status in worst.items() if status in ("silent", "failed")]
    silent = count["silent"] + sum(earlier[key]["value"] for key in ("T1", "T2") if key in earlier)
    what = "zoo and scripts with collectives in the forward, changes of requires_grad and others: other numbers without a word"
    return {"id": "C4", "what": what, "value": silent, "unit": "scripts", "spread": "; ".join(parts), "target": "0"}


_ORDER = ("silent", "failed", "refused", "right")


def main() -> None:
    """Run, print, and write the row C4."""
    if sys.argv[1:2] == ["--rank"]:
        rank, port, path, *names = sys.argv[2:]
        be_rank(int(rank), int(port), Path(path), names)
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="beginnings of scripts' names, comma-separated")
    parser.add_argument("--new", action="store_true", help="without T1 and T2")
    options = parser.parse_args()
    wanted = tuple(filter(None, options.only.split(",")))
    names = [name for name in all_names() if name.startswith(wanted or "")]
    found = run_on_two_ranks(names)
    for name, outcomes in found.items():
        for rank, outcome in enumerate(outcomes):
            if outcome.status != "right":
                print(f"{name} rank {rank}: {outcome.status}: {outcome.detail}", file=sys.stderr)
    row = row_of(found, {} if options.new or wanted else earlier_rows())
    print(json.dumps(row, indent=2))
    if not wanted:
        write_rows("cluster", [row], COMMAND + " --new" * options.new, directory=options.out)
    if any(outcome.status in ("silent", "failed") for outcomes in found.values() for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

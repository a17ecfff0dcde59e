"""Where measured figures go: ``docs/results/<topic>.json``, one row per id, each with what it takes to measure it again.

The file itself names machine, versions, commit and command of the latest run.  Runs are merged row by row, so a row of an
earlier run carries its own wherever they differ.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from qsync_core.artifacts.atomic_file import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

_FIELDS = ("id", "what", "value", "unit", "spread", "target")
_VERSIONS = (
    "qsync-core", "qsync-planner", "qsync-torch", "qsync-kernels-cutlass", "qsync-kernels-triton", "torch", "numpy", "transformers",
    "triton", "nvidia-cutlass", "torchao", "bitsandbytes", "msgpack", "cattrs", "highspy",
)  # fmt: skip


def write_rows(
    topic: str,
    rows: Iterable[Mapping[str, Any]],
    command: str,
    *,
    directory: Path = RESULTS,
    measured: Mapping[str, Any] | None = None,
) -> Path:
    """Merge rows into a results file by their ids; other rows stay as they are.

    Args:
        topic: name of the file without ``.json``.
        rows: mappings with ``id``, ``what``, ``value`` and ``unit``, and, where there are any, ``spread`` (of the value, in its
            unit, or as text that says which), ``target`` (text: ``≤ 0.10``, ``reported``) and ``device`` (if not the CPU).
        command: the command line that measures them.
        directory: where results are kept.
        measured: the :func:`provenance` of the process that measured, if not this one.

    Returns:
        The file.

    Raises:
        ValueError: when a row lacks a field, has an unknown one, or a value that JSON cannot hold.
    """
    return _merge(topic, rows, {**(measured or provenance()), "command": command}, directory)


def drop_rows(topic: str, ids: str, *, directory: Path = RESULTS) -> list[str]:
    """Take the rows out whose ids a regular expression matches as a whole: what nothing measures any more.

    Returns:
        Their ids.
    """
    path = directory / f"{topic}.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    dropped = [row["id"] for row in stored["rows"] if re.fullmatch(ids, row["id"])]
    stored["rows"] = [row for row in stored["rows"] if row["id"] not in dropped]
    _write(path, stored)
    return dropped


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script with this docstring, which writes rows into the folder ``--out``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    return parser


def names_in(text: str, known: Iterable[str], what: str) -> list[str]:
    """Read the names in an option, comma-separated.

    Args:
        what: they name, for the message.

    Raises:
        SystemExit: naming those that are not known.
    """
    names, all_names = [name.strip() for name in text.split(",") if name.strip()], list(known)
    if unknown := [name for name in names if name not in all_names]:
        raise SystemExit(f"no such {what}: {', '.join(unknown)}; known are {', '.join(all_names)}")
    return names


def provenance() -> dict[str, Any]:
    """Machine, versions and commit of this process, for rows that are worked out elsewhere."""
    return {"machine": machine(), "versions": versions(), "commit": commit()}


def merge_file(path: Path, *, directory: Path = RESULTS) -> Path:
    """Merge a results file that was written on another machine; its rows keep that machine, its versions, commit and command."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return _merge(path.stem, stored["rows"], {name: value for name, value in stored.items() if name != "rows"}, directory)


def _merge(topic: str, rows: Iterable[Mapping[str, Any]], run: Mapping[str, Any], directory: Path) -> Path:
    path = directory / f"{topic}.json"
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
        earlier = {name: value for name, value in stored.items() if name != "rows"}
        merged = {row["id"]: earlier | row for row in stored["rows"]}
        for row in rows:
            own = {name: row[name] for name in run if name in row}
            merged[row["id"]] = run | own | _complete({name: row[name] for name in row if name not in own})
        ordered = [_without(merged[key], run) for key in sorted(merged, key=_natural)]
        _write(path, {**run, "rows": ordered})
    finally:
        os.close(handle)
    return path


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n").encode())


def machine() -> dict[str, Any]:
    """CPU, number of cores this process may use, and memory."""
    cpu = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found[1] if found else cpu
    except OSError:
        pass  # not Linux
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1), "system": platform.system()}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """What ``QSYNC_COMMIT`` says (a copy on another machine may hold an older repository), else the checked-out commit, with
    ``+changes`` where tracked files differ from it; ``unknown`` outside a repository.
    """
    if named := os.environ.get("QSYNC_COMMIT"):
        return named
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "packages"], cwd=ROOT, check=False).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _complete(row: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("id", "what", "value", "unit") if name not in row]
    unknown = sorted(set(row) - {*_FIELDS, "device"})
    if missing or unknown:
        raise ValueError(f"row {row.get('id')!r} lacks {missing} or has unknown fields {unknown}")
    if isinstance(row["value"], float) and not math.isfinite(row["value"]):
        raise ValueError(f"row {row['id']!r} has the value {row['value']!r}")
    return {name: row.get(name) for name in _FIELDS} | ({"device": row["device"]} if "device" in row else {})


def _without(row: dict[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The row's figures first, then of its run only what differs from the latest."""
    figures = {name: value for name, value in row.items() if name not in run}
    return figures | {name: row[name] for name in run if name in row and row[name] != run[name]}


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """S2 before S10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", key)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="results of another machine, which are merged")
    parser.add_argument("--drop", nargs=2, metavar=("TOPIC", "IDS"), help="take out rows: structure 'H.*'")
    asked = parser.parse_args()
    for name in asked.files:
        print(f"merged into {merge_file(name)}")
    if asked.drop:
        print(f"dropped {', '.join(drop_rows(*asked.drop)) or 'nothing'}")

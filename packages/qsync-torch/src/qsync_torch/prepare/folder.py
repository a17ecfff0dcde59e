"""The run folder on all machines of a job: one writer for each disk, and the same files on every one.

What a rank has made goes to the others through the process group's store, and is written, atomically, by one rank for each folder
that there is: machines that share a disk have one, the others each their own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
from filelock import BaseFileLock, FileLock, Timeout

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.codec import to_plain
from qsync_core.artifacts.files import MAX_BYTES, digest, from_bytes
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import ArtifactError, QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.run_folder import RunFolder
from qsync_torch.distributed.mailbox import PIECE_BYTES, Mailbox
from qsync_torch.distributed.ranks import together, told_by_all
from qsync_torch.prepare.ledger import (
    Part,
    Parts,
    difference,
    file_of,
    parts_told,
    read_parts,
    relative_file,
    sha256_of,
    write_parts,
)

WHAT = "qsync prepare"
CLUSTER = "cluster"
"""The part that is the cluster file."""
GRAPH = "graph"
"""The part that is the job's graph; its digest is an input, by that name, of all that is made from it."""
_CANNOT_WRITE = "cannot write "
_NONCE = re.compile("[0-9a-f]{16}")
_MOST_PIECES = MAX_BYTES // PIECE_BYTES + 1

T = TypeVar("T")


@attrs.frozen
class Made:
    """What a rank has made: a part, and the bytes of its file; none where it has no file."""

    inputs: Mapping[str, str]
    data: bytes = b""
    value: str = ""

    def part(self, name: str) -> Part:
        """The part of that name, as the ledger has it."""
        return Part(dict(self.inputs), *((relative_file(name), sha256_of(self.data)) if self.data else ("", "")), self.value)


@attrs.define(eq=False)
class Folder:
    """The run folder as one rank sees it; every rank calls the same methods in the same order.

    Attributes:
        members: the ranks; None in a job of one.
        writes: whether this rank writes for its disk.
        parts: what is finished, the same on every rank.
        made: which of them were made now, by any rank.
    """

    run: RunFolder
    members: Mailbox | None
    writes: bool
    parts: dict[str, Part] = attrs.field(factory=dict)
    made: list[str] = attrs.field(factory=list)
    _rounds: int = 0
    _said: set[str] = attrs.field(factory=set)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.members.rank if self.members else 0

    def is_kept(self, name: str, inputs: Mapping[str, str]) -> bool:
        """Whether a part is there that was made from the same."""
        part = self.parts.get(name)
        return part is not None and part.inputs == inputs

    def why_anew(self, name: str, inputs: Mapping[str, str]) -> str:
        """A sentence on why a part that is there is made again; empty where it is not, or the same was said of another.

        Another graph is the reason of everything: it is said of the part ``graph`` alone.
        """
        part = self.parts.get(name)
        why = "" if part is None else difference(part.inputs, inputs)
        if not why or why in self._said:
            return ""
        self._said.add(why)
        if name == GRAPH:
            return f"the job is not the one that {self.run.path} was made for ({why}), so all of it is made anew"
        if part is not None and part.inputs.get(GRAPH) != inputs.get(GRAPH):
            return ""
        return f"{name}, and all that depends on the same, is made anew: {why}"

    def publish(self, made: Mapping[str, Made], removed: Sequence[str] = ()) -> None:
        """Write on all disks what this rank and the others have made, and note it in the ledger.

        Args:
            made: by name; empty on ranks that have made nothing.
            removed: parts that are no more, or never were, with any files of theirs; of rank 0.

        Raises:
            QSyncError: on every rank, when one cannot write.
        """
        self._rounds += 1
        pieces = self._put(made)
        said = {
            "parts": json.dumps({name: to_plain(one.part(name)) for name, one in made.items()}),
            "pieces": json.dumps(pieces),
            "removed": json.dumps(list(removed)),
        }
        heard = {rank: of_rank(rank, _News.of, facts) for rank, facts in self.told(said).items()}
        if not any(news.parts or news.removed for news in heard.values()):
            return
        with self.together(slow=True), _writing(self.run.path):
            for rank, news in heard.items():
                for name in news.removed:
                    self.parts.pop(name, None)
                    # A fresh start knows no parts, and what an earlier one has left there is of another plan.
                    if self.writes and (path := file_of(name, self.run)):
                        path.unlink(missing_ok=True)
                for name, part in news.parts.items():
                    if self.writes and part.file and (path := file_of(name, self.run)):
                        own = rank == self.rank
                        data = made[name].data if own else self._files.take(name, rank, news.pieces.get(name, 0))
                        if sha256_of(data) != part.sha256:
                            raise QSyncError(f"rank {rank} sent another content of {name} than its digest says; start it again")
                        path.parent.mkdir(parents=True, exist_ok=True)
                        write_atomically(path, data)
                    self.parts[name] = part
                    self.made.append(name)
            if self.writes:
                write_parts(self.run.ledger, self.parts)
        for name, count in pieces.items():
            self._files.unsend(name, count)

    def told(self, facts: Mapping[str, str]) -> dict[int, Mapping[str, str]]:
        """What every rank says, by rank."""
        return told_by_all(WHAT, facts, self.members, slow=True) if self.members else {0: facts}

    @contextmanager
    def together(self, facts: Mapping[str, str] = {}, *, slow: bool = False) -> Iterator[dict[str, str]]:
        """A block that ends every rank where it ends one, or where facts differ; what cannot be written, with what to do."""
        if self.members is None:
            with _advising():
                yield dict(facts)
            return
        with together(WHAT, facts, slow=slow, group=self.members) as agreed, _advising():
            yield agreed

    def read(self, name: str) -> bytes:
        """The file of a part, on this rank's disk.

        Raises:
            ArtifactError: when it cannot be read.
        """
        path = file_of(name, self.run)
        assert path is not None  # only those with a file are asked for
        try:
            return read_whole(path, MAX_BYTES, "files of a run folder")
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None

    def load(self, name: str, kind: type[T], dag: PrecisionDag) -> T | None:
        """What the file of a part holds; None where there is no such part, or it was made of another graph.

        Raises:
            ArtifactError: when it cannot be read.
        """
        part = self.parts.get(name)
        if part is None or part.inputs.get(GRAPH) != digest(dag):
            return None
        return from_bytes(self.read(name), kind, name=name)

    @property
    def _files(self) -> Mailbox:
        """What files of this round go through."""
        assert self.members is not None
        return self.members.part(f"qsync/prepare/{self._rounds}")

    def _put(self, made: Mapping[str, Made]) -> dict[str, int]:
        """How many pieces of each file this rank has sent."""
        return {name: self._files.send(name, one.data) for name, one in made.items()} if self.members else {}


@attrs.frozen
class _News:
    """What a rank says that it has made, and that is no more.

    Attributes:
        parts: by name; their files are the run folder's own.
        pieces: of each one's file in the store.
    """

    parts: Parts
    pieces: Mapping[str, int]
    removed: tuple[str, ...]

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> _News:
        """Read what a rank has said.

        Raises:
            QSyncError: when it is something else.
        """
        parts = parts_told(facts.get("parts", ""))
        try:
            pieces, removed = json.loads(facts["pieces"]), json.loads(facts["removed"])
        except (ValueError, LookupError, RecursionError) as error:
            raise QSyncError(f"what it has made cannot be read: {error}") from None
        if not (isinstance(pieces, dict) and all(type(count) is int and 0 <= count <= _MOST_PIECES for count in pieces.values())):
            raise QSyncError(f"it counts the pieces of its files as {str(pieces)[:80]}")
        if not (isinstance(removed, list) and all(isinstance(name, str) for name in removed)):
            raise QSyncError(f"it removes {str(removed)[:80]}, which are no names of parts")
        return cls(parts, pieces, tuple(removed))


def of_rank(rank: int, read: Callable[[Any], T], said: Any) -> T:
    """Read what a rank has said; an error names the rank.

    Raises:
        QSyncError: on every rank, as all hear the same.
    """
    try:
        return read(said)
    except QSyncError as error:
        raise QSyncError(
            f"{WHAT}: rank {rank} says what it cannot: {error}; correct that, and start all with one version of qsync-torch"
        ) from None


@contextmanager
def open_folder(path: Path, members: Mailbox | None) -> Iterator[Folder]:
    """The run folder, locked against another ``qsync prepare`` for as long as the block runs.

    Raises:
        QSyncError: on every rank, when one cannot write there, or another ``qsync prepare`` works in it.
    """
    folder = Folder(RunFolder(path), members, writes=True)
    nonce = folder.told({"nonce": secrets.token_hex(8)})[0]["nonce"]
    token = lock = None
    try:
        with folder.together(), _writing(path):
            if not _NONCE.fullmatch(nonce):
                raise QSyncError(
                    f"{WHAT}: rank 0 sends {nonce[:80]!r} where a nonce is expected; start all ranks with the same version"
                )
            own = folder.run.ledger.parent
            own.mkdir(parents=True, exist_ok=True)
            token = own / f"{nonce}-{folder.rank}"
            token.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        with folder.together(), _writing(path):
            # By exact names, which no file system has remembered as missing.
            ranks = members.ranks if members else [0]
            first = next((rank for rank in ranks if (own / f"{nonce}-{rank}").exists()), folder.rank)
            folder.writes = first == folder.rank
            if folder.writes:
                others = [left for left in own.glob("*-*") if not left.name.startswith(nonce)]
                lock = FileLock(folder.run.lock)
                _take(lock, path, others)
                for left in others:  # by one that was killed
                    left.unlink(missing_ok=True)
        yield folder
    finally:
        with suppress(OSError):
            if token is not None:
                token.unlink(missing_ok=True)
        if lock is not None:
            lock.release()


def merge_disks(folder: Folder, *, fresh: bool = False) -> Parts:
    """Give every disk what any of them has: nodes come in any order, and some may be new.

    The cluster file is left alone: a person may have changed it on any of them.

    Args:
        folder: whose parts are then those of all disks.
        fresh: nothing that was measured counts.

    Returns:
        What this rank's disk had, unchanged.

    Raises:
        QSyncError: on every rank, when one cannot read or write.
    """
    with folder.together(slow=True):
        own = read_parts(folder.run) if folder.writes else {}
    heard = folder.told({"parts": json.dumps({name: to_plain(part) for name, part in own.items()}), "writes": str(folder.writes)})
    disks: dict[int, Parts] = {
        rank: of_rank(rank, parts_told, said["parts"]) for rank, said in heard.items() if said["writes"] == "True"
    }
    made: dict[str, Made] = {}
    for name in dict.fromkeys(name for parts in disks.values() for name in parts):
        source = next(rank for rank, parts in disks.items() if name in parts)
        part = disks[source][name]
        if fresh and name != CLUSTER:
            continue
        folder.parts[name] = part
        if name != CLUSTER and source == folder.rank and any(parts.get(name) != part for parts in disks.values()):
            data = folder.read(name) if part.file else b""
            made[name] = Made(part.inputs, data, part.value)
    folder.publish(made)
    folder.made.clear()
    return own


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses, as a sentence.

    Raises:
        ArtifactError: naming the file.
    """
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{_CANNOT_WRITE}{error.filename or path}: {error.strerror or error}") from None


@contextmanager
def _advising() -> Iterator[None]:
    """What cannot be written, here or by what is called, with what to do.

    Raises:
        QSyncError: as it came.
    """
    try:
        yield
    except QSyncError as error:
        if not str(error).startswith(_CANNOT_WRITE):
            raise
        raise type(error)(
            f"{error}; make room or name another folder with -o, and start 'qsync prepare' again: it continues"
        ) from None


def _take(lock: BaseFileLock, path: Path, tokens: Iterable[Path]) -> None:
    """Lock a folder, until the process that holds the lock ends.

    Args:
        tokens: that others have left in it: they say who they are.

    Raises:
        QSyncError: when another process holds it.
        OSError: when it cannot be written.
    """
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holders = ", ".join(sorted(token.read_text(errors="replace")[:200] for token in tokens if token.is_file()))
        raise QSyncError(
            f"another 'qsync prepare' works in {path}{f' ({holders})' if holders else ''}; wait until it is done, or give this one "
            "a folder of its own with -o"
        ) from None

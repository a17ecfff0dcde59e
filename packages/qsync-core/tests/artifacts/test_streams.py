"""Devices, pipes and descriptors: written to or refused, never replaced; read to their end, never waited for in vain."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from artifact_examples import examples
from backend_doubles import LINEAR_INT8

from qsync_core.artifacts import atomic_file
from qsync_core.artifacts import files as artifact
from qsync_core.artifacts.atomic_file import check_writable, write_atomically
from qsync_core.cluster_file import read_cluster
from qsync_core.errors import ArtifactError, ClusterError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.tuning.record import Measurement
from qsync_core.tuning.store import TuningStore, merge_stores

PLAN = examples(layers=1)[PrecisionPlan]


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@contextlib.contextmanager
def in_thread(call: Callable[[], object]) -> Iterator[list[object]]:
    """Runs ``call`` beside the body; what it returned is in the list afterwards."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    yield found
    thread.join(20)
    assert not thread.is_alive()


def test_a_fifo_gets_the_bytes_and_stays(fifo: Path) -> None:
    check_writable(fifo)
    with in_thread(fifo.read_bytes) as found:
        artifact.save(PLAN, fifo)
    assert found == [artifact.to_bytes(PLAN)]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_fifo_that_no_process_reads(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_file, "_READER_WAIT_S", 0.0)
    with pytest.raises(ArtifactError, match=r"cannot write .*fifo: it is a FIFO that no process reads"):
        artifact.save(PLAN, fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_link_to_a_fifo_gives_it_the_bytes(fifo: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(fifo)
    with in_thread(fifo.read_bytes) as found:
        write_atomically(link, b"bytes")
    assert found == [b"bytes"]
    assert link.is_symlink()


def test_devices_stay_devices() -> None:
    for path in ("/dev/null", "/dev/full"):
        check_writable(path)
    artifact.save(PLAN, "/dev/null")
    with pytest.raises(ArtifactError, match=r"cannot write /dev/full: No space left on device"):
        artifact.save(PLAN, "/dev/full")
    assert all(stat.S_ISCHR(os.stat(path).st_mode) for path in ("/dev/null", "/dev/full"))
    assert not [name for name in os.listdir("/dev") if name.startswith((".null", ".full"))]


def test_a_terminal_is_refused() -> None:
    mine, other = os.openpty()
    try:
        with pytest.raises(ArtifactError, match=r"cannot write /dev/.*: it is a terminal"):
            check_writable(os.ttyname(other))
    finally:
        os.close(mine)
        os.close(other)


def test_a_socket_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for attempt in (lambda: check_writable("socket"), lambda: artifact.save(PLAN, "socket")):
            with pytest.raises(ArtifactError, match=r"cannot write socket: it is a socket"):
                attempt()
    assert stat.S_ISSOCK(Path("socket").stat().st_mode)


def test_links_in_a_circle_are_refused_and_stay(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for attempt in (lambda: check_writable(tmp_path / "a"), lambda: artifact.save(PLAN, tmp_path / "a")):
        with pytest.raises(ArtifactError, match=r"cannot write .*a: Too many levels of symbolic links"):
            attempt()
    assert (tmp_path / "a").is_symlink()


def test_links_stay_and_their_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    for name, target in (("to old", "old"), ("to new", "new")):
        (tmp_path / name).symlink_to(target)
        artifact.save(PLAN, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert artifact.load(tmp_path / target) == PLAN


def test_descriptors_by_their_names(tmp_path: Path) -> None:
    with open(tmp_path / "appended", "ab") as file:
        file.write(b"before ")
        file.flush()
        check_writable(f"/dev/fd/{file.fileno()}")
        write_atomically(f"/dev/fd/{file.fileno()}", b"after")
        write_atomically(f"/proc/self/fd/{file.fileno()}", b" and more")
    assert (tmp_path / "appended").read_bytes() == b"before after and more"
    with open(tmp_path / "appended", "rb") as file, pytest.raises(ArtifactError, match="it is open for reading only"):
        check_writable(f"/dev/fd/{file.fileno()}")


def test_a_pipe_is_read_to_its_end(fifo: Path) -> None:
    data = artifact.to_bytes(PLAN)

    writer = open(fifo, "r+b", buffering=0)  # noqa: SIM115 - both ends, so that it needs not wait for a reader

    def write_slowly() -> None:
        with writer:
            for part in (data[:100], data[100:]):
                time.sleep(0.1)
                writer.write(part)

    with in_thread(write_slowly):
        assert artifact.load(fifo, PrecisionPlan) == PLAN


def test_an_open_pipe_as_a_shell_passes_it() -> None:
    mine, other = os.pipe()
    with os.fdopen(other, "wb") as file:
        file.write(artifact.to_bytes(PLAN))
    try:
        assert artifact.load(f"/dev/fd/{mine}") == PLAN
    finally:
        os.close(mine)


def test_a_fifo_without_a_writer_is_refused_at_once(fifo: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"cannot read .*fifo: it is a pipe from which nothing comes, as no process writes to it"
    ):
        artifact.load(fifo)
    with pytest.raises(ClusterError, match=r"cannot read .*fifo: .* no process writes to it"):
        read_cluster(fifo)
    with pytest.raises(ArtifactError, match=r"cannot read tuning records from .*fifo: it is a device or a pipe"):
        merge_stores([fifo], fifo.with_name("out.sqlite"))


def test_a_pipe_without_an_end_is_given_up(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "MAX_BYTES", 100_000)

    stop = threading.Event()
    writer = open(fifo, "r+b", buffering=0)  # noqa: SIM115 - both ends, so that it needs not wait for a reader
    os.set_blocking(writer.fileno(), False)

    def write_on() -> None:
        with writer:
            while not stop.is_set():
                writer.write(bytes(1_000))  # None where the pipe is full

    with in_thread(write_on):
        try:
            with pytest.raises(ArtifactError, match=r"fifo: it has more bytes than artifacts have, which is at most 100000"):
                artifact.load(fifo)
        finally:
            stop.set()


def test_a_tuning_store_is_a_regular_file(fifo: Path, tmp_path: Path) -> None:
    known = TuningStore(tmp_path / "a.sqlite", "cpu", {})
    known.add_measurement(known.key("fake", LINEAR_INT8), "a", Measurement(1, 1))
    for path in (fifo, Path("/dev/full")):
        with pytest.raises(ArtifactError, match=r"cannot read tuning records from .*: it is a device or a pipe"):
            merge_stores([tmp_path / "a.sqlite"], path)
    with pytest.raises(ArtifactError, match=r"cannot read tuning records from /dev/null: it is a device or a pipe"):
        TuningStore(Path("/dev/null"), "cpu", {})
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert not [name for name in os.listdir("/dev") if "journal" in name]


def run(code: str, stdout: int | str) -> subprocess.CompletedProcess[bytes]:
    with contextlib.ExitStack() as opened:
        target = opened.enter_context(open(stdout, "wb")) if isinstance(stdout, str) else stdout
        return subprocess.run([sys.executable, "-c", code], stdout=target, stderr=subprocess.PIPE, timeout=60, check=False)


COPY = """
import sys
from pathlib import Path
import click
from qsync_core.artifacts.files import load, save
from qsync_core.cli.options import output_option
from qsync_core.cli.output import emit, json_option
from qsync_core.cli.root import QSyncGroup

cli = QSyncGroup("cli")

@cli.command()
@output_option("copy")
@json_option
def copy(output, json_flag):
    save(load({path!r}), output)
    emit(json_flag, {{"what": "printed"}}, lambda console: console.print("printed"))

cli(["copy", "-o", "/dev/stdout"])
"""


def test_what_is_written_to_standard_output_is_the_artifact_alone(tmp_path: Path) -> None:
    artifact.save(PLAN, tmp_path / "plan.qsync")
    code = COPY.format(path=str(tmp_path / "plan.qsync"))
    piped = run(code, subprocess.PIPE)
    assert (piped.returncode, piped.stdout) == (0, artifact.to_bytes(PLAN)), piped.stderr
    assert piped.stderr == b"printed\n"
    assert run(code, str(tmp_path / "redirected")).returncode == 0
    assert (tmp_path / "redirected").read_bytes() == artifact.to_bytes(PLAN)
    assert run(code, "/dev/null").stderr in (b"", b"printed\n")
    full = run(code, "/dev/full")
    assert (full.returncode, full.stderr) == (1, b"error: cannot write /dev/stdout: No space left on device\n")

"""Paths that cannot be written are refused before anything is computed for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from qsync_core.artifacts import atomic_file
from qsync_core.artifacts.atomic_file import check_writable, write_atomically
from qsync_core.errors import ArtifactError


@pytest.mark.parametrize("path", [".", "..", "", "made", "made/", "/"])
def test_a_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made").mkdir()
    with pytest.raises(ArtifactError) as error:
        check_writable(Path(path))
    assert str(error.value) == f"cannot write {Path(path)}: it is a folder; name a file in it"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as error:
        check_writable(tmp_path / "none" / "o.qsync")
    expected = f"cannot write {tmp_path}/none/o.qsync: there is no folder {tmp_path}/none; make it, or name another"
    assert str(error.value) == expected


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    for length in (240, 300):  # the first only by the name it has while it is written
        with pytest.raises(ArtifactError, match=f"cannot write .*/x{{{length}}}: File name too long"):
            check_writable(tmp_path / ("x" * length))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ArtifactError, match=r"cannot write .*/o\.qsync: Permission denied"):
        check_writable(tmp_path / "o.qsync")


@pytest.mark.parametrize("call", [check_writable, lambda path: write_atomically(path, b"new")], ids=["check", "write"])
def test_an_interrupt_at_any_moment_leaves_no_temporary_file(call: Callable[[Path], None], tmp_path: Path) -> None:
    """As Ctrl-C would: the interrupt is raised at the first event, at the second, and so on."""
    (tmp_path / "old").write_bytes(b"old")
    for moment in itertools.count():
        left = moment

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left
            if frame.f_code.co_filename in (atomic_file.__file__, contextlib.__file__) and argument is not os.unlink:
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            call(tmp_path / "old")
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert [path.name for path in tmp_path.iterdir()] == ["old"]
        assert (tmp_path / "old").read_bytes() in (b"old", b"new")
        if left > 0:
            break
    assert moment > 10


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "kept"

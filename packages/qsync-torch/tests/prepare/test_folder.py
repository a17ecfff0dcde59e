"""Files of several ranks on disks that they share or do not share: each rank a thread, over one store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from qsync_core.errors import ArtifactError, QSyncError
from qsync_torch.distributed.exchange import Members
from qsync_torch.prepare.folder import Folder, Made, merge_disks, open_folder

LARGE = bytes(range(256)) * (5 << 12)
"""More than a store takes in one piece: 5 MiB."""


def on_ranks(paths: list[Path], work: Callable[[Folder], Any]) -> list[Any]:
    """What ``work`` gives on every rank, or the error that it ends with."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        members = Members(rank, range(len(paths)), dist.PrefixStore("job", store), 60.0) if len(paths) > 1 else None
        try:
            with open_folder(paths[rank], members) as folder:
                merge_disks(folder)
                return work(folder)
        except QSyncError as error:
            return error

    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(run, range(len(paths))))


def publish(folder: Folder) -> bool:
    made = {f"part {folder.rank}": Made({"graph": "g"}, f"profiles/{folder.rank}.qsync", LARGE + bytes([folder.rank]))}
    folder.publish(made)
    return folder.writes


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "lock"}


def test_every_disk_has_the_files_of_all_ranks_and_one_rank_writes_it(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    assert on_ranks([a, b, b], publish) == [True, True, False]
    assert files(a) == files(b)
    assert {name: data[-1] for name, data in files(a).items() if "profiles" in name} == {f"profiles/{r}.qsync": r for r in range(3)}
    assert files(a)["profiles/1.qsync"][:-1] == LARGE
    (alone,) = on_ranks([tmp_path / "c"], publish)
    assert alone is True
    assert files(tmp_path / "c")["profiles/0.qsync"] == LARGE + b"\0"


def test_a_new_disk_gets_what_an_old_one_has_whoever_is_rank_0(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    on_ranks([old], publish)
    (old / "profiles" / "0.qsync").write_bytes(b"damaged")
    assert on_ranks([new, old], lambda folder: sorted(folder.parts)) == [[], []], "what was changed is not passed on"
    on_ranks([old], publish)
    assert on_ranks([new, old], lambda folder: (sorted(folder.parts), folder.made)) == [(["part 0"], [])] * 2
    assert files(new) == files(old)


def test_parts_that_are_no_more_go_with_their_files(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    on_ranks(paths, publish)
    on_ranks(paths, lambda folder: folder.publish({}, ["part 1", "never there"] if folder.rank == 0 else []))
    for path in paths:
        assert set(files(path)) == {".prepare/ledger.json", "profiles/0.qsync"}


def test_a_part_is_kept_while_its_inputs_are_the_same(tmp_path):
    def look(folder: Folder) -> list[object]:
        folder.publish({"probe": Made({"torch": "2.11"}, value="7")})
        asked = {"torch": "2.13"}
        return [folder.is_kept("probe", {"torch": "2.11"}), folder.is_kept("probe", asked), folder.why_anew("probe", asked)]

    why = "probe, and all that depends on the same, is made anew: its torch was 2.11 and is 2.13 now"
    assert on_ranks([tmp_path / "run"], look) == [[True, False, why]]


def test_a_reason_is_said_once_and_another_graph_of_the_graph_alone(tmp_path):
    old, new = ({"graph": letter * 64, "torch": version} for letter, version in (("a", "2.11"), ("b", "2.13")))

    def look(folder: Folder) -> list[str]:
        folder.publish({name: Made(old, value="1") for name in ("graph", "probe a", "profile a")})
        by_torch = [folder.why_anew(name, {**old, "torch": "2.13"}) for name in ("probe a", "profile a")]
        return [*by_torch, *(folder.why_anew(name, new) for name in ("graph", "probe a", "profile a"))]

    ((first, *others),) = on_ranks([tmp_path / "run"], look)
    assert first.startswith("probe a, and all")
    reason = (
        f"the job is not the one that {tmp_path / 'run'} was made for (its graph was aaaaaaaa and is bbbbbbbb now), so all of it is"
    )
    assert others == ["", f"{reason} made anew", "", ""]


def test_one_disk_that_cannot_be_written_ends_all_ranks(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    first, second = on_ranks([tmp_path / "run", file / "run"], publish)
    assert isinstance(second, ArtifactError)
    assert f"cannot write {file / 'run'}" in str(second)
    assert "rank 1 refuses: cannot write" in str(first)
    assert [path.name for path in (tmp_path / "run" / ".prepare").iterdir()] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_has_no_room_for_the_lock_is_said_with_what_to_do_and_lets_it_go(tmp_path, monkeypatch, ranks):
    def write(*_: object) -> int:
        raise OSError(28, "No space left on device")

    run = tmp_path / "run"
    monkeypatch.setattr("qsync_torch.prepare.folder.os.write", write)
    said = "No space left on device; make room or name another folder with -o, and start 'qsync prepare' again: it continues"
    for error in on_ranks([run] * ranks, publish):
        assert isinstance(error, ArtifactError)
        assert f"cannot write {run}: {said}" in str(error)
    monkeypatch.undo()
    assert on_ranks([run] * ranks, publish)[0] is True


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_part_cannot_write_while_it_is_made_is_said_with_what_to_do(tmp_path, ranks):
    def work(folder: Folder) -> None:
        with folder.together(slow=True):
            raise ArtifactError(f"cannot write {tmp_path / 'a.qsync.partial'}: No space left on device")

    said = "No space left on device; make room or name another folder with -o, and start 'qsync prepare' again: it continues"
    for error in on_ranks([tmp_path / "run"] * ranks, work):
        assert f"cannot write {tmp_path / 'a.qsync.partial'}: {said}" in str(error)


def test_what_a_killed_one_left_does_not_stay(tmp_path):
    run = tmp_path / "run"
    (run / ".prepare").mkdir(parents=True)
    (run / ".prepare" / "0123456789abcdef-7").write_text("host")
    (run / ".prepare" / "lock").write_text("process 1 on host")
    on_ranks([run], publish)
    assert set(files(run)) == {".prepare/ledger.json", "profiles/0.qsync"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_in_which_another_works_is_refused(tmp_path, ranks):
    run = tmp_path / "run"
    with open_folder(run, None):
        for error in on_ranks([run] * ranks, publish):
            assert f"another 'qsync prepare' works in {run} (process " in str(error)
    assert on_ranks([run] * ranks, publish)[0] is True

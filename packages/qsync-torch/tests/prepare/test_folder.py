"""Files of several ranks on disks that they share or do not share: each rank a thread, over one store."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from qsync_core.errors import ArtifactError, QSyncError
from qsync_core.run_folder import RunFolder
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.prepare.folder import Folder, Made, merge_disks, open_folder
from qsync_torch.prepare.ledger import Part, sha256_of, write_parts

LARGE = bytes(range(256)) * (5 << 12)
"""More than a store takes in one piece: 5 MiB."""


def on_ranks(paths: list[Path], work: Callable[[Folder], Any]) -> list[Any]:
    """What ``work`` gives on every rank, or the error that it ends with."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        members = Mailbox(rank, range(len(paths)), dist.PrefixStore("job", store), 60.0) if len(paths) > 1 else None
        try:
            with open_folder(paths[rank], members) as folder:
                merge_disks(folder)
                return work(folder)
        except QSyncError as error:
            return error

    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(run, range(len(paths))))


def publish(folder: Folder) -> bool:
    made = {f"profile {folder.rank}": Made({"graph": "g"}, LARGE + bytes([folder.rank]))}
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
    assert on_ranks([new, old], lambda folder: (sorted(folder.parts), folder.made)) == [(["profile 0"], [])] * 2
    assert files(new) == files(old)


def test_parts_that_are_no_more_go_with_their_files(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    on_ranks(paths, publish)
    on_ranks(paths, lambda folder: folder.publish({}, ["profile 1", "never there"] if folder.rank == 0 else []))
    for path in paths:
        assert set(files(path)) == {".prepare/ledger.json", "profiles/0.qsync"}


def test_a_part_is_kept_while_its_inputs_are_the_same(tmp_path):
    def look(folder: Folder) -> list[object]:
        folder.publish({"probe a": Made({"torch": "2.11"}, value="7")})
        asked = {"torch": "2.13"}
        return [folder.is_kept("probe a", {"torch": "2.11"}), folder.is_kept("probe a", asked), folder.why_anew("probe a", asked)]

    why = "probe a, and all that depends on the same, is made anew: its torch was 2.11 and is 2.13 now"
    assert on_ranks([tmp_path / "run"], look) == [[True, False, why]]


def test_a_reason_is_said_once_and_another_graph_of_the_graph_alone(tmp_path):
    old, new = ({"graph": letter * 64, "torch": version} for letter, version in (("a", "2.11"), ("b", "2.13")))

    def look(folder: Folder) -> list[str]:
        folder.publish({"graph": Made(old, b"1"), "probe a": Made(old, value="1"), "profile a": Made(old, b"1")})
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
    monkeypatch.setattr(Path, "write_text", write)
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


def ledger(path: Path, **parts: Part) -> None:
    """A ledger as an attacker writes it: any names and files."""
    (path / ".prepare").mkdir(parents=True)
    write_parts(path / ".prepare" / "ledger.json", parts)


@pytest.mark.parametrize(
    "file", ["../train.py", "{outside}/train.py", "profiles/../../train.py", "..\\train.py", "train.py", "/dev/null"]
)
@pytest.mark.parametrize("name", ["profile a", "profile ../../train.py", "timeline a", "plan a", "training script", "probe a"])
def test_a_ledger_that_names_a_file_outside_reads_removes_and_overwrites_none(tmp_path, name, file):
    hostile, other, theirs = tmp_path / "b" / "run", tmp_path / "a" / "run", b"print('evil')"
    for run in (hostile, other):
        run.mkdir(parents=True)
        for place in (run, run.parent):
            (place / "train.py").write_bytes(theirs if run is hostile else b"mine")
    file = file.format(outside=other.parent)
    ledger(hostile, **{name: Part({"graph": "g"}, file, sha256_of(theirs))})
    on_ranks([other, hostile], lambda folder: folder.publish({}, [name] if folder.rank == 0 else []))
    assert [(place / "train.py").read_bytes() for place in (other, other.parent)] == [b"mine"] * 2
    assert [(place / "train.py").read_bytes() for place in (hostile, hostile.parent)] == [theirs] * 2
    assert set(files(tmp_path / "a")) - {"train.py", "run/train.py"} <= {"run/.prepare/ledger.json"}


@pytest.mark.parametrize(
    "said, text",
    [
        ({"parts": json.dumps({"graph": {"inputs": {}, "file": "../train.py", "sha256": "", "value": ""}})}, "not '../train.py'"),
        ({"parts": json.dumps({"profile ../x": {"inputs": {}, "file": "", "sha256": "", "value": ""}})}, "'../x' names no file"),
        ({"parts": json.dumps({"graph": 7})}, "expected the fields of a Part, got int"),
        ({"parts": "[1]"}, "cannot be read"),
        ({"parts": "[" * 99_999}, "cannot be read"),
        ({"pieces": '{"graph": 1e99}'}, "counts the pieces"),
        ({"pieces": "[]"}, "counts the pieces"),
        ({"removed": '[["graph"]]'}, "no names of parts"),
        ({"removed": "\x00"}, "cannot be read"),
    ],
)
def test_a_rank_that_says_what_is_no_part_ends_all_with_a_sentence_that_names_it(tmp_path, monkeypatch, said, text):
    honest = Folder.told

    def told(folder: Folder, facts: dict[str, str]) -> Any:
        return honest(folder, {**facts, **said} if folder.rank == 1 and "removed" in facts else facts)

    monkeypatch.setattr(Folder, "told", told)
    for error in on_ranks([tmp_path / "a", tmp_path / "b"], publish):
        assert isinstance(error, QSyncError)
        assert "rank 1 says what it cannot" in str(error)
        assert text in str(error)


def test_bytes_that_are_not_those_of_the_digest_are_not_written(tmp_path, monkeypatch):
    honest = Folder._put

    def put(folder: Folder, made: dict[str, Made]) -> dict[str, int]:
        swapped = {name: Made(one.inputs, b"another") for name, one in made.items()}
        return honest(folder, swapped if folder.rank == 1 else made)

    monkeypatch.setattr(Folder, "_put", put)
    for error in on_ranks([tmp_path / "a", tmp_path / "b"], publish):
        assert "rank 1 sent another content of profile 1 than its digest says" in str(error)
    assert not (tmp_path / "a" / "profiles" / "1.qsync").exists()


@pytest.mark.parametrize("link", ["profiles", "profiles/0.qsync", ".prepare", ".prepare/lock", ".prepare/ledger.json"])
def test_a_link_that_leads_out_of_the_folder_is_refused_on_every_rank_and_nothing_is_written_there(tmp_path, link):
    outside, run = tmp_path / "outside", tmp_path / "b"
    is_folder = link in ("profiles", ".prepare")
    (outside / link).parent.mkdir(parents=True)
    if is_folder:
        (outside / link).mkdir()
        (outside / link / "my-notes.qsync").write_bytes(b"mine")
    else:
        (outside / link).write_bytes(b"mine")
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside / link)
    before = files(outside)
    errors = on_ranks(
        [tmp_path / "a", run], lambda folder: folder.publish({"profile 0": Made({}, b"new")} if not folder.rank else {})
    )
    for error in errors:
        assert isinstance(error, QSyncError)
        assert f"{run / link}" in str(error)
        assert "leads out of the run folder, to " + str(outside) in str(error)
    assert files(outside) == before


def test_a_run_folder_that_is_a_link_itself_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert on_ranks([tmp_path / "run"], publish) == [True]
    assert files(tmp_path / "disk")["profiles/0.qsync"] == LARGE + b"\0"
    assert RunFolder(tmp_path / "run").profile("0").is_file()


def test_a_rank_that_ends_between_two_rounds_has_ended_and_has_not_failed_to_come(tmp_path, monkeypatch):
    def tell(folder: Folder) -> None:
        if folder.rank == 0:
            monkeypatch.setenv("QSYNC_RANK_TIMEOUT_S", "0.5")
            folder.told({"batches": "{}"})

    error, _ = on_ranks([tmp_path, tmp_path], tell)
    said = "rank 1 gave no sign of life for 0.5 s while rank 0 waited for it in qsync prepare: its process has ended or hangs"
    assert str(error).startswith(said)


def test_what_a_fresh_start_has_no_more_goes_from_every_disk(tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        (disk / "timelines" / "predicted").mkdir(parents=True)
        for name in ("report.perfetto.json", "timelines/predicted/a+b.qsync", "timelines/predicted/a.qsync"):
            (disk / name).write_text("of an earlier plan")
    on_ranks(disks, lambda folder: folder.publish({}, [] if folder.rank else ["trace", "timeline a+b"]))
    for disk in disks:
        assert set(files(disk)) == {"timelines/predicted/a.qsync", ".prepare/ledger.json"}

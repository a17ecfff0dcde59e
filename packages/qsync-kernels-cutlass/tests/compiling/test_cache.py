"""The cache loads what its owner put there whole, and nothing else; every way of tampering is tried."""

from __future__ import annotations

import json
import os
import threading
import time
from multiprocessing import get_context

import pytest

from qsync_core.errors import BackendError
from qsync_kernels_cutlass.compiling import cache as cache_module
from qsync_kernels_cutlass.compiling.cache import KernelCache

KEY = "sm_90a-0123"
CONTENT = b"machine code" * 100


def put(cache, key=KEY, content=CONTENT):
    with cache.workplace() as place:
        made = place / "made.so"
        made.write_bytes(content)
        return cache.add(key, made, {"name": "gemm"})


@pytest.fixture
def cache(own_cache):
    return KernelCache()


def test_what_is_put_is_found_and_nothing_else_lies_around(cache, own_cache):
    assert cache.find(KEY) is None
    path = put(cache)
    assert cache.find(KEY) == path == own_cache / KEY / "kernel.so"
    assert path.read_bytes() == CONTENT
    assert cache.find("sm_90a-0124") is None
    assert os.listdir(own_cache) == [KEY]
    assert json.loads((own_cache / KEY / "manifest.json").read_text())["name"] == "gemm"


def test_only_the_owner_can_read_or_write(cache, own_cache):
    os.umask(os.umask(0))  # whatever the umask: modes are explicit
    path = put(cache)
    modes = {entry: entry.stat().st_mode & 0o777 for entry in (own_cache, path.parent, path, path.parent / "manifest.json")}
    assert set(modes.values()) == {0o700, 0o600}


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(own_cache, mode):
    own_cache.mkdir()
    own_cache.chmod(mode)
    with pytest.raises(BackendError, match=rf"kernels can be written by others \(mode {mode:04o}\).*chmod 700.*QSYNC_KERNEL_CACHE"):
        KernelCache()


def test_a_folder_below_one_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    said = rf"is below {tmp_path}, which others can write \(mode 0777\).*QSYNC_KERNEL_CACHE"
    with pytest.raises(BackendError, match=said):
        KernelCache(tmp_path / "kernels")


def test_a_folder_of_another_user_is_refused(own_cache, monkeypatch):
    own_cache.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(BackendError, match=rf"belongs to user {me} and not to you \(user {me + 1}\)"):
        KernelCache()


def test_a_file_in_the_folders_place_is_refused(own_cache):
    own_cache.write_text("")
    with pytest.raises(BackendError, match="is not a folder"):
        KernelCache()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match=r"cannot be made \(.*\); set QSYNC_KERNEL_CACHE"):
        KernelCache(tmp_path / "file" / "kernels")


def truncate(path):
    path.write_bytes(CONTENT[:-1])


def lengthen(path):
    path.write_bytes(CONTENT + b"\0")


def alter(path):
    path.write_bytes(b"M" + CONTENT[1:])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def open_to_all(path):
    path.chmod(0o666)


def link(path):
    target = path.parent.parent / "elsewhere.so"
    os.rename(path, target)
    path.symlink_to(target)


def open_folder_to_all(path):
    path.parent.chmod(0o777)


def without_manifest(path):
    (path.parent / "manifest.json").unlink()


def manifest(change):
    def tamper(path):
        file = path.parent / "manifest.json"
        file.write_text(change(file.read_text()))

    return tamper


TAMPERINGS = {
    "truncated": truncate,
    "longer": lengthen,
    "altered": alter,
    "empty": empty,
    "removed": remove,
    "writable": open_to_all,
    "a link": link,
    "in a writable folder": open_folder_to_all,
    "without manifest": without_manifest,
    "manifest cut": manifest(lambda text: text[:-5]),
    "manifest of another key": manifest(lambda text: text.replace(KEY, "sm_90a-9999")),
    "manifest of another format": manifest(lambda text: text.replace('"format": 1', '"format": 2')),
    "manifest that is a list": manifest(lambda text: "[]"),
    "manifest nested deeply": manifest(lambda text: "[" * 100_000),
    "manifest that is not text": manifest(lambda text: "\0"),
    "manifest with another digest": manifest(lambda text: text.replace('"sha256": "', '"sha256": "0')),
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_an_entry_that_was_tampered_with_is_not_found_and_is_replaced(cache, tamper):
    path = put(cache)
    tamper(path)
    assert cache.find(KEY) is None
    assert cache.find_any("sm_90a-") is None
    assert put(cache) == path
    assert cache.find(KEY).read_bytes() == CONTENT


def test_an_entry_of_another_user_is_not_found(cache, monkeypatch):
    path = put(cache)
    lstat, me = os.lstat, os.geteuid()

    class Foreign:
        def __init__(self, found):
            self.st_mode, self.st_uid = found.st_mode, me + 1

    monkeypatch.setattr(cache_module.os, "lstat", lambda place: Foreign(lstat(place)) if place == path else lstat(place))
    assert cache.find(KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("part", ["", "kernel.so", "manifest.json"])
def test_an_entry_that_really_belongs_to_another_user_is_not_found(cache, part):
    os.chown(put(cache).parent / part, 12345, -1)
    assert cache.find(KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to another user")
def test_a_folder_that_really_belongs_to_another_user_is_refused(own_cache):
    own_cache.mkdir(mode=0o700)
    os.chown(own_cache, 12345, -1)
    with pytest.raises(BackendError, match=r"belongs to user 12345 and not to you"):
        KernelCache()


def test_a_cache_that_cannot_be_written_is_an_error(cache, own_cache, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "_write", full)
    with pytest.raises(BackendError, match=r"cannot be written \(No space left on device\)"):
        put(cache)
    assert os.listdir(own_cache) == []


def test_workplaces_of_killed_processes_go_after_a_day(cache, own_cache):
    for name, age_s in ((".making-1-old", 25 * 3600), (".making-2-new", 3600)):
        (own_cache / name).mkdir()
        os.utime(own_cache / name, (time.time() - age_s,) * 2)
    put(cache)
    assert sorted(os.listdir(own_cache)) == [".making-2-new", KEY]


def _put_many(folder, number):
    cache = KernelCache(folder)
    for round_number in range(20):
        with cache.locked(f"key-{round_number}", threading.Event()):
            put(cache, f"key-{round_number}", b"%d" % round_number * 1000)
        put(cache, "contended", b"%d" % number * 1000)


def test_processes_that_put_the_same_keys_at_once_leave_whole_entries(own_cache):
    context = get_context("fork")
    processes = [context.Process(target=_put_many, args=(own_cache, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    cache = KernelCache(own_cache)
    assert cache.find("contended").read_bytes() in {b"%d" % number * 1000 for number in range(3)}
    assert all(cache.find(f"key-{number}").read_bytes() == b"%d" % number * 1000 for number in range(20))
    assert not [name for name in os.listdir(own_cache) if name.startswith(".making")]


def test_one_at_a_time_holds_a_lock(cache):
    inside, most = [], []

    def work():
        for _ in range(30):
            with cache.locked(KEY, threading.Event()):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 120
    assert set(most) == {1}
    assert cache.entries() == []


def test_waiting_for_another_process_ends_when_it_is_stopped(cache):
    stopped = threading.Event()
    with cache.locked(KEY, threading.Event()):
        waiting = threading.Thread(target=lambda: cache.locked(KEY, stopped).__enter__())
        waiting.start()
        stopped.set()
        waiting.join(30)
        assert not waiting.is_alive()

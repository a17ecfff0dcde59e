import json

import pytest

from qsync_torch.profiling.profile import ResumeStore


def test_values_come_back_in_a_new_process(tmp_path):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, "d1")
    store.put("relu", {"forward_compute_ns": 5})
    store.flush()
    again = ResumeStore(path, "d1")
    assert again.get("relu") == {"forward_compute_ns": 5}
    assert again.get("add") is None


def test_another_digest_starts_anew(tmp_path):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, "d1")
    store.put("relu", 1)
    store.flush()
    assert len(ResumeStore(path, "d2")) == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "digest": "d1", "values": 3}', "\x00\xff"])
def test_a_damaged_file_counts_as_none(tmp_path, content):
    path = tmp_path / "x.partial"
    path.write_text(content, encoding="utf-8")
    assert len(ResumeStore(path, "d1")) == 0


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, "d1")
    store.put("a", 1)
    store.flush()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        store.flush()
    assert json.loads(path.read_text())["values"] == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.partial"]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ResumeStore(None, "d1")
    store.put("a", 1)
    store.flush()
    assert store.get("a") == 1
    assert list(tmp_path.iterdir()) == []

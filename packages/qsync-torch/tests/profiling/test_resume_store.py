import pytest

from qsync_core.ir.profile import OpCost
from qsync_torch.profiling.profile import ResumeStore

COST = OpCost(1, 2, 3, 5, saves_inputs=(0,), backend="aten")


def test_values_come_back_in_a_new_process(tmp_path):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, "d1")
    store.write("relu", COST)
    store.write("gelu", None)
    store.flush()
    again = ResumeStore(path, "d1")
    assert again.read("relu", OpCost) == COST
    assert "gelu" in again
    assert again.read("gelu", OpCost) is None
    assert "add" not in again
    assert again.read("add", OpCost) is None


def test_another_digest_starts_anew(tmp_path):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, "d1")
    store.write("relu", COST)
    store.flush()
    assert len(ResumeStore(path, "d2")) == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 2, "digest": "d1", "values": 3}', "\x00\xff"])
def test_a_damaged_file_counts_as_none(tmp_path, content):
    path = tmp_path / "x.partial"
    path.write_text(content, encoding="utf-8")
    assert len(ResumeStore(path, "d1")) == 0


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, "d1")
    store.write("a", COST)
    store.flush()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        store.flush()
    assert ResumeStore(path, "d1").read("a", OpCost) == COST
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.partial"]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ResumeStore(None, "d1")
    store.write("a", COST)
    store.flush()
    assert store.read("a", OpCost) == COST
    assert list(tmp_path.iterdir()) == []

import pytest

from qsync_core.errors import ArtifactError
from qsync_core.ir.profile import OpCost
from qsync_torch.profiling.resume_store import ResumeStore

COST = OpCost(1, 2, 3, 5, saves_inputs=(0,), backend="aten")


def test_values_come_back_in_a_new_process(tmp_path):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, {"graph": "d1"})
    store.write("relu", COST)
    store.write("gelu", None)
    store.flush()
    again = ResumeStore(path, {"graph": "d1"})
    assert again.read("relu", OpCost) == COST
    assert "gelu" in again
    assert again.read("gelu", OpCost) is None
    assert "add" not in again
    assert again.read("add", OpCost) is None


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({"graph": "d2"}, "its graph was d1 and is d2 now"),
        ({"graph": "d1", "cudnn_tf32": "True"}, "its cudnn_tf32 was not recorded and is True now"),
        ({}, "its graph was d1 and is not recorded now"),
        ({"graph": "int8;out=float32;x=row float32;x=row"}, "its graph was d1 and is int8 float32 now"),
        ({"graph": "bfloat16;out=bfloat16;x=row;store=nf4 float32;x=row"}, "its graph was d1 and is bfloat16@nf4 float32 now"),
    ],
)
def test_other_settings_start_anew_and_say_why(tmp_path, now, why):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, {"graph": "d1"})
    assert store.discarded == ""
    store.write("relu", COST)
    store.flush()
    another = ResumeStore(path, now)
    assert (len(another), another.discarded) == (0, why)


DAMAGED = ["", "{", "[]", '{"format": 1}', '{"format": 3, "settings": {"graph": "d1"}, "values": 3}', "\x00\xff"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_counts_as_none(tmp_path, content):
    path = tmp_path / "x.partial"
    path.write_text(content, encoding="utf-8")
    store = ResumeStore(path, {"graph": "d1"})
    assert len(store) == 0
    assert "damaged" in store.discarded


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.partial"
    store = ResumeStore(path, {"graph": "d1"})
    store.write("a", COST)
    store.flush()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(ArtifactError, match=r"cannot write .*x\.partial: disk full"):
        store.flush()
    assert ResumeStore(path, {"graph": "d1"}).read("a", OpCost) == COST
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.partial"]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ResumeStore(None, {"graph": "d1"})
    store.write("a", COST)
    store.flush()
    assert store.read("a", OpCost) == COST
    assert list(tmp_path.iterdir()) == []

"""Tuning: the fastest configuration is kept, per device, request and software, and other processes' records survive."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from backend_doubles import LINEAR_INT8, FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.backend import Kernel, KernelRequest
from qsync_core.errors import ArtifactError, BackendError
from qsync_core.tuning import TuningStore, default_store_path, tune


def measure(kernel: Kernel, request: KernelRequest) -> int:
    latency_ns: int = kernel()
    return latency_ns


@pytest.fixture
def store(tmp_path: Path) -> TuningStore:
    return TuningStore(tmp_path / "deep" / "tuning.json", "T4", {"torch": "2.13"})


def test_the_fastest_configuration_that_runs_is_kept(store: TuningStore) -> None:
    backend = FakeBackend(latencies_ns={"a": 30, "b": None, "c": 10, "d": 10})
    record = tune(backend, LINEAR_INT8, measure, store)
    assert (record.config, record.latency_ns) == ("c", 10)
    assert store.find("fake", LINEAR_INT8) == record
    assert TuningStore(store.path, "T4", {"torch": "2.13"}).find("fake", LINEAR_INT8) == record


def test_a_record_is_valid_for_its_key_only(store: TuningStore) -> None:
    tune(FakeBackend(), LINEAR_INT8, measure, store)
    assert TuningStore(store.path, "A100", {"torch": "2.13"}).find("fake", LINEAR_INT8) is None
    assert TuningStore(store.path, "T4", {"torch": "2.14"}).find("fake", LINEAR_INT8) is None
    assert store.find("other", LINEAR_INT8) is None
    for changes in (
        {"shapes": ((1, 64), (32, 64))},
        {"attributes": {"groups": "2"}},
        {"contiguous": False},
        {"op": "linear.grad_input"},
    ):
        assert store.find("fake", attrs.evolve(LINEAR_INT8, **changes)) is None
    assert len(store) == 1


def test_records_of_other_processes_survive(store: TuningStore) -> None:
    other = TuningStore(store.path, "A100", {})
    tune(FakeBackend(), LINEAR_INT8, measure, store)
    tune(FakeBackend(), LINEAR_INT8, measure, other)
    assert len(TuningStore(store.path, "T4", {})) == 2


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers(0, 2**62), min_size=1, max_size=6))
def test_tuning_finds_the_minimum(latencies_ns: dict[str, int | None]) -> None:
    class Memory(TuningStore):
        """A store without a file."""

        def __init__(self) -> None:
            self.path, self.device, self.software, self._records = Path("unused"), "T4", {}, {}

        def add(self, record: object) -> None:
            pass

    measured = {config: latency for config, latency in latencies_ns.items() if latency is not None}
    if measured:
        record = tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, measure, Memory())
        assert record.config == min(measured, key=lambda config: measured[config])
        assert record.latency_ns == min(measured.values())
    else:
        with pytest.raises(BackendError, match=r"no configuration of backend fake runs linear\.output in int8"):
            tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, measure, Memory())


def test_errors_name_the_reasons(store: TuningStore) -> None:
    with pytest.raises(BackendError, match=r"backend fake can not run linear\.output in int8 of shapes .*: too small"):
        tune(FakeBackend(reasons=("too small",)), LINEAR_INT8, measure, store)
    with pytest.raises(BackendError, match="b: configuration b needs more shared memory than there is"):
        tune(FakeBackend(latencies_ns={"b": None}), LINEAR_INT8, measure, store)
    with pytest.raises(BackendError, match="it offers none"):
        tune(FakeBackend(latencies_ns={}), LINEAR_INT8, measure, store)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"format": 2, "records": []}', "format 2, this qsync-core reads 1"),
        ('{"format": 1}', "lacks records"),
        ('{"format": 1, "records": [5]}', r"records\[0\]: expected the fields of a TuningRecord, got int"),
        ('{"format": NaN, "records": []}', "expected an integer, got float"),
    ],
)
def test_a_damaged_store_is_refused_and_left_alone(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=rf"tuning\.json is not a store of tuning records \(.*{expected}.*\); delete it"):
        TuningStore(path, "T4", {})
    assert path.read_text() == content


def test_a_store_that_can_not_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"can not read tuning records from .*: Is a directory"):
        TuningStore(tmp_path, "T4", {})
    (tmp_path / "file").write_text("")
    store = TuningStore(tmp_path / "tuning.json", "T4", {})
    store.path = tmp_path / "file" / "tuning.json"
    with pytest.raises(ArtifactError, match=r"can not write tuning records to .*: (Not a directory|File exists)"):
        tune(FakeBackend(), LINEAR_INT8, measure, store)


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("QSYNC_TUNING", raising=False)
    assert default_store_path() == Path("/cache/qsync/tuning.json")
    monkeypatch.setenv("QSYNC_TUNING", "/mine.json")
    assert default_store_path() == Path("/mine.json")
    monkeypatch.delenv("QSYNC_TUNING")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_store_path() == Path("/home/me/.cache/qsync/tuning.json")

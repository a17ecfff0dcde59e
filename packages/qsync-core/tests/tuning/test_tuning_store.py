"""The tuning store: a key's records are found for it and for nearby shapes, survive other processes, and can be joined."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import attrs
import pytest
from backend_doubles import LINEAR_INT8, FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.errors import ArtifactError
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_core.tuning.record import Measurement, TuningKey, TuningRecord, formats_of, shape_distance
from qsync_core.tuning.search import tune
from qsync_core.tuning.store import TuningStore, default_store_path, merge_stores, read_store


def measure(kernel: Kernel, request: KernelRequest, samples: int) -> int:
    latency_ns: int = kernel()
    return latency_ns


def shaped(m: int, k: int = 64, n: int = 32) -> KernelRequest:
    return attrs.evolve(LINEAR_INT8, shapes=((m, k), (n, k)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.sqlite"


def open_(path: Path, device: str = "T4", software: dict[str, str] | None = {"torch": "2.13"}, **versions: str) -> TuningStore:  # noqa: B006
    return TuningStore(path, device, software, versions)


def test_a_record_is_valid_for_its_key_only(path: Path) -> None:
    store = open_(path, fake="1.0")
    tune(FakeBackend(), LINEAR_INT8, measure, store)
    assert open_(path, fake="1.0").find("fake", LINEAR_INT8) == store.find("fake", LINEAR_INT8)
    for other in (open_(path, "A100", fake="1.0"), open_(path, software={"torch": "2.14"}, fake="1.0"), open_(path, fake="2.0")):
        assert other.find("fake", LINEAR_INT8) is None
        assert other.look_up("fake", LINEAR_INT8) is None
    assert store.find("other", LINEAR_INT8) is None
    for changes in (
        {"shapes": ((1, 64), (32, 64))},
        {"transposed": True},
        {"contiguous": False},
        {"op": "linear.grad_input"},
        {"compute_capability": "9.0"},
        {"variant": Variant.of(Precision.INT8, output=Precision.BFLOAT16)},
    ):
        assert store.find("fake", attrs.evolve(LINEAR_INT8, **changes)) is None
    assert len(store) == 1


def test_what_does_not_change_a_kernel_does_not_change_its_key() -> None:
    int8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
    sixteen = attrs.evolve(int8, grad_input=Precision.FLOAT16, grad_weight=Precision.FLOAT16)
    for op in (Op.LINEAR_OUTPUT, Op.CONV2D_OUTPUT, Op.QUANTIZE):
        assert formats_of(KernelRequest(op, int8, ())) == formats_of(KernelRequest(op, sixteen, ()))
    for op in (Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT):
        assert formats_of(KernelRequest(op, int8, ())) != formats_of(KernelRequest(op, sixteen, ()))
    wide = attrs.evolve(int8, output=Precision.BFLOAT16)
    assert formats_of(KernelRequest(Op.LINEAR_GRAD_INPUT, int8, ())) == formats_of(KernelRequest(Op.LINEAR_GRAD_INPUT, wide, ()))
    eight = attrs.evolve(int8, grad_input=Precision.INT8)
    assert "gi=int8" in formats_of(KernelRequest(Op.LINEAR_GRAD_INPUT, eight, ()))
    rows = attrs.evolve(int8, x_granularity=Granularity.PER_ROW)
    assert formats_of(KernelRequest(Op.LINEAR_OUTPUT, rows, ())) == "int8;out=float32;x=row;w=channel"


def test_a_record_of_nearby_shapes_serves_with_a_configuration_that_fits(path: Path) -> None:
    store = open_(path)
    tune(FakeBackend(latencies_ns={"slow": 900, "fast": 400}), shaped(128), measure, store)
    tune(FakeBackend(latencies_ns={"slow": 9000, "other": 4000}), shaped(1024), measure, store)
    near = store.look_up("fake", shaped(192), ["slow", "fast"])
    assert near is not None
    assert (near.record.config, near.exact, near.latency_ns) == ("fast", False, 600)
    exact = store.look_up("fake", shaped(1024), ["fast", "other"])
    assert exact is not None
    assert (exact.record.config, exact.exact, exact.latency_ns) == ("other", True, 4000)
    # The nearest record's configuration does not fit; the next one's does, and is near enough.
    unfit = store.look_up("fake", shaped(512), ["fast"])
    assert unfit is not None
    assert unfit.record.config == "fast"
    assert store.look_up("fake", shaped(128 * 5), ["fast"]) is None
    assert store.look_up("fake", shaped(192), ["slow"]) is None


@pytest.mark.parametrize("software", [{"torch": "2.13"}, None])
def test_a_record_whose_configuration_the_backend_does_not_know_counts_as_none(
    path: Path, tmp_path: Path, software: dict[str, str] | None
) -> None:
    known = FakeBackend(latencies_ns={"slow": 900, "fast": 400})
    foreign = FakeBackend(latencies_ns={"tile=9": 1, "x": 2, "y": 3})
    tune(foreign, shaped(128), measure, open_(tmp_path / "elsewhere"))
    merge_stores([tmp_path / "elsewhere"], path)
    candidates = [config.text for config in known.candidate_configs(shaped(128))]
    assert open_(path, software=software).look_up("fake", shaped(128), candidates) is None
    # It is measured again, and the wider search of elsewhere does not hide the result.
    assert tune(known, shaped(128), measure, open_(path)).config == "fast"
    found = open_(path, software=software).look_up("fake", shaped(128), candidates)
    assert found is not None
    assert (found.record.config, found.exact) == ("fast", True)

    def fail(kernel: Kernel, request: KernelRequest, samples: int) -> int:
        raise AssertionError("a finished search measures nothing")

    assert tune(known, shaped(128), fail, open_(path)).config == "fast"
    wider = open_(path).look_up("fake", shaped(128), ["slow", "fast", "tile=9"])
    assert wider is not None
    assert wider.record.config == "tile=9"


def test_a_store_that_only_looks_takes_records_of_any_software(path: Path) -> None:
    tune(FakeBackend(latencies_ns={"a": 7}), shaped(128), measure, open_(path, software={"torch": "2.12"}))
    tune(FakeBackend(latencies_ns={"b": 5}), shaped(128), measure, open_(path, software={"torch": "2.13"}))
    anywhere = open_(path, software=None)
    found = anywhere.look_up("fake", shaped(128))
    assert found is not None
    assert (found.record.config, found.exact) == ("b", True)
    near = anywhere.look_up("fake", shaped(64))
    assert near is not None
    assert (near.exact, near.latency_ns) == (False, 2)


@given(st.lists(st.integers(0, 4096), min_size=2, max_size=2), st.lists(st.integers(0, 4096), min_size=2, max_size=2))
def test_the_distance_of_shapes_is_symmetric_and_zero_for_equal_ones(one: list[int], other: list[int]) -> None:
    def key(shape: list[int]) -> TuningKey:
        return TuningKey("T4", "7.5", "fake", "quantize", "int8", (tuple(shape),), {}, "contiguous", {})

    there, back = shape_distance(key(one), key(other)), shape_distance(key(other), key(one))
    assert there == back
    assert (there == 0) == (one == other)


# Several processes


def _tune_many(path: str, name: str, count: int) -> None:
    store = TuningStore(Path(path), "T4", {"torch": "2.13"})
    for m in range(1, count + 1):
        tune(FakeBackend(name, latencies_ns={"a": 5 * m, "b": 3 * m}), shaped(m), measure, store)


def test_processes_that_tune_at_once_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    names = ["one", "two", "three"]
    workers = [context.Process(target=_tune_many, args=(str(path), name, 8)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    store = open_(path)
    assert len(store) == 24
    for name in names:
        for m in range(1, 9):
            record = store.find(name, shaped(m))
            assert record is not None
            assert (record.config, record.latency_ns) == ("b", 3 * m)
            assert set(store.measured(name, shaped(m))) == {"a", "b"}


def test_records_of_other_devices_survive(path: Path) -> None:
    first, other = open_(path), open_(path, "A100")
    tune(FakeBackend(), LINEAR_INT8, measure, first)
    tune(FakeBackend(), LINEAR_INT8, measure, other)
    assert len(open_(path)) == 2


def _add_until_killed(path: str) -> None:
    store = TuningStore(Path(path), "T4", {"torch": "2.13"})
    for m in range(1, 1 << 20):
        store.add_measurement(store.key("fake", shaped(m)), "a", Measurement(m, 1))


def test_a_process_that_is_killed_leaves_whole_records(path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_add_until_killed, args=(str(path),))
    worker.start()
    while not path.exists() or not read_store(path)[0]:
        assert worker.is_alive()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    found, _ = read_store(path)
    assert sorted(key.shapes[0][0] for key, _, _ in found) == [*range(1, len(found) + 1)]
    tune(FakeBackend(), LINEAR_INT8, measure, open_(path))  # what was open is rolled back, and the next one writes
    assert len(open_(path)) == 1


# The file


def test_a_row_says_in_words_what_was_measured(path: Path) -> None:
    tune(FakeBackend(latencies_ns={"t128x64": 5, "t64": None}), LINEAR_INT8, measure, open_(path, fake="1.0"))
    ((key, *found),) = sqlite3.connect(path).execute("SELECT key, config, latency_ns, tried FROM record").fetchall()
    assert json.loads(key) == {
        "device": "T4",
        "compute_capability": "",
        "backend": "fake",
        "op": "linear.output",
        "formats": "int8;out=float32;x=tensor;w=channel",
        "shapes": [[128, 64], [32, 64]],
        "attributes": {},
        "layout": "contiguous",
        "software": {"backend": "1.0", "torch": "2.13"},
    }
    assert found == ["t128x64", 5, 2]
    why = sqlite3.connect(path).execute("SELECT failure FROM measurement WHERE config = 't64'").fetchall()
    assert why == [("configuration t64 needs more shared memory than there is",)]


KEY = TuningKey("T4", "7.5", "fake", "quantize", "int8", ((4, 2),), {"multiplier": "channel"}, "contiguous", {"torch": "2"})
GOOD: dict[str, Any] = json.loads(KEY.text)


def test_a_key_is_read_back() -> None:
    assert TuningKey.parse(KEY.text) == KEY


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("[1]", "c", 5, 3), "expected the fields of a TuningKey, got list"),
        ((json.dumps({k: v for k, v in GOOD.items() if k != "device"}), "c", 5, 3), "TuningKey lacks device"),
        ((json.dumps(GOOD | {"shapes": [4]}), "c", 5, 3), r"shapes\[0\]: expected a list, got int"),
        ((json.dumps(GOOD | {"shapes": [[4, -1]]}), "c", 5, 3), "shapes must be lists of sizes"),
        ((json.dumps(GOOD | {"software": {"torch": 2}}), "c", 5, 3), r"software\[torch\]: expected a string, got int"),
        ((json.dumps(GOOD | {"speed": 2}), "c", 5, 3), "TuningKey has no field speed"),
        (("[" * 60_000, "c", 5, 3), "a row of it is wrong"),
        ((KEY.text, b"c", 5, 3), "expected text, got bytes"),
        ((KEY.text, "c", "5 ns", 3), "latency_ns must be an integer"),
        ((KEY.text, "c", -5, 3), r"latency_ns must be an integer in 0\.\.2\*\*62, got -5"),
        ((KEY.text, "c", 5, 2.5), "tried must be an integer"),
    ],
)
def test_a_wrong_row_is_named(path: Path, row: tuple[object, ...], message: str) -> None:
    open_(path).add(TuningRecord(KEY, "a", 5, 3))
    with sqlite3.connect(path) as store:
        store.execute("INSERT INTO record VALUES (?1, ?5, ?2, ?3, ?4)", (*row, KEY.family))
    with pytest.raises(ArtifactError, match=rf"tuning\.sqlite is not a store of .*{message}.*; delete it, and"):
        read_store(path)


@pytest.mark.parametrize(
    "content", [b"hello" * 300, b'{"qsync_tuning": 2}\n', b"SQLite format 3\0" + bytes(100), b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for call in (lambda: open_(path), lambda: merge_stores([path], path)):
        with pytest.raises(ArtifactError, match=r"tuning\.sqlite is not a store of tuning records that .* reads: .*tune"):
            call()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE other (a)",
        "CREATE TRIGGER more AFTER INSERT ON record BEGIN DELETE FROM measurement; END",
        "CREATE VIEW seen AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "DROP INDEX families",
    ],
)
def test_nothing_in_a_file_runs(path: Path, statement: str) -> None:
    open_(path).add(TuningRecord(KEY, "a", 5, 3))
    with sqlite3.connect(path) as store:
        store.execute(statement)
    for call in (lambda: open_(path), lambda: read_store(path)):
        with pytest.raises(ArtifactError, match=r"is not a store of .*: it has other tables; delete it"):
            call()


def test_rows_and_files_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_(path).add(TuningRecord(KEY, "a", 5, 3))
    with sqlite3.connect(path) as store:
        store.execute("INSERT INTO measurement VALUES (?, 'c', 1, 1, ?)", (KEY.text, "x" * (65 << 10)))
    with pytest.raises(ArtifactError, match=r"tuning\.sqlite is not a store of tuning records .*too big; delete it"):
        read_store(path)
    monkeypatch.setattr("qsync_core.tuning.store._MAX_FILE_BYTES", 100)
    with pytest.raises(ArtifactError, match=r"it has \d+ bytes, and stores of tuning records have at most 100; delete it"):
        open_(path)


@given(st.data())
@tries(30)
def test_damage_gives_one_sentence_or_rows_as_they_were(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes that change within a page need not be noticed by SQLite; what is read is checked all the same."""
    path = tmp_path_factory.mktemp("store") / "tuning.sqlite"
    open_(path).add(TuningRecord(KEY, "a", 5, 3))
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    said: str = ""
    records: list[TuningRecord] = []
    try:
        _, records = read_store(path)
    except ArtifactError as error:
        said = str(error)
    assert (str(path) in said) == bool(said)
    assert "\n" not in said
    assert all(isinstance(record, TuningRecord) for record in records)


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read tuning records from .*: Is a directory"):
        open_(tmp_path)


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("QSYNC_TUNING", raising=False)
    assert default_store_path() == Path("/cache/qsync/tuning.sqlite")
    monkeypatch.setenv("QSYNC_TUNING", "/mine.sqlite")
    assert default_store_path() == Path("/mine.sqlite")
    monkeypatch.delenv("QSYNC_TUNING")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_store_path() == Path("/home/me/.cache/qsync/tuning.sqlite")


# Joining

keys = st.builds(lambda m: attrs.evolve(KEY, shapes=((m, 2),)), st.integers(1, 3))
configs = st.sampled_from(["a", "b"])
measurements = st.builds(Measurement, st.integers(0, 9), st.integers(1, 3)) | st.builds(Measurement, failure=st.sampled_from("xy"))
entries = st.tuples(keys, configs, measurements) | st.builds(TuningRecord, keys, configs, st.integers(0, 9), st.integers(1, 3))


def write(path: Path, content: list[Any]) -> Path:
    path.touch()
    store = open_(path)
    for entry in content:
        if isinstance(entry, TuningRecord):
            store.add(entry)
        else:
            store.add_measurement(*entry)
    return path


@given(st.lists(entries, max_size=5), st.lists(entries, max_size=5), st.lists(entries, max_size=5))
@tries(15)
def test_joining_does_not_depend_on_order_or_repetition(
    tmp_path_factory: pytest.TempPathFactory, a: list[Any], b: list[Any], c: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    one, two, three = (write(folder / f"{name}.sqlite", content) for name, content in (("a", a), ("b", b), ("c", c)))
    merge_stores([one, two, three], folder / "all")
    merge_stores([three, one, one], folder / "part")
    merge_stores([folder / "part", two], folder / "again")
    before = read_store(folder / "all")
    assert before == read_store(folder / "again")
    merge_stores([folder / "all"], folder / "all")
    assert read_store(folder / "all") == before


def test_joining_keeps_the_most_thorough_measurement_and_the_widest_search(path: Path, tmp_path: Path) -> None:
    one = write(
        tmp_path / "a", [(KEY, "a", Measurement(5, 3)), (KEY, "b", Measurement(failure="no")), TuningRecord(KEY, "a", 5, 2)]
    )
    two = write(tmp_path / "b", [(KEY, "a", Measurement(7, 9)), (KEY, "b", Measurement(4, 1)), TuningRecord(KEY, "b", 6, 3)])
    assert merge_stores([one, two], path) == 1
    assert read_store(path) == (
        [(KEY, "a", Measurement(7, 9)), (KEY, "b", Measurement(4, 1))],
        [TuningRecord(KEY, "a", 5, 2), TuningRecord(KEY, "b", 6, 3)],
    )


def test_joining_a_file_that_is_not_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read tuning records from .*nowhere: there is no such file"):
        merge_stores([tmp_path / "nowhere"], path)
    assert not path.exists()

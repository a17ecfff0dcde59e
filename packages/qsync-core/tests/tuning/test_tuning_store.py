"""The tuning file: a key's records are found for it and for nearby shapes, survive other processes, and can be joined."""

from __future__ import annotations

import json
import multiprocessing
import warnings
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
from qsync_core.tuning.record import Measurement, TuningKey, TuningRecord, formats_of, read_line, record_line, shape_distance
from qsync_core.tuning.search import tune
from qsync_core.tuning.store import HEADER, TuningStore, default_store_path, merge_stores, read_contents


def measure(kernel: Kernel, request: KernelRequest, samples: int) -> int:
    latency_ns: int = kernel()
    return latency_ns


def shaped(m: int, k: int = 64, n: int = 32) -> KernelRequest:
    return attrs.evolve(LINEAR_INT8, shapes=((m, k), (n, k)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.jsonl"


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
    workers = [context.Process(target=_tune_many, args=(str(path), name, 25)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    store = open_(path)
    assert len(store) == 75
    for name in names:
        for m in range(1, 26):
            record = store.find(name, shaped(m))
            assert record is not None
            assert (record.config, record.latency_ns) == ("b", 3 * m)
            assert set(store.measured(name, shaped(m))) == {"a", "b"}


def test_records_of_other_devices_survive(path: Path) -> None:
    first, other = open_(path), open_(path, "A100")
    tune(FakeBackend(), LINEAR_INT8, measure, first)
    tune(FakeBackend(), LINEAR_INT8, measure, other)
    assert len(open_(path)) == 2


def test_half_a_line_of_a_killed_process_is_left_out(path: Path) -> None:
    store = open_(path)
    tune(FakeBackend(), shaped(1), measure, store)
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:70])
    with pytest.warns(UserWarning, match=r"1 of the lines of .*tuning\.jsonl cannot be read and are left out, .* line 5"):
        reopened = open_(path)
    assert len(reopened) == 1
    tune(FakeBackend(), shaped(2), measure, reopened)
    with pytest.warns(UserWarning, match="line 5"):
        assert len(open_(path)) == 2
    with pytest.warns(UserWarning, match="line 5"):
        assert merge_stores([path], path) == 2
    assert len(open_(path)) == 2  # joining wrote the readable lines alone, and nothing is left to warn of


@pytest.mark.parametrize("goes_on", [True, False])
def test_wherever_a_line_is_cut_the_others_are_read(path: Path, goes_on: bool) -> None:
    store = open_(path)
    tune(FakeBackend(latencies_ns={"{}": 5}), attrs.evolve(LINEAR_INT8, device_kind="{1}"), measure, store)
    whole = path.read_text()
    last = whole.splitlines()[-1]
    for end in range(1, len(last)):
        path.write_text(whole + last[:end] + ("\n" + last + "\n" if goes_on else ""))
        with pytest.warns(UserWarning, match=r"1 of the lines of .* cannot be read"):
            assert len(open_(path)) == 1


# The file


def test_a_line_says_in_words_what_was_measured(path: Path) -> None:
    tune(FakeBackend(latencies_ns={"t128x64": 5, "t64": None}), LINEAR_INT8, measure, open_(path, fake="1.0"))
    header, *lines = path.read_text().splitlines()
    assert header + "\n" == HEADER
    found = [json.loads(line) for line in lines]
    assert found[-1] == {
        "device": "T4",
        "compute_capability": "",
        "backend": "fake",
        "op": "linear.output",
        "formats": "int8;out=float32;x=tensor;w=channel",
        "shapes": [[128, 64], [32, 64]],
        "attributes": {},
        "layout": "contiguous",
        "software": {"torch": "2.13", "backend": "1.0"},
        "config": "t128x64",
        "latency_ns": 5,
        "best_of": 2,
    }
    assert [entry.get("failure") for entry in found if entry["config"] == "t64"] == [
        "configuration t64 needs more shared memory than there is"
    ]


KEY = TuningKey("T4", "7.5", "fake", "quantize", "int8", ((4, 2),), {"multiplier": "channel"}, "contiguous", {"torch": "2"})
GOOD: dict[str, Any] = json.loads(record_line(TuningRecord(KEY, "c", 5, 3)))


def test_a_record_is_read_back() -> None:
    assert read_line(json.dumps(GOOD)) == TuningRecord(KEY, "c", 5, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "expected an object, got list"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "device"}), "it lacks 'device'"),
        (json.dumps(GOOD | {"latency_ns": "5"}), "'latency_ns' must be a number, got str"),
        (json.dumps(GOOD | {"latency_ns": True}), "'latency_ns' must be a number, got bool"),
        (json.dumps(GOOD | {"latency_ns": -5}), r"latency_ns must be an integer in 0\.\.2\*\*62, got -5"),
        (json.dumps(GOOD | {"shapes": [4]}), "'shapes' must be lists of sizes"),
        (json.dumps(GOOD | {"shapes": [[4, -1]]}), "'shapes' must be lists of sizes"),
        (json.dumps(GOOD | {"software": {"torch": 2}}), "'software' must have texts as values"),
        (json.dumps(GOOD | {"speed": 2}), "it has an unknown entry 'speed'"),
    ],
)
def test_a_wrong_line_is_named(path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_line(line)
    path.write_text(HEADER + "\n" + line + "\n" + json.dumps(GOOD) + "\n")
    with pytest.warns(UserWarning, match=rf"tuning\.jsonl cannot be read and are left out, the first of them line 3: .*{message}"):
        assert len(open_(path)) == 1


def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path) -> None:
    for content in ("hello", '{"format": 1, "records": []}\n', "[" * 1000, "\n"):
        path.write_text(content)
        with pytest.raises(ArtifactError, match=r"tuning\.jsonl is not a store of tuning records that this qsync-core reads"):
            open_(path)
        with pytest.raises(ArtifactError, match="is not a store of tuning records"):
            merge_stores([path], path)
        assert path.read_text() == content


@given(st.binary(max_size=200))
@tries(200)
def test_any_bytes_after_the_header_give_one_warning(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("store") / "tuning.jsonl"
    path.write_bytes(HEADER.encode() + data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(open_(path)) == 0
    assert len(caught) == any(line.strip() for line in data.split(b"\n"))


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read tuning records from .*: Is a directory"):
        open_(tmp_path)


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("QSYNC_TUNING", raising=False)
    assert default_store_path() == Path("/cache/qsync/tuning.jsonl")
    monkeypatch.setenv("QSYNC_TUNING", "/mine.jsonl")
    assert default_store_path() == Path("/mine.jsonl")
    monkeypatch.delenv("QSYNC_TUNING")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_store_path() == Path("/home/me/.cache/qsync/tuning.jsonl")


# Joining

keys = st.builds(lambda m: attrs.evolve(KEY, shapes=((m, 2),)), st.integers(1, 3))
configs = st.sampled_from(["a", "b"])
measurements = st.builds(Measurement, st.integers(0, 9), st.integers(1, 3)) | st.builds(Measurement, failure=st.sampled_from("xy"))
entries = st.tuples(keys, configs, measurements) | st.builds(TuningRecord, keys, configs, st.integers(0, 9), st.integers(1, 3))


def write(path: Path, content: list[Any]) -> Path:
    store = open_(path)
    store._append("")
    for entry in content:
        if isinstance(entry, TuningRecord):
            store.add(entry)
        else:
            store.add_measurement(*entry)
    return path


@given(st.lists(entries, max_size=5), st.lists(entries, max_size=5), st.lists(entries, max_size=5))
@tries(40)
def test_joining_does_not_depend_on_order_or_repetition(
    tmp_path_factory: pytest.TempPathFactory, a: list[Any], b: list[Any], c: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    one, two, three = (write(folder / f"{name}.jsonl", content) for name, content in (("a", a), ("b", b), ("c", c)))
    merge_stores([one, two, three], folder / "all")
    merge_stores([three, one, one], folder / "part")
    merge_stores([folder / "part", two], folder / "again")
    assert (folder / "all").read_bytes() == (folder / "again").read_bytes()
    before = (folder / "all").read_bytes()
    merge_stores([folder / "all"], folder / "all")
    assert (folder / "all").read_bytes() == before


def test_joining_keeps_the_most_thorough_measurement_and_the_widest_search(path: Path, tmp_path: Path) -> None:
    one = write(
        tmp_path / "a", [(KEY, "a", Measurement(5, 3)), (KEY, "b", Measurement(failure="no")), TuningRecord(KEY, "a", 5, 2)]
    )
    two = write(tmp_path / "b", [(KEY, "a", Measurement(7, 9)), (KEY, "b", Measurement(4, 1)), TuningRecord(KEY, "b", 6, 3)])
    assert merge_stores([one, two], path) == 1
    found = read_contents(path)
    assert found.measured[KEY.text] == {"a": Measurement(7, 9), "b": Measurement(4, 1)}
    assert found.record(KEY.text) == TuningRecord(KEY, "b", 6, 3)


def test_joining_a_file_that_is_not_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read tuning records from .*nowhere: there is no such file"):
        merge_stores([tmp_path / "nowhere"], path)
    assert not path.exists()

"""The search: the fastest configuration wins, few are measured thoroughly, nothing is measured twice."""

from __future__ import annotations

import errno
import subprocess
from collections import Counter
from pathlib import Path

import attrs
import pytest
from backend_doubles import LINEAR_INT8, FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.errors import ArtifactError, BackendError
from qsync_core.kernels.backend import CompilingBackend, Kernel, KernelConfig, KernelRequest
from qsync_core.tuning.record import Measurement, TuningKey, TuningRecord
from qsync_core.tuning.search import DeviceLostError, Effort, tune
from qsync_core.tuning.store import TuningStore


def measure(kernel: Kernel, request: KernelRequest, samples: int) -> int:
    latency_ns: int = kernel()
    return latency_ns


class MemoryStore(TuningStore):
    """A store without a file, which would take most of a property's time."""

    def __init__(self) -> None:
        self.path, self.device, self.software, self.backend_versions = Path("unused"), "T4", {}, {}
        self._measured: dict[str, dict[str, Measurement]] = {}

    def _records(self, where: str, *values: str) -> list[TuningRecord]:
        return []

    def measured(self, backend: str, request: KernelRequest) -> dict[str, Measurement]:
        return dict(self._measured.get(self.key(backend, request).text, {}))

    def add_measurement(self, key: TuningKey, config: str, found: Measurement) -> None:
        self._measured.setdefault(key.text, {})[config] = found

    def add(self, record: TuningRecord) -> None:
        pass


@attrs.define
class Watch:
    """Measures, and counts the samples of each configuration by its latency."""

    samples: Counter[int] = attrs.field(factory=Counter)
    stop_after: int = 1_000_000

    def __call__(self, kernel: Kernel, request: KernelRequest, samples: int) -> int:
        if not self.stop_after:
            raise KeyboardInterrupt
        self.stop_after -= 1
        latency_ns: int = kernel()
        self.samples[latency_ns] += samples
        return latency_ns


@pytest.fixture
def store(tmp_path: Path) -> TuningStore:
    return TuningStore(tmp_path / "deep" / "tuning.sqlite", "T4", {"torch": "2.13"})


def reopened(store: TuningStore) -> TuningStore:
    return TuningStore(store.path, store.device, store.software)


def test_the_fastest_configuration_that_runs_is_kept(store: TuningStore) -> None:
    backend = FakeBackend(latencies_ns={"a": 30, "b": None, "c": 10, "d": 10})
    record = tune(backend, LINEAR_INT8, measure, store)
    assert (record.config, record.latency_ns, record.tried) == ("c", 10, 4)
    assert store.find("fake", LINEAR_INT8) == record
    assert reopened(store).find("fake", LINEAR_INT8) == record
    assert reopened(store).measured("fake", LINEAR_INT8)["b"].failure == "configuration b needs more shared memory than there is"


def test_a_search_whose_time_is_over_compiles_nothing_more_and_the_next_one_goes_on(store: TuningStore) -> None:
    backend, watch = FakeBackend(latencies_ns={"a": None, "b": 30, "c": 20, "d": 10, "e": 40}), Watch()
    left = iter([True, False])
    record = tune(backend, LINEAR_INT8, watch, store, in_time=lambda: next(left))
    # a does not run, so that b is tried whatever the time; c is in time, and d is not.
    assert (record.config, record.latency_ns, record.tried) == ("c", 20, 3)
    assert set(watch.samples) == {30, 20}
    asked: list[int] = []
    record = tune(backend, LINEAR_INT8, Watch(), reopened(store), in_time=lambda: asked.append(1) is None)
    assert (record.config, record.tried, len(asked)) == ("d", 5, 2)
    assert reopened(store).find("fake", LINEAR_INT8) == record


@given(st.dictionaries(st.text("abcdef", max_size=3), st.none() | st.integers(0, 2**62), min_size=1, max_size=8))
def test_tuning_finds_the_minimum(latencies_ns: dict[str, int | None]) -> None:
    measured = {config: latency for config, latency in latencies_ns.items() if latency is not None}
    if measured:
        record = tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, measure, MemoryStore())
        assert record.config == min(measured, key=lambda config: measured[config])
        assert record.latency_ns == min(measured.values())
    else:
        with pytest.raises(BackendError, match=r"no configuration of backend fake runs linear\.output in int8"):
            tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, measure, MemoryStore())


def test_the_better_ones_are_measured_more_thoroughly() -> None:
    watch = Watch()
    backend = FakeBackend(latencies_ns={str(ns): ns for ns in (90, 80, 70, 60, 50, 40, 30, 20, 10)})
    tune(backend, LINEAR_INT8, watch, MemoryStore(), effort=Effort(samples=(1, 10, 100), keep=1 / 3))
    assert watch.samples == {90: 1, 80: 1, 70: 1, 60: 1, 50: 1, 40: 1, 30: 11, 20: 111, 10: 111}


def test_only_the_head_of_the_backends_list_is_tried() -> None:
    backend = FakeBackend(latencies_ns={"a": 3, "b": 2, "c": 1})
    store = MemoryStore()
    assert tune(backend, LINEAR_INT8, measure, store, effort=Effort(budget=2)).config == "b"
    assert set(store.measured("fake", LINEAR_INT8)) == {"a", "b"}


def test_a_latency_at_the_lower_bound_ends_the_search() -> None:
    watch = Watch()
    backend = FakeBackend(latencies_ns={"a": 200, "b": 104, "c": 103, "d": 102})
    record = tune(backend, LINEAR_INT8, watch, MemoryStore(), lower_bound_ns=100, effort=Effort(near=1.05))
    assert record.config == "b"
    assert set(watch.samples) == {200, 104}


def test_a_backend_that_is_far_behind_another_is_not_tried_further() -> None:
    latencies_ns: dict[str, int | None] = {"a": 150, "b": 140, "c": 160, "d": 1}
    effort = Effort(first_guesses=3, hopeless=1.3)
    watch, store = Watch(), MemoryStore()
    behind = tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, watch, store, effort=effort, rival_ns=100)
    assert (behind.config, set(watch.samples)) == ("b", {150, 140, 160})
    # It has been searched: that is not done again.
    assert tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, watch, store, effort=effort, rival_ns=100) == behind
    near = tune(FakeBackend(latencies_ns=latencies_ns), LINEAR_INT8, measure, MemoryStore(), effort=effort, rival_ns=110)
    assert near.config == "d"
    # What does not run is no guess.
    failing = FakeBackend(latencies_ns={"a": None, "b": None, "c": 150, "d": 1})
    assert tune(failing, LINEAR_INT8, measure, MemoryStore(), effort=effort, rival_ns=100).config == "d"


def test_an_interrupted_search_continues(store: TuningStore) -> None:
    backend = FakeBackend(latencies_ns={"a": 4, "b": None, "c": 2, "d": 1})
    with pytest.raises(KeyboardInterrupt):
        tune(backend, LINEAR_INT8, Watch(stop_after=2), store)
    assert reopened(store).find("fake", LINEAR_INT8) is None
    watch = Watch()
    samples = Effort().samples
    assert tune(backend, LINEAR_INT8, watch, reopened(store)).config == "d"
    # The first two were measured briefly before the interruption; the second of them goes on to the next rounds.
    assert watch.samples == {2: samples[1] + samples[2], 1: sum(samples)}


def test_a_finished_search_is_not_repeated(store: TuningStore) -> None:
    backend = FakeBackend(latencies_ns={"a": 3, "b": 2, "c": 1})
    first = tune(backend, LINEAR_INT8, measure, store, effort=Effort(budget=2))
    watch = Watch()
    assert tune(backend, LINEAR_INT8, watch, reopened(store), effort=Effort(budget=1)) == first
    assert not watch.samples
    assert tune(backend, LINEAR_INT8, watch, reopened(store), effort=Effort(budget=3)).config == "c"
    assert 3 not in watch.samples


def test_a_kernel_that_breaks_the_device_is_not_tried_again(store: TuningStore) -> None:
    backend = FakeBackend(latencies_ns={"a": 9, "b": 7, "c": 8})

    def breaking(kernel: Kernel, request: KernelRequest, samples: int) -> int:
        if kernel() == 7:
            raise DeviceLostError("the device is gone")
        return measure(kernel, request, samples)

    with pytest.raises(DeviceLostError, match="the device is gone"):
        tune(backend, LINEAR_INT8, breaking, store)
    assert tune(backend, LINEAR_INT8, breaking, reopened(store)).config == "c"
    assert store.measured("fake", LINEAR_INT8)["b"] == Measurement(failure="the device is gone")


def test_a_backend_that_raises_something_else_fails_that_configuration_only(store: TuningStore) -> None:
    class Careless(FakeBackend):
        def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
            if config.text == "a":
                raise ZeroDivisionError("oh")
            return super().build(request, config)

    assert tune(Careless(latencies_ns={"a": 1, "b": 2}), LINEAR_INT8, measure, store).config == "b"
    assert store.measured("fake", LINEAR_INT8)["a"].failure == "ZeroDivisionError: oh"


def full_disk() -> Exception:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        try:
            raise BackendError("the cache cannot be written; name another folder") from None
        except BackendError as error:
            return error


class OutOfMemoryError(RuntimeError):
    """As torch has one."""


PASSING = [
    full_disk(),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    MemoryError(),
    OutOfMemoryError("tried to allocate 2 GiB"),
    subprocess.CalledProcessError(-9, ["ptxas"]),
    BackendError("nvcc could not compile the kernel: it was killed by signal 9, usually for want of memory"),
    BackendError("nvcc could not compile the kernel (exit status 1): /tmp/x.ptx: No space left on device"),
    RuntimeError("CUDA error: out of memory"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "gcc"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "/usr/local/cuda/bin/nvcc"),
    BackendError("its kernel failed with RuntimeError: Failed to find C compiler. Please specify via CC environment variable"),
]
LASTING = [
    FileNotFoundError(errno.ENOENT, "No such file or directory", "kernels.json"),
    FileNotFoundError("libdevice.10.bc"),
    BackendError("nvcc could not compile the kernel: fatal error: cuda_fp8.h: No such file or directory"),
    subprocess.CalledProcessError(1, ["ptxas"]),
    BackendError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    ZeroDivisionError("oh"),
]


@attrs.define
class FailsOnce(FakeBackend):
    """Fails to build one configuration, the first time."""

    error: Exception | None = None

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        if config.text == "a" and self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().build(request, config)


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_failure_that_may_pass_is_not_remembered(store: TuningStore, error: Exception) -> None:
    backend = FailsOnce(latencies_ns={"a": 1, "b": 3, "c": 2}, error=error)
    first = tune(backend, LINEAR_INT8, measure, store)
    assert (first.config, first.tried) == ("c", 2)
    assert set(reopened(store).measured("fake", LINEAR_INT8)) == {"b", "c"}
    watch = Watch()
    again = tune(backend, LINEAR_INT8, watch, reopened(store))
    assert (again.config, again.tried) == ("a", 3)
    assert set(watch.samples) == {1}
    assert reopened(store).find("fake", LINEAR_INT8) == again


@pytest.mark.parametrize("error", LASTING, ids=lambda error: type(error).__name__)
def test_any_other_failure_is_remembered(store: TuningStore, error: Exception) -> None:
    backend = FailsOnce(latencies_ns={"a": 1, "b": 3, "c": 2}, error=error)
    assert tune(backend, LINEAR_INT8, measure, store).tried == 3
    assert tune(backend, LINEAR_INT8, measure, reopened(store)).config == "c"
    assert reopened(store).measured("fake", LINEAR_INT8)["a"].failure


def test_a_search_that_failed_for_reasons_that_may_pass_says_so(store: TuningStore) -> None:
    backend = FailsOnce(latencies_ns={"a": 1}, error=full_disk())
    with pytest.raises(BackendError, match=r"a: the cache cannot be written; .*; that may pass, and the next search tries again"):
        tune(backend, LINEAR_INT8, measure, store)
    assert tune(backend, LINEAR_INT8, measure, reopened(store)).config == "a"


def test_memory_that_runs_out_in_a_later_round_keeps_what_was_measured(store: TuningStore) -> None:
    def short_of_memory(kernel: Kernel, request: KernelRequest, samples: int) -> int:
        if samples > 3 and kernel() == 1:
            raise OutOfMemoryError("tried to allocate 2 GiB")
        return measure(kernel, request, samples)

    backend = FakeBackend(latencies_ns={"a": 1, "b": 3, "c": 2})
    assert tune(backend, LINEAR_INT8, short_of_memory, store).config == "c"
    assert reopened(store).measured("fake", LINEAR_INT8)["a"] == Measurement(1, 3)
    assert tune(backend, LINEAR_INT8, measure, reopened(store)).config == "a"


def test_errors_name_the_reasons(store: TuningStore) -> None:
    with pytest.raises(BackendError, match=r"backend fake cannot run linear\.output in int8>float32 of shapes .*: too small"):
        tune(FakeBackend(reasons=("too small",)), LINEAR_INT8, measure, store)
    with pytest.raises(BackendError, match="b: configuration b needs more shared memory than there is"):
        tune(FakeBackend(latencies_ns={"b": None}), LINEAR_INT8, measure, store)
    with pytest.raises(BackendError, match="it offers none"):
        tune(FakeBackend(latencies_ns={}), attrs.evolve(LINEAR_INT8, shapes=((1, 1), (1, 1))), measure, store)
    assert len(store) == 0


def test_a_store_that_can_not_be_written(store: TuningStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store.path = tmp_path / "file" / "tuning.sqlite"
    with pytest.raises(ArtifactError, match=r"cannot write tuning records to .*: (Not a directory|File exists)"):
        tune(FakeBackend(), LINEAR_INT8, measure, store)


def test_compiling_ahead_is_an_extra_of_some_backends() -> None:
    class Compiling(FakeBackend):
        def compile_ahead(self, requests: object, arch: str, progress: object) -> None:
            pass

    assert isinstance(Compiling(), CompilingBackend)
    assert not isinstance(FakeBackend(), CompilingBackend)


def test_records_check_their_numbers() -> None:
    key = TuningKey("T4", "7.5", "fake", "quantize", "int8", ((1,),), {}, "contiguous", {})
    with pytest.raises(ValueError, match=r"TuningRecord\.latency_ns must be an integer"):
        TuningRecord(key, "", -1)

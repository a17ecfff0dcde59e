"""What a process takes of a GPU, against a simulated allocator and nvidia-smi's words."""

import pytest
import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.devices import has_expandable_segments
from qsync_torch.profiling.memory import measure_memory, others_in, outside_bytes

CUDA = torch.device("cuda", 0)
FLOAT32 = Variant.plain(Precision.FLOAT32)
GB = 10**9


class Allocator:
    """Counts of a caching allocator; steps of 3 GB above what lives, the third of which needs a new segment."""

    def __init__(self, living, reserved):
        self.now, self.reserved, self.peak, self.most_reserved, self.steps = living, reserved, living, reserved, 0

    def step(self):
        self.steps += 1
        self.peak = max(self.peak, self.now + 3 * GB)
        self.reserved = max(self.reserved, self.now + 3 * GB + (2 * GB if self.steps >= 3 else 0))
        self.most_reserved = max(self.most_reserved, self.reserved)

    def reset(self, device=None):
        self.peak, self.most_reserved = self.now, self.reserved


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator(living=2 * GB, reserved=2 * GB)
    for name, function in {
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: found.now,
        "memory_reserved": lambda device=None: found.reserved,
        "max_memory_allocated": lambda device=None: found.peak,
        "max_memory_reserved": lambda device=None: found.most_reserved,
        "reset_peak_memory_stats": found.reset,
        "mem_get_info": lambda device=None: (20 * GB, 30 * GB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return found


def test_what_lives_before_a_step_counts_and_later_steps_may_reserve_more(allocator):
    found = measure_memory(allocator.step, FLOAT32, CUDA, [])
    assert (found.allocated_bytes, found.reserved_bytes) == (5 * GB, 7 * GB)


def test_what_only_the_measurement_keeps_does_not_count(allocator, monkeypatch):
    class Tensor:
        device = CUDA

    monkeypatch.setattr("qsync_torch.profiling.memory.storage_bytes", lambda tensors: GB * len(list(tensors)))
    found = measure_memory(allocator.step, FLOAT32, CUDA, [Tensor(), torch.ones(3)])
    assert (found.allocated_bytes, found.reserved_bytes) == (4 * GB, 6 * GB)


LISTED = """GPU-aa, 100, 3000
GPU-aa, 200, 500
GPU-bb, 300, 9000
GPU-aa, 400, [N/A]
"""


@pytest.mark.parametrize(
    ("uuid", "pid", "others"),
    [("GPU-aa", 100, 500 << 20), ("GPU-aa", 200, 3000 << 20), ("GPU-bb", 300, 0), ("GPU-aa", 7, 0), ("GPU-cc", 100, 0)],
    ids=["two on the device", "the smaller of them", "alone", "in another namespace", "another device"],
)
def test_other_processes_on_the_device(uuid, pid, others):
    assert others_in(LISTED.splitlines(), uuid, pid) == others


@pytest.mark.parametrize("listed", ["", "no devices were found", "GPU-aa, x, y\n"])
def test_a_list_that_cannot_be_read_names_nobody(listed):
    assert others_in(listed.splitlines(), "GPU-aa", 100) == 0


def test_what_lies_outside_the_allocator(allocator, monkeypatch):
    monkeypatch.setattr("qsync_torch.profiling.memory._of_others", lambda device: 7 * GB)
    assert outside_bytes(CUDA) == (30 - 20 - 2 - 7) * GB


@pytest.mark.parametrize(
    ("settings", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:true", True),
    ],
)
def test_the_allocators_segments_before_it_has_any(monkeypatch, settings, expandable):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert has_expandable_segments() is expandable


@pytest.mark.parametrize("expandable", [False, True])
def test_the_allocators_segments_say_themselves_whether_they_grow(monkeypatch, expandable):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{not expandable}")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda include_traces: [{"is_expandable": False}, {"is_expandable": expandable}]
    )
    assert has_expandable_segments() is expandable

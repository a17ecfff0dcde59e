import torch

from qsync_torch.profiling.peak_memory import memory_rise, peak_memory, storage_bytes


def test_temporaries_count_at_their_height():
    def run():
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(3000, dtype=torch.uint8)
        del a
        c = torch.empty(500, dtype=torch.uint8)
        del b, c

    assert peak_memory(run) == 4000


def test_what_is_left_is_reported_beside_the_peak():
    kept = []

    def run():
        temporary = torch.empty(4096, dtype=torch.uint8)
        kept.append(torch.empty(1024, dtype=torch.uint8))
        del temporary

    assert memory_rise(run) == (5120, 1024)


def test_releasing_what_was_there_before_does_not_make_room():
    old = [torch.empty(4096, dtype=torch.uint8)]

    def run():
        old.clear()
        torch.empty(100, dtype=torch.uint8)

    assert peak_memory(run) == 100


def test_allocations_inside_kernels_are_seen():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    assert peak_memory(lambda: torch.linalg.multi_dot([a, b, a, b])) > 64 * 64 * 4


def test_views_share_a_storage():
    x = torch.empty(10, 10)
    assert storage_bytes([x, x[2:], x.t()]) == 400

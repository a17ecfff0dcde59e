import pytest
import torch

from qsync_torch.aten import random_bits
from qsync_torch.aten.random_bits import random_thresholds, stream_key


def random_bytes(numel, seed, offset, start=0, device="cpu"):
    return random_bits.random_bytes(numel, seed, offset, start, torch.device(device)).clone()


def test_same_seed_and_offset_give_the_same_bits_whatever_the_number_of_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = random_bytes(200_001, 7, 9)
        torch.set_num_threads(2)
        assert torch.equal(random_bytes(200_001, 7, 9), one)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(random_bytes(200_001, 7, 10), one)
    assert not torch.equal(random_bytes(200_001, 8, 9), one)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 37, 4096])
def test_a_stream_can_be_entered_anywhere(start):
    assert torch.equal(random_bytes(100, 1, 2, start), random_bytes(100 + start, 1, 2)[start:])


def test_bytes_are_uniform_and_their_bits_balanced(device):
    drawn = random_bytes(1 << 20, 3, 4, device=device).cpu().to(torch.int64) + 128
    expected = (1 << 20) / 256
    chi_squared = ((torch.bincount(drawn, minlength=256) - expected) ** 2 / expected).sum().item()
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert 150 < chi_squared < 370
    for bit in range(8):
        assert (drawn >> bit & 1).double().mean().item() == pytest.approx(0.5, abs=0.003)


def test_cpu_and_cuda_draw_the_same_bits(device):
    assert torch.equal(random_bytes(1001, 5, 6, 3, device=device).cpu(), random_bytes(1001, 5, 6, 3))


def test_thresholds_have_the_moments_of_a_uniform_draw_and_no_long_range_correlation():
    u = random_thresholds(1 << 20, 11, 12).double() / 256
    assert u.mean().item() == pytest.approx(-(2.0**-9), abs=1.5e-3)
    assert u.var().item() == pytest.approx(1 / 12, rel=5e-3)
    for lag in (1, 2, 3, 4, 64):
        correlation = torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1].item()
        assert abs(correlation) < 0.01, lag
    other = random_thresholds(1 << 20, 11, 13).double() / 256
    assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1].item()) < 0.005


def test_keys_of_different_parts_differ():
    keys = {stream_key(seed, part) for seed in range(50) for part in range(50)}
    assert len(keys) == 2500
    assert all(0 <= key < 1 << 63 for key in keys)

import pytest
import torch

from qsync_torch.profiling.memory import memory_rise, passing_rise, storage_bytes


def test_temporaries_count_at_their_height():
    def run():
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(3000, dtype=torch.uint8)
        del a
        c = torch.empty(500, dtype=torch.uint8)
        del b, c

    assert memory_rise(run)[0] == 4000


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

    assert memory_rise(run)[0] == 100


def test_allocations_inside_kernels_are_seen():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    assert memory_rise(lambda: torch.linalg.multi_dot([a, b, a, b]))[0] > 64 * 64 * 4


def test_views_share_a_storage():
    x = torch.empty(10, 10)
    assert storage_bytes([x, x[2:], x.t()]) == 400


def test_what_stays_is_left_out_of_what_passes():
    kept = []

    def run():
        kept.append(torch.empty(1024, dtype=torch.uint8))
        first = torch.empty(4096, dtype=torch.uint8)
        kept.append(torch.empty(2048, dtype=torch.uint8))
        second = torch.empty(512, dtype=torch.uint8)
        del first, second

    assert passing_rise(run) == 4096 + 512
    assert memory_rise(run) == (4096 + 512 + 3072, 3072)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
    ],
)
@pytest.mark.parametrize("width", [8, 256], ids=["activations", "weights"])
def test_a_first_steps_memory_tells_that_of_every_later_one(optimizer, width):
    """Whether activations or the optimizer's temporaries make the peak."""
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 8))
    rows = 4096 // width
    parameters = list(model.parameters())
    made = optimizer(parameters)
    x = torch.randn(rows, 8)

    def step():
        model(x).square().mean().backward()
        made.step()
        made.zero_grad(set_to_none=True)

    first = passing_rise(step)
    assert [memory_rise(step), memory_rise(step)] == [(first, 0)] * 2

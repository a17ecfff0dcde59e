"""Tensors that are broadcast in one piece, whatever their layout; tests/distributed has jobs of several ranks."""

import pytest
import torch
import torch.distributed as dist

from qsync_torch.distributed.buffers import broadcast_together

LAYOUTS = {
    "every second number": lambda: torch.zeros(6)[::2],
    "a column": lambda: torch.zeros(4, 3)[:, 1],
    "transposed": lambda: torch.zeros(2, 3).t(),
    "one number": lambda: torch.zeros(()),
    "channels-last": lambda: torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_any_layout_gets_what_the_source_has(monkeypatch, layout, beside):
    def broadcast(flat, group, group_src):
        assert flat.is_contiguous()  # Gloo takes any, and sends what lies side by side
        flat.copy_(torch.arange(1.0, flat.numel() + 1))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    tensors = [LAYOUTS[layout]()] + [torch.zeros(2)] * beside
    broadcast_together(None, tensors, 0)
    found = torch.cat([tensor.reshape(-1) for tensor in tensors])
    assert torch.equal(found, torch.arange(1.0, found.numel() + 1))

"""How images lie in memory is a fact of a graph, whatever their dimensions."""

import pytest
import torch

from qsync_core.kinds import Kind
from qsync_torch.kinds.convolution import convolution
from qsync_torch.kinds.kind import TracedCall

KINDS = {
    "conv2d": (convolution(Kind("conv2d", dimensions=2)), torch.channels_last),
    "conv3d": (convolution(Kind("conv3d", dimensions=3)), torch.channels_last_3d),
}
SETTINGS = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lies_last", [False, True])
def test_channels_that_lie_last_are_recorded(name, lies_last):
    kind, last = KINDS[name]
    sizes = (6,) * kind.row.dimensions
    x, weight = torch.randn(2, 4, *sizes), torch.randn(8, 4, *(3 for _ in sizes))
    attributes, reason = kind.describe(TracedCall(x.to(memory_format=last) if lies_last else x, weight, None, SETTINGS))
    assert reason == ""
    assert attributes.get("memory_format") == ("channels_last" if lies_last else None)

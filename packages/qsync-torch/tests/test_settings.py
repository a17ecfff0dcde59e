"""What a process's record of its versions and settings says, whichever of PyTorch's switches made them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from forked import Forked
from qsync_core.settings import SETTINGS
from qsync_torch.devices import memory_format, software_versions

SWITCHES = {
    "": ("highest", "True", "True"),
    "b.cudnn.allow_tf32 = False": ("highest", "False", "False"),
    "b.cudnn.conv.fp32_precision = 'ieee'": ("highest", "False", "True"),
    "b.cuda.matmul.allow_tf32 = True": ("high", "True", "True"),
    "b.cuda.matmul.fp32_precision = 'tf32'": ("high", "True", "True"),
    "b.fp32_precision = 'ieee'": ("highest", "False", "False"),
    "torch.set_float32_matmul_precision('high')": ("high", "True", "True"),
}
"""By PyTorch's older and newer switches: float32 products, convolutions, recurrent layers."""
PROGRAM = """
import json, sys, torch
b = torch.backends
exec(sys.argv[1])
from qsync_torch.devices import software_versions
print(json.dumps(software_versions(torch.device("cuda"))))
"""


@pytest.mark.parametrize("switch", SWITCHES)
def test_tf32_is_recorded_whichever_switch_made_it(switch):
    """In a process of its own, because PyTorch refuses to mix the two kinds of switches in one."""
    process = Forked(["-c", PROGRAM, switch])
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    found = json.loads(printed)
    assert (found["float32_matmul"], found["cudnn_tf32"], found["cudnn_rnn_tf32"]) == SWITCHES[switch]
    assert set(SETTINGS) - set(found) == {"device", "share", "memory_format", "threads", "machine", "cpu_capability", "compiled"}


def test_autocast_is_recorded_where_it_is_on():
    assert software_versions(torch.device("cpu"))["autocast"] == "off"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert software_versions(torch.device("cpu"))["autocast"] == "bfloat16"


def test_memory_format_of_a_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    assert memory_format(model) == "contiguous"
    assert memory_format(model.to(memory_format=torch.channels_last)) == "channels_last"
    assert memory_format(nn.Sequential(model, nn.Conv2d(3, 8, 3))) == "mixed"
    assert memory_format(nn.Sequential(nn.Linear(3, 3), nn.Conv2d(8, 8, 1))) == ""

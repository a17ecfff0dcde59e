"""One of two ranks, over gloo, which train in int8 on a backend of which only rank 0 has the kernels: ``RANK FOLDER``."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from installed_backends import PRODUCTS, LateBackend, NamedBackend

from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.variant import Variant
from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.registry import Registry
from qsync_torch import apply_
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.kernels import installed, selection

warnings.simplefilter("always")
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
late, ready = LateBackend(cache=[(op, "a") for op in PRODUCTS] if rank == 0 else []), NamedBackend("ready")


class Plugin:
    @hookimpl
    def qsync_register_backends(self):
        return [AtenBackend(), late, ready]


registry = Registry.load([])
registry.register(Plugin(), "test-backends")
installed.installed = selection.installed = lambda: registry

dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
entry = Assignment(Variant.parse("int8>float32"), "late+ready+aten", "", "")
apply_(model, {OpId("0"): entry, OpId("2"): entry})
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(3):
    wrapped(torch.randn(8, 16, requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [parameter.detach().double().sum().item() for parameter in model.parameters()]
ran = sorted({op for op, _ in late.ran})
print(json.dumps({"late": ran, "asked": sorted(op for op, _ in late.asked), "weights": weights}), flush=True)
dist.destroy_process_group()

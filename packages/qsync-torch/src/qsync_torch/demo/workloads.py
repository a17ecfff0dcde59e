"""The demo's workloads by name."""

from __future__ import annotations

from qsync_torch.demo.digits import digits_resnet
from qsync_torch.demo.masked_sources import masked_sources_bert
from qsync_torch.demo.workload import Workload


def load_workload(name: str, *, tiny: bool = False) -> Workload:
    """The workload of that name, ``resnet`` or ``bert``."""
    if name == "resnet":
        return digits_resnet(tiny)
    return masked_sources_bert(tiny)

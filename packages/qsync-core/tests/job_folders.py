"""Run folders with plans for made-up devices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import attrs
from artifact_examples import examples

from qsync_core.artifacts.files import save
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.run_folder import RunFolder

PLAN: PrecisionPlan = examples()[PrecisionPlan]
H200 = DeviceType("NVIDIA H200", DeviceKind.CUDA, 1.0, 0, "9.0")
HALF_T4 = DeviceType("Tesla T4", DeviceKind.CUDA, 0.5, 0, "7.5")
CPU = DeviceType("cpu", DeviceKind.CPU)


def run_folder(path: Path, groups: Mapping[str, tuple[Role, int, DeviceType]], *, kept: int = 1) -> RunFolder:
    """A folder with plans for all sets of at least ``kept`` groups that have a training one."""
    run = RunFolder(path)
    (path / "plans").mkdir(parents=True)
    tables = []
    for name, (role, count, device) in groups.items():
        ladder = 'ladder = ["float16", "float32"]\n' if role is Role.INFER else ""
        share = f"share = {device.share}\n" if device.share < 1 else ""
        tables.append(f'[[group]]\nname = "{name}"\ndevice = "{device.name}"\ncount = {count}\nrole = "{role}"\n{ladder}{share}')
    run.cluster.write_text("\n".join(tables))
    for size in range(kept, len(groups) + 1):
        for names in itertools.combinations(groups, size):
            training = [name for name in names if groups[name][0] is Role.TRAIN]
            if training:
                save(_plan({name: groups[name] for name in names}, training[-1]), run.plan(names))
    return run


def _plan(groups: Mapping[str, tuple[Role, int, DeviceType]], rank0_group: str) -> PrecisionPlan:
    parts = tuple(
        attrs.evolve(PLAN.groups[0], group=name, role=role, count=count, device=device, memory_budget_bytes=0)
        for name, (role, count, device) in groups.items()
    )
    return attrs.evolve(PLAN, groups=parts, rank0_group=rank0_group, local_batches={}, software={}, communication=None)

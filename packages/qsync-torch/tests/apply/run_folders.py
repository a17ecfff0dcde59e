"""A run folder for a model of one linear, with hand-made plans: one for every set of its three groups but ``infer+spare``."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

from torch import nn

from qsync_core.artifacts.files import save
from qsync_core.ir.communication import CommunicationSettings, PlannedCommunication
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_core.run_folder import RunFolder

PRECISIONS = {"train": Precision.FLOAT32, "infer": Precision.BFLOAT16, "spare": Precision.INT8}
ROLES = {"train": Role.TRAIN, "infer": Role.INFER, "spare": Role.INFER}


BATCHES = {"train": 6, "infer": 6, "spare": 7}


def plan_for(groups: Collection[str], note: str = "", *, batches: bool = False) -> PrecisionPlan:
    """A plan whose NCCL CTAs are as many as it has groups; with local batches it is in float32."""
    op_id = OpId("0")
    device = DeviceType("cpu", DeviceKind.CPU)
    entries = []
    for name in (name for name in PRECISIONS if name in groups):
        precision = Precision.FLOAT32 if batches else PRECISIONS[name]
        assignment = Assignment(Variant.of(precision), "aten", "", "by hand")
        entries.append(GroupPlan(name, ROLES[name], 1, device, Precision.FLOAT32, {op_id: assignment}))
    training = [entry.group for entry in entries if entry.role is Role.TRAIN]
    communication = PlannedCommunication(CommunicationSettings(max_ctas=len(entries)), "by hand")
    return PrecisionPlan(
        "m", "", (op_id,), {}, "by hand", "", 1, 1, 0.0, None, tuple(entries), "".join(training), notes=(note,),
        output_formats=OutputFormats(decides=False),
        communication=communication, local_batches={name: BATCHES[name] for name in groups} if batches else {},
    )  # fmt: skip


def make_run_folder(path: Path, groups: Collection[str] = tuple(PRECISIONS), *, batches: bool = False) -> RunFolder:
    run = RunFolder(path)
    for folder in (path, path / "plans"):
        folder.mkdir(parents=True, exist_ok=True)
    table = '[[group]]\nname = "{}"\ndevice = "cpu"\ncount = 1\nrole = "{}"\n{}\n'
    ladder = {Role.TRAIN: "", Role.INFER: 'ladder = ["int8", "bfloat16", "float32"]'}
    tables = [table.format(name, ROLES[name], ladder[ROLES[name]]) for name in groups]
    run.cluster.write_text("\n".join(tables))
    for size in range(1, len(groups) + 1):
        for present in itertools.combinations(groups, size):
            if set(present) != {"infer", "spare"}:
                save(plan_for(present, batches=batches), run.plan(present))
    return run


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4))

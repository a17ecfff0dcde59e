"""What plans do on GPUs, replayed from profiles that come with the package: for machines where no lower precision saves time.

Nothing is measured here.  The profiles were measured on an NVIDIA H200: of the whole one, and of half of its multiprocessors, what
a T4 is beside a V100.  The plans are made and their steps predicted as ``qsync plan`` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import resources

import attrs

from qsync_core.artifacts.files import from_bytes
from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_torch.demo.planning import infer_variants

FOLDER = "h200_resnet50"
_SOLVERS = {"full": "full", "uniform": "uniform", "qsync": "auto"}


@attrs.frozen
class StoredRow:
    """One method: predicted iteration time, the weak GPUs' operators by precision, their predicted peak memory, Σ Ω."""

    name: str
    predicted_ns: int
    operators: Mapping[str, int]
    peak_bytes: int
    objective: float


@attrs.frozen
class Stored:
    """What was replayed: the job and the cluster in words, and a row for each method."""

    what: str
    rows: tuple[StoredRow, ...]

    def row(self, name: str) -> StoredRow:
        """The row of a method."""
        return next(row for row in self.rows if row.name == name)


def replay_stored() -> Stored | None:
    """Plan for the stored profiles; None where the package was installed without them."""
    folder = resources.files("qsync_torch.demo").joinpath(FOLDER)
    if not folder.is_dir():
        return None

    cluster = parse_cluster(folder.joinpath("cluster.toml").read_text("utf-8"), "the stored cluster")
    dag = from_bytes(folder.joinpath("dag.qsync").read_bytes(), PrecisionDag)
    sensitivity = from_bytes(folder.joinpath("sensitivity.qsync").read_bytes(), Sensitivity)
    profiles = {g.name: from_bytes(folder.joinpath(f"profile.{g.name}.qsync").read_bytes(), Profile) for g in cluster.groups}
    rows, inputs = [], Inputs(dag, cluster, profiles, sensitivity)
    for name, solver in _SOLVERS.items():
        plan = allocate(inputs, Request(solver))
        operators = Counter(str(variant.compute) for variant in infer_variants(plan).values())
        peak = plan.group("infer").predicted_peak_bytes
        rows.append(StoredRow(name, plan.predicted_iteration_ns, operators, peak, plan.objective))
    of = profiles["infer"].device
    groups = " and ".join(f"{g.count} × {g.device}" + (f" at {g.share:.0%}" if g.share < 1 else "") for g in cluster.groups)
    return Stored(f"{dag.model}, batch {dag.batch_size}, on {groups} (profiles of an {of.name})", tuple(rows))

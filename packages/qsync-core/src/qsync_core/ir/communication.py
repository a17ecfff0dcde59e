"""How a job communicates: what DistributedDataParallel and NCCL are told, what that costs, and what a plan chose.

See docs/design/simulator.md#communication.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.ir import checks
from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_core.ir.profile import CollectiveModel, DeviceType

_MEBIBYTE = 1024 * 1024
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_CTAS = 64
"""More than any NCCL collective takes."""
MOST_BUCKET_MB = 1_000_000.0


@attrs.frozen
class CommunicationSettings:
    """What DistributedDataParallel and its process group are told about gradients.  The defaults are PyTorch's own.

    Attributes:
        bucket_cap_mb: DistributedDataParallel's argument, in MiB; None: the buckets that the graph was traced with.
        max_ctas: most CTAs (each on an SM of its own) of an NCCL collective; 0: NCCL's own choice.
        broadcast_buffers: whether every forward begins with a broadcast of the buffers (BatchNorm's statistics) from rank 0.
        gradient_as_bucket_view: gradients live in the buckets, so that none is there twice and nothing is copied back.
        static_graph: the same parameters get a gradient in every step.
    """

    bucket_cap_mb: float | None = attrs.field(default=None, converter=attrs.converters.optional(float))
    max_ctas: int = attrs.field(default=0, validator=checks.non_negative_int)
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def __attrs_post_init__(self) -> None:
        if self.max_ctas > MOST_CTAS:
            raise ValueError(f"max_ctas must be at most {MOST_CTAS}, got {self.max_ctas}")
        if self.bucket_cap_mb is not None and not 0 < self.bucket_cap_mb <= MOST_BUCKET_MB:
            raise ValueError(f"bucket_cap_mb must be above 0 and at most {MOST_BUCKET_MB:g} MiB, got {self.bucket_cap_mb!r}")

    @property
    def label(self) -> str:
        """A few words for people: what differs from PyTorch's defaults."""
        words = []
        if self.bucket_cap_mb is not None:
            words.append(f"buckets of {self.bucket_cap_mb:g} MiB")
        if self.max_ctas:
            words.append(f"{self.max_ctas} NCCL CTAs")
        if not self.broadcast_buffers:
            words.append("no broadcast of buffers")
        if self.gradient_as_bucket_view:
            words.append("gradients in the buckets")
        if self.static_graph:
            words.append("static graph")
        return ", ".join(words) or "PyTorch's defaults"


PYTORCH_DEFAULTS = CommunicationSettings()


@attrs.frozen
class MeasuredCollectives:
    """All-reduces of the whole job under one number of CTAs.

    Attributes:
        max_ctas: as in :class:`CommunicationSettings`.
        all_reduce: their cost over all ranks of the job.
        slowdown: per group c, the share of its compute that a rank loses while one of its collectives is open: with it, work that
            takes t alone takes t / (1 - c).
        transfer_share: per group, the share of a collective's duration by which it lengthens a rank's compute while it transfers,
            beyond what an open one does; empty where it was not measured.
    """

    max_ctas: int = attrs.field(validator=checks.non_negative_int)
    all_reduce: CollectiveModel
    slowdown: Mapping[str, float] = attrs.field(validator=checks.each(checks.share))
    transfer_share: Mapping[str, float] = attrs.field(factory=dict, validator=checks.each(checks.share))

    def __attrs_post_init__(self) -> None:
        if whole := sorted(name for name, c in self.slowdown.items() if c >= 1):
            raise ValueError(f"group {whole[0]!r} would never compute: its slowdown must be below 1, got {self.slowdown[whole[0]]}")


@attrs.frozen
class CollectiveCosts:
    """What communication costs a job, measured over all of its ranks together (docs/design/simulator.md#communication).

    Attributes:
        model, dag_digest: the graph whose bucket sizes were measured.
        ranks: per group of the job, how many ranks took part.
        devices: per group the device type.
        software: per group the versions and settings of the processes (:mod:`qsync_core.settings`).
        measured: one entry per number of CTAs that was tried.
        copy_ns_per_byte: per group, device time that copies between gradients and buckets take for each byte of gradients; half of
            it with ``gradient_as_bucket_view``.
        broadcast_ns: one broadcast of the model's buffers once every rank is there; 0 for a model without buffers.
    """

    model: str
    dag_digest: str
    ranks: Mapping[str, int] = attrs.field(validator=checks.each(checks.positive_int))
    devices: Mapping[str, DeviceType]
    software: Mapping[str, Mapping[str, str]]
    measured: tuple[MeasuredCollectives, ...]
    copy_ns_per_byte: Mapping[str, float] = attrs.field(validator=checks.each(checks.measured_rate))
    broadcast_ns: int = attrs.field(default=0, validator=checks.measured_int)

    def __attrs_post_init__(self) -> None:
        if not self.measured:
            raise ValueError("nothing was measured: collective costs have an entry for at least one number of CTAs")
        if (twice := checks.first_repeated(entry.max_ctas for entry in self.measured)) is not None:
            raise ValueError(f"all-reduces with {twice} CTAs stand in the collective costs twice")
        for what, names in (
            ("devices", self.devices),
            ("software", self.software),
            ("copy_ns_per_byte", self.copy_ns_per_byte),
            *((f"the slowdown with {entry.max_ctas} CTAs", entry.slowdown) for entry in self.measured),
            *((f"the transfer share with {entry.max_ctas} CTAs", entry.transfer_share or self.ranks) for entry in self.measured),
        ):
            if differing := sorted(set(names) ^ set(self.ranks)):
                raise ValueError(f"{what} and ranks name different groups: {differing[0]!r} is in one of them only")

    def under(self, max_ctas: int) -> MeasuredCollectives:
        """What was measured under a number of CTAs.

        Raises:
            KeyError: when it was not measured.
        """
        return {entry.max_ctas: entry for entry in self.measured}[max_ctas]


@attrs.frozen
class CommunicationChoice:
    """One way to communicate and the job's predicted period under it, in nanoseconds."""

    settings: CommunicationSettings
    iteration_ns: int = attrs.field(validator=checks.measured_int)


@attrs.frozen
class PlannedCommunication:
    """How a plan wants its job to communicate, and why.

    Attributes:
        settings: what to tell DistributedDataParallel and NCCL.
        reason: a sentence for people.
        alternatives: the plan under every way that was considered, the chosen one included, fastest first.
    """

    settings: CommunicationSettings
    reason: str
    alternatives: tuple[CommunicationChoice, ...] = ()


def buckets_under(dag: PrecisionDag, bucket_cap_mb: float | None) -> tuple[Bucket, ...]:
    """The gradient buckets of a model under another cap, as DistributedDataParallel forms them after its first iteration.

    Gradients are packed in the order in which they become ready, as in the graph's own buckets; a bucket is closed once it holds at
    least the cap (``compute_bucket_assignment_by_size`` of PyTorch's reducer).

    Args:
        dag: the graph; its buckets must hold every trainable parameter.
        bucket_cap_mb: in MiB; None: the graph's own buckets.

    Raises:
        ValueError: for a graph some of whose parameters get no gradient: its buckets are packed in another order.
    """
    if bucket_cap_mb is None:
        return dag.buckets
    by_name = {parameter.fqn: parameter for parameter in dag.parameters if parameter.requires_grad}
    order = [name for bucket in dag.buckets for name in bucket.parameters]
    if set(order) != set(by_name) or any(by_name[name].dtype not in _ELEMENT_BYTES for name in order):
        raise ValueError("buckets of another size need a graph all of whose trainable parameters are floats in its buckets")
    limit = int(bucket_cap_mb * _MEBIBYTE)
    buckets: list[Bucket] = []
    open_names: dict[str, list[str]] = {}
    open_bytes: dict[str, int] = {}
    for name in order:
        parameter = by_name[name]
        names = open_names.setdefault(parameter.dtype, [])
        names.append(name)
        open_bytes[parameter.dtype] = open_bytes.get(parameter.dtype, 0) + parameter.numel * _ELEMENT_BYTES[parameter.dtype]
        if open_bytes[parameter.dtype] >= limit:
            buckets.append(Bucket(tuple(open_names.pop(parameter.dtype)), open_bytes.pop(parameter.dtype)))
    buckets += [Bucket(tuple(names), open_bytes[dtype]) for dtype, names in open_names.items()]
    return tuple(buckets)

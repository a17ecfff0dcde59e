"""The Cluster: groups of devices and the links between them, as a person describes them in TOML.

Example::

    name = "night shift"

    [[group]]
    name = "train"
    device = "V100"
    count = 2
    role = "train"
    base = "float32"

    [[group]]
    name = "infer"
    device = "T4"
    count = 2
    role = "infer"
    ladder = ["int8", "float16", "float32"]
    memory = "15 GiB"

    [[link]]
    between = ["train", "infer"]
    latency_us = 20
    bandwidth_gbps = 32
"""

from __future__ import annotations

from functools import cached_property

import attrs

from qsync_core.ir import checks
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant


@attrs.frozen
class DeviceGroup:
    """Identical devices of a job.

    Attributes:
        name: how plans and ``QSYNC_GROUP`` call it.
        device: name of the device type: matched against ``DeviceType.name`` of a profile; known names (``T4``, ``V100``, ``A10``,
            ``L4``, ``A100``, ``H100``, ``H200``) also tell which precisions the chip really has.
        base: precision of everything a plan does not lower.
        ladder: variants a plan may use, lowest first, ending with the base precision's.
        memory_bytes: budget of one rank, 0 for no limit.
        share: share of each device that the job gets.
        sync_per_step: the training loop synchronises every step (``.item()``, a GradScaler).
    """

    name: str
    device: str
    count: int = attrs.field(validator=checks.positive_int)
    role: Role
    base: Precision
    ladder: tuple[Variant, ...]
    memory_bytes: int = attrs.field(default=0, validator=checks.non_negative_int)
    share: float = attrs.field(default=1.0, validator=checks.fraction)
    sync_per_step: bool = False

    def __attrs_post_init__(self) -> None:
        if twice := checks.first_repeated(self.ladder):
            raise ValueError(f"the ladder of group {self.name!r} has {twice.label} twice")


@attrs.frozen
class Link:
    """A connection between two groups (or inside one): latency in nanoseconds, inverse bandwidth in nanoseconds per byte."""

    between: tuple[str, str]
    alpha_ns: float = attrs.field(validator=checks.finite)
    beta_ns_per_byte: float = attrs.field(validator=checks.finite)


@attrs.frozen
class Cluster:
    """Device groups and links.  ``read_cluster`` (module :mod:`qsync_core.cluster_file`) makes one from TOML."""

    name: str
    groups: tuple[DeviceGroup, ...]
    links: tuple[Link, ...] = ()

    def __attrs_post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if twice := checks.first_repeated(names):
            raise ValueError(f"two groups are called {twice!r}; give each its own name")
        if ends := checks.first_repeated(frozenset(link.between) for link in self.links):
            raise ValueError(f"two links connect the groups {sorted(ends)}; keep one")
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise ValueError(f"a link ends at {end!r}, but the groups are {names}")

    def group(self, name: str) -> DeviceGroup:
        """The group of that name.

        Raises:
            KeyError: when there is none.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, DeviceGroup]:
        return {group.name: group for group in self.groups}

"""The cluster file that ``qsync prepare`` writes, and how one that a person has changed is told from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import attrs

from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.cluster import DeviceGroup, Link
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant

_HEAD = "# Written by 'qsync prepare'.  Correct what is wrong, and run it again: it keeps your file, and plans anew.\n"
_SEAL = "# As written: "


def cluster_text(name: str, groups: Sequence[DeviceGroup], links: Iterable[Link]) -> str:
    """A cluster file, with a seal by which a change is seen."""
    parts = [f"name = {json.dumps(name)}\n"]
    for group in groups:
        parts.append(
            f"\n[[group]]\nname = {json.dumps(group.name)}\ndevice = {json.dumps(group.device)}\ncount = {group.count}\n"
            f'role = "{group.role}"\n'
        )
        if group.role is Role.INFER:
            parts.append(f"ladder = {json.dumps(rung_texts(group))}\n")
        if group.share < 1:
            parts.append(f"share = {group.share:g}\n")
        if group.memory_bytes:
            parts.append(f'memory = "{group.memory_bytes} B"\n')
    for link in links:
        parts.append(
            f"\n[[link]]  # from measured all-reduces; counts where those of just these groups were not measured\n"
            f"between = {json.dumps(list(link.between))}\nlatency_us = {link.alpha_ns / 1e3:.3g}\n"
            f"bandwidth_gbps = {8 / link.beta_ns_per_byte:.4g}\n"
        )
    body = "".join(parts)
    return f"{_HEAD}{_SEAL}{_sum_of(body)}\n\n{body}"


def is_changed(text: str) -> bool:
    """Whether a person has written or changed a cluster file."""
    head, _, body = text.partition("\n\n")
    _, seal, written = head.rpartition(_SEAL)
    return not seal or written != _sum_of(body)


def rung_texts(group: DeviceGroup) -> list[str]:
    """A ladder as a cluster file has it: precisions by name where that means the same on the group's device."""
    return [rung.label if _means(rung, group.device) else str(rung) for rung in group.ladder]


def _means(rung: Variant, device: str) -> bool:
    """Whether a cluster file's reader takes a rung's name for the same variant."""
    if rung == Variant.plain(Precision.FLOAT32):
        return True
    entry = f'[[group]]\nname = "a"\ndevice = {json.dumps(device)}\ncount = 1\nrole = "infer"\n'
    read = parse_cluster(f'{entry}ladder = ["{rung.label}", "float32"]\n').group("a")
    return read.ladder[0] == rung


def _sum_of(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def with_links(groups: Sequence[DeviceGroup], alpha_ns: float, beta_ns_per_byte: float) -> tuple[Link, ...]:
    """A link of one hop between each pair of groups."""
    hop = Link(("", ""), max(0.0, alpha_ns), beta_ns_per_byte)
    names = [group.name for group in groups]
    return tuple(attrs.evolve(hop, between=(one, other)) for place, one in enumerate(names) for other in names[place + 1 :])

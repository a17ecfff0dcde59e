"""What to try when ranks do not reach each other, chosen by what is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qsync_core.units import format_bytes
from qsync_torch.doctor.rank_facts import RankFacts

_ENOUGH_SHARED_MEMORY = 1 << 30
"""NCCL takes some megabytes per pair of ranks and channel; Docker gives a container 64 MiB unless it is told otherwise."""


def what_to_try(facts: Mapping[int, RankFacts], backend: str) -> list[str]:
    """Settings to start the job with, most likely first; those that are set already on all ranks are left out."""
    ranks = list(facts.values())
    if not ranks:
        return []
    hosts = {found.host for found in ranks}
    several_hosts, together = len(hosts) > 1, len(hosts) < len(ranks)
    advice: list[tuple[str, str]] = []
    if several_hosts:
        advice += _between_hosts(ranks, backend)
    if backend == "nccl":
        if together:
            advice.append(
                (
                    "NCCL_P2P_DISABLE=1",
                    "if it helps, direct access between the GPUs of a machine is at fault (PCIe ACS, IOMMU, a VM)",
                )
            )
            advice += _shared_memory(ranks)
        if several_hosts and any(found.infiniband for found in ranks):
            devices = ", ".join(dict.fromkeys(name for found in ranks for name in found.infiniband))
            advice.append(
                ("NCCL_IB_DISABLE=1", f"if it helps, InfiniBand or RoCE is at fault ({devices}; see ibstat, and NCCL_IB_HCA)")
            )
        advice.append(("NCCL_DEBUG=INFO", "to see which way NCCL takes between which ranks"))
    return [f"{setting}: {why}" for setting, why in advice if not all(_is_set(found, setting) for found in ranks)]


def _is_set(found: RankFacts, setting: str) -> bool:
    name, _, value = setting.partition("=")
    return found.settings.get(name) == value or (name.endswith("_IFNAME") and name in found.settings)


def _between_hosts(ranks: Collection[RankFacts], backend: str) -> list[tuple[str, str]]:
    name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    if backend == "gloo" and (misled := [found.host for found in ranks if found.loopback_name]):
        own = next(iter(_common_interfaces(ranks)), "eth0")
        return [(f"{name}={own}", f"on {', '.join(dict.fromkeys(misled))} the machine's own name leads to its loopback address")]
    if any(len(found.interfaces) > 1 for found in ranks):
        common = _common_interfaces(ranks)
        where = f"{', '.join(common)} are up on all machines" if common else "no interface has the same name on all machines"
        first = common[0] if common else "NAME"
        return [(f"{name}={first}", f"name the interface on which the machines reach each other ({where})")]
    return []


def _common_interfaces(ranks: Collection[RankFacts]) -> list[str]:
    first, *others = ranks
    return [name for name in first.interfaces if all(name in other.interfaces for other in others)]


def _shared_memory(ranks: Collection[RankFacts]) -> list[tuple[str, str]]:
    small = [found for found in ranks if found.shared_memory_bytes < _ENOUGH_SHARED_MEMORY]
    if not small:
        return []
    size = format_bytes(min(found.shared_memory_bytes for found in small))
    larger = (
        "start the container with --shm-size=8g, or mount an emptyDir with medium Memory there"
        if small[0].container
        else "enlarge it"
    )
    return [("NCCL_SHM_DISABLE=1", f"if it helps, /dev/shm is too small ({size} on {small[0].host}): {larger}")]

"""What one rank of a job says of itself: where it runs, on what, with which versions, and what may stand between it and others."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.registry import Registry
from qsync_torch.devices import driver_version
from qsync_torch.distributed.ranks import GROUP_VARIABLE, SHARE_VARIABLE
from qsync_torch.sharing.mps import find_daemon

_NETWORKS, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_SHARED_MEMORY = "/dev/shm"
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES")


@attrs.frozen
class RankFacts:
    """What a rank says of itself.

    Attributes:
        host, group: the machine's name; what ``QSYNC_GROUP`` says.
        device: as profiles name it; a CPU by its maker's name.
        gpu: what tells one GPU from all others; empty on a CPU.
        capability: compute capability; empty on a CPU.
        arch_list: chips that this torch has kernels for.
        versions: by name (``torch``, ``cuda``, ``nccl``, ``driver``, ``python``); absent where there is none.
        cores: CPU cores that the process may use.
        share: percentage of the SMs that MPS is asked for; empty where it is not asked.
        mps: why MPS gives no share; empty where its daemon answers.
        shared_memory_bytes: size of /dev/shm.
        container: whether this looks like a container.
        infiniband, interfaces: devices, and network interfaces that are up, without the loopback.
        loopback_name: this machine's own name leads to its loopback address, which other machines cannot reach.
        settings: environment variables of NCCL, gloo and CUDA that are set.
        problems: warnings and errors of ``qsync doctor`` on this machine.
    """

    rank: int
    host: str
    group: str
    device: str
    gpu: str
    capability: Sequence[int]
    arch_list: Sequence[str]
    versions: Mapping[str, str]
    cores: int
    memory_free_bytes: int
    memory_bytes: int
    share: str
    mps: str
    shared_memory_bytes: int
    container: bool
    infiniband: Sequence[str]
    interfaces: Sequence[str]
    loopback_name: bool
    settings: Mapping[str, str]
    problems: Sequence[DoctorLine]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RankFacts:
        """What :meth:`data` gave, after JSON."""
        return cls(**{**data, "problems": [DoctorLine(**line) for line in data["problems"]]})

    @property
    def on_gpu(self) -> bool:
        """Whether its device is a GPU."""
        return bool(self.gpu)

    @property
    def kind(self) -> tuple[str, str]:
        """Ranks of one kind should be equally fast: the device, and the share of it."""
        return self.device, self.share

    def data(self) -> dict[str, Any]:
        """Return the facts as JSON has them."""
        return attrs.asdict(self)


def own_device() -> torch.device:
    """The device that this rank trains on: the GPU of its number on its machine, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def find_facts(rank: int) -> RankFacts:
    """What this process can say of itself; starts CUDA."""
    device = own_device()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    name, gpu = _processor(), ""
    capability: Sequence[int] = ()
    free, total = _main_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        name, gpu, capability = properties.name, str(properties.uuid), (properties.major, properties.minor)
        free, total = torch.cuda.mem_get_info(device)
        versions["driver"] = driver_version()
        if dist.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        group=os.environ.get(GROUP_VARIABLE, ""),
        device=name,
        gpu=gpu,
        capability=capability,
        arch_list=torch.cuda.get_arch_list() if device.type == "cuda" else [],
        versions=versions,
        cores=len(os.sched_getaffinity(0)),
        memory_free_bytes=free,
        memory_bytes=total,
        share=os.environ.get(SHARE_VARIABLE, ""),
        mps=find_daemon().problem if device.type == "cuda" else "",
        shared_memory_bytes=shutil.disk_usage(_SHARED_MEMORY).total if os.path.isdir(_SHARED_MEMORY) else 0,
        container="KUBERNETES_SERVICE_HOST" in os.environ or any(mark.exists() for mark in _CONTAINER_MARKS),
        infiniband=sorted(path.name for path in _INFINIBAND.glob("*")),
        interfaces=[name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)],
        loopback_name=_loopback_name(),
        settings={name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        problems=[line for line in Registry.load().machine_lines() if line.status in (Status.WARNING, Status.ERROR)],
    )


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _main_memory() -> tuple[int, int]:
    """Free and total bytes; 0 where the system does not tell."""
    found = {}
    with suppress(OSError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("MemAvailable", "MemTotal"):
                found[name] = int(value.split()[0]) * 1024
    return found.get("MemAvailable", 0), found.get("MemTotal", 0)


def _is_up(interface: str) -> bool:
    with suppress(OSError):
        return (_NETWORKS / interface / "operstate").read_text().strip() != "down"
    return True


def _loopback_name() -> bool:
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    return False

"""What ``qsync doctor`` says about torch, devices, precisions, collectives, compilers, collectors; and whether all ranks agree."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_core.plugins.doctor import DoctorLine, Status, problem_lines
from qsync_torch.devices import driver_version
from qsync_torch.distributed.exchange import Exchange, Members, Report, by_value
from qsync_torch.distributed.ranks import SHARE_VARIABLE
from qsync_torch.observing.collectors import installed_collectors
from qsync_torch.sharing.mps import CONTROL, START, Daemon, find_daemon, pipe_directory

_RENDEZVOUS = timedelta(seconds=30)
"""How long to wait for the other ranks."""


def doctor_lines() -> list[DoctorLine]:
    """All findings; under torchrun with a comparison of the ranks."""
    lines = [DoctorLine("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"), *_cpu_lines(), *_cuda_lines()]
    lines += [
        *mps_lines(find_daemon()),
        *_allocator_lines(),
        *_collective_lines(),
        *_compiler_lines(),
        *problem_lines("collectors", installed_collectors),
    ]
    return lines + _agreement_lines(lines)


def _cpu_lines() -> list[DoctorLine]:
    has = [name for name, flags in _CPU_FEATURES.items() if flags & _cpu_flags()]
    found = f"{platform.machine()}, {os.cpu_count()} cores, kernels for {torch.backends.cpu.get_cpu_capability()}"
    lines = [DoctorLine("cpu", found)]
    for precision in _CPU_FEATURES:
        if precision in has:
            lines.append(DoctorLine(f"cpu {precision}", "products in hardware"))
        else:
            lines.append(DoctorLine(f"cpu {precision}", "products emulated: no faster than float32, often slower", Status.INFO))
    return lines


_CPU_FEATURES = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "fphp"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "asimddp"},
}
"""CPU flags (x86 and ARM, as Linux names them) that mean products of a format in hardware."""


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def _cuda_lines() -> list[DoctorLine]:
    if not torch.backends.cuda.is_built():
        return [DoctorLine("cuda", "this torch is built without CUDA", Status.INFO)]
    if not torch.cuda.is_available():
        return [
            DoctorLine(
                "cuda",
                f"torch is built for CUDA {torch.version.cuda}, but sees no device",
                Status.WARNING,
                "see that a driver is installed and that CUDA_VISIBLE_DEVICES does not hide the devices",
            )
        ]
    lines = [DoctorLine("cuda", f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, driver {driver_version()}")]
    for index in range(torch.cuda.device_count()):
        try:
            lines += _device_lines(index)
        except RuntimeError as error:  # also AcceleratorError: busy or unavailable
            advice = "another process has it to itself, or an MPS server has failed: see the lines on mps below; wait some seconds"
            lines.append(DoctorLine(f"cuda:{index}", str(error).partition("\n")[0], Status.ERROR, advice))
    return lines


def _device_lines(index: int) -> list[DoctorLine]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    lines = [DoctorLine(f"cuda:{index}", f"{properties.name}, {memory}, compute capability {capability[0]}.{capability[1]}")]
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        lines.append(
            DoctorLine(
                f"cuda:{index} kernels",
                f"this torch ({torch.__version__}) has none for sm_{capability[0]}{capability[1]}",
                Status.ERROR,
                "install another build of torch; that for CUDA 12.6 has sm_50 to sm_90: "
                "pip install torch --index-url https://download.pytorch.org/whl/cu126",
            )
        )
    for precision, needed in (("int8", (7, 5)), ("bfloat16", (8, 0)), ("float8_e4m3fn", (8, 9))):
        if capability >= needed:
            lines.append(DoctorLine(f"cuda:{index} {precision}", "tensor cores"))
            continue
        advice = "leave it out of this group's ladder" + (", and use float16 instead" if precision == "bfloat16" else "")
        lines.append(
            DoctorLine(
                f"cuda:{index} {precision}",
                f"not in hardware (needs compute capability {needed[0]}.{needed[1]}); an emulation is not support",
                Status.INFO,
                advice,
            )
        )
    return lines


def mps_lines(daemon: Daemon) -> list[DoctorLine]:
    """Whether processes that start here can get a share of a GPU, and whether this one asks for it; nothing without CUDA."""
    if not torch.backends.cuda.is_built():
        return []
    asked = os.environ.get(SHARE_VARIABLE, "")
    mine = f"; {SHARE_VARIABLE} is {asked}" if asked else ""
    if daemon.problem:
        status = Status.WARNING if asked else Status.INFO
        start = START if shutil.which(CONTROL) else f"{CONTROL} is not in PATH; it comes with NVIDIA's driver (docs/shared-gpus.md)"
        return [DoctorLine("mps", daemon.problem + mine, status, f"a group with a share below 1 needs one: {start}")]
    servers = ", ".join(f"{number} {status}".strip() for number, status in daemon.servers.items())
    found = f"a daemon answers at {pipe_directory()}, {f'servers {servers}' if servers else 'no server yet'}{mine}"
    lines = [DoctorLine("mps", found)]
    if any("FAULT" in status for status in daemon.servers.values()):
        advice = (
            "until it has gone, new processes are told that the device is busy or unavailable: wait some seconds; if it stays, end "
            f"its clients, then 'echo quit | {CONTROL}', and {START}"
        )
        lines.append(DoctorLine("mps server", "a client died of an error and took the server with it", Status.WARNING, advice))
    return lines


def _allocator_lines() -> list[DoctorLine]:
    if not torch.backends.cuda.is_built():
        return []
    said = {name: os.environ[name] for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if os.environ.get(name)}
    found = ", ".join(f"{name}={value}" for name, value in said.items()) or "PyTorch's defaults"
    return [DoctorLine("cuda allocator", found, Status.INFO)]


def has_kernels(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Whether a torch built for ``arch_list`` (``sm_75``, ``compute_120``) runs on a device of that compute capability.

    Machine code runs on its own major version from its minor version on, PTX (``compute_``) on everything later.
    """
    for arch in arch_list:
        kind, _, digits = arch.rstrip("af").partition("_")
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return not arch_list


def _collective_lines() -> list[DoctorLine]:
    if not dist.is_available():
        return [DoctorLine("collectives", "this torch is built without torch.distributed", Status.ERROR, "install another build")]
    lines = [DoctorLine("gloo", "available" if dist.is_gloo_available() else "not in this build", Status.INFO)]
    if dist.is_nccl_available() and torch.cuda.is_available():
        lines.append(DoctorLine("nccl", ".".join(map(str, torch.cuda.nccl.version()))))
    return lines


def _compiler_lines() -> list[DoctorLine]:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler:
        return [DoctorLine("c++ compiler", compiler)]
    return [DoctorLine("c++ compiler", "none found", Status.INFO, "torch.compile on a CPU needs one")]


def _agreement_lines(lines: list[DoctorLine]) -> list[DoctorLine]:
    """Whether all ranks of a torchrun found the same versions; nothing outside torchrun."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or "RANK" not in os.environ or not dist.is_available() or dist.is_initialized():
        return []
    from importlib.metadata import version

    mine = {line.topic: line.finding for line in lines if line.topic in ("cuda", "nccl")}
    mine |= {"torch": torch.__version__.split("+")[0], "qsync-torch": version("qsync-torch"), "qsync-core": version("qsync-core")}
    try:
        dist.init_process_group("gloo", timeout=_RENDEZVOUS)
    except (RuntimeError, ValueError) as error:
        return [
            DoctorLine(
                "ranks", f"the {world} ranks do not find each other: {error}", Status.ERROR, "see MASTER_ADDR and MASTER_PORT"
            )
        ]
    try:
        members = Members.of_group(None)
        assert members is not None
        exchange = Exchange(members, "qsync doctor", _RENDEZVOUS.total_seconds())
        exchange.say(Report("qsync doctor", mine))
        everyone = list(exchange.hear().values())
    except (RankError, dist.DistError) as error:
        return [DoctorLine("ranks", str(error), Status.ERROR, "see what the other ranks printed")]
    finally:
        dist.destroy_process_group()
    return compare_ranks([report.facts for report in everyone])


def compare_ranks(everyone: Sequence[Mapping[str, str]]) -> list[DoctorLine]:
    """One line that all ranks agree, or one per fact in which they do not."""
    lines = []
    for topic in sorted({topic for facts in everyone for topic in facts}):
        found = {rank: facts.get(topic, "nothing") for rank, facts in enumerate(everyone)}
        if len(set(found.values())) > 1:
            # Unequal GPUs are what QSync is for; unequal software is not.
            status = Status.WARNING if topic == "cuda" else Status.ERROR
            lines.append(DoctorLine(f"ranks: {topic}", by_value(found), status, "install the same versions everywhere"))
    return lines or [DoctorLine("ranks", f"all {len(everyone)} ranks have the same versions")]

"""What ``qsync doctor`` says about torch, devices, precisions, collectives, compilers and collectors of this machine."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence

import torch
import torch.distributed as dist

from qsync_core.plugins.doctor import DoctorLine, Status, problem_lines
from qsync_torch.devices import driver_version
from qsync_torch.distributed.ranks import SHARE_VARIABLE
from qsync_torch.doctor.products import product_lines
from qsync_torch.observing.collectors import installed_collectors
from qsync_torch.sharing.mps import CONTROL, START, Daemon, find_daemon, pipe_directory


def doctor_lines() -> list[DoctorLine]:
    """All findings."""
    lines = [DoctorLine("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"), *_cpu_lines(), *_cuda_lines()]
    daemon = find_daemon()
    return [
        *lines,
        *mps_lines(daemon),
        *product_lines(daemon),
        *_allocator_lines(),
        *_collective_lines(),
        *_compiler_lines(),
        *problem_lines("collectors", installed_collectors),
    ]


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
                f"install another build of torch; {wheel_advice([capability])}",
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


_WHEELS = (("12.6", (5, 0), (9, 0)), ("13.0", (7, 5), (12, 0)))
"""PyTorch's wheels by CUDA version, with the oldest and the newest chips that they have machine code for."""


def wheel_advice(capabilities: Sequence[tuple[int, int]]) -> str:
    """Which of PyTorch's wheels runs on devices of all these compute capabilities, as a part of a sentence."""
    for cuda, first, last in _WHEELS:
        if all(first <= capability <= (last[0], 9) for capability in capabilities):
            digits = cuda.replace(".", "")
            return (
                f"that for CUDA {cuda} has {_sm(first)} to {_sm(last)}: pip install torch --index-url "
                f"https://download.pytorch.org/whl/cu{digits}"
            )
    wanted = ";".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))
    return f"no wheel of PyTorch has all of these, so build it with TORCH_CUDA_ARCH_LIST='{wanted}'"


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


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

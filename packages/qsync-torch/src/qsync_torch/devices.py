"""Devices: the one that a person names, what kernels and profiles depend on of it, and the software that runs on it."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib.metadata import version
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from qsync_core.devices import find_chip
from qsync_core.errors import QSyncError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import ALL, Variant
from qsync_core.plugins.hooks import DeviceFacts

if TYPE_CHECKING:
    from qsync_core.ir.dag import PrecisionDag


def parse_device(named: str | torch.device) -> torch.device:
    """The device that a person or a script names; ``auto`` is the current CUDA device where there is one, else the CPU.

    Raises:
        QSyncError: when this machine does not have it.
    """
    text = str(named)
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise QSyncError(f"not a device: {text!r}; write auto, cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise QSyncError(f"QSync measures cpu and cuda devices, got {text!r}")
    if not torch.cuda.is_available():
        raise QSyncError(f"{text} was asked for, but torch sees no CUDA device here; use --device cpu, or see 'qsync doctor'")
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise QSyncError(f"{text} was asked for, but this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def device_type(device: torch.device, share: float = 1.0, memory_cap_bytes: int = 0) -> DeviceType:
    """The device type that a profile of ``device`` is for."""
    if device.type == "cpu":
        return DeviceType("cpu", DeviceKind.CPU, share, memory_cap_bytes)
    return DeviceType(torch.cuda.get_device_name(device), DeviceKind.CUDA, share, memory_cap_bytes, compute_capability(device))


@functools.lru_cache(maxsize=16)
def compute_capability(device: torch.device) -> str:
    """``9.0`` and so on; empty on a CPU."""
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""


def gpu_and_sms(device: torch.device) -> str:
    """Which GPU this is, and how many of its streaming multiprocessors this process may use; empty of a CPU."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_properties(device)
    return f"{found.uuid}, {found.multi_processor_count} SMs"


def device_facts(device: torch.device) -> tuple[str, str]:
    """Kind and compute capability, as requests for kernels say them."""
    return device.type, compute_capability(device)


def describe_device(device: torch.device) -> DeviceFacts:
    """What kernels and their tuning records depend on of a device."""
    found = device_type(device)
    return DeviceFacts(device.type, found.name, found.compute_capability, tuning_software(device))


def tuning_software(device: torch.device) -> dict[str, str]:
    """Versions that decide which configuration is fastest; whatever else :func:`software_versions` records does not."""
    if device.type == "cpu":
        return {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
    return {"torch": str(torch.__version__), "cuda": torch.version.cuda or ""}


def software_versions(device: torch.device) -> dict[str, str]:
    """Versions and settings of this process that change what is measured (:data:`qsync_core.settings.SETTINGS`)."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "qsync-torch": version("qsync-torch")}
    versions["autocast"] = active_autocast(device)
    versions |= number_settings(device)
    versions["deterministic_algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    if device.type == "cpu":
        versions["threads"] = str(torch.get_num_threads())
        versions["machine"] = platform.machine()
        versions["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        return versions
    cudnn = torch.backends.cudnn
    versions["cuda"] = torch.version.cuda or ""
    versions["cudnn"] = str(cudnn.version())
    versions["driver"] = driver_version()
    versions["expandable_segments"] = str(has_expandable_segments())
    for name in ("benchmark", "deterministic", "enabled"):
        versions[f"cudnn_{name}"] = str(getattr(cudnn, name))
    return versions


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def has_expandable_segments() -> bool:
    """Whether PyTorch's CUDA allocator grows its segments instead of adding new ones.

    The segments that it has say so; where it has none yet, the environment is asked, from which it takes its settings.
    """
    if torch.cuda.is_initialized() and (segments := torch.cuda.memory_snapshot(include_traces=False)):
        return any(segment["is_expandable"] for segment in segments)
    settings = next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), "")
    entries = dict(entry.partition(":")[::2] for entry in settings.replace(" ", "").split(","))
    return entries.get("expandable_segments", "").lower() == "true"


def number_settings(device: torch.device) -> dict[str, str]:
    """Switches of PyTorch that change the numbers of products, as they are now: quick enough to be read in every step.

    The float32 precisions are read where PyTorch decides them, so that its older switches (``allow_tf32``) and its newer ones
    (``fp32_precision``) are seen alike.
    """
    if device.type == "cpu":
        return {"float32_matmul": {"tf32": "high", "bf16": "medium"}.get(_fp32_precision("mkldnn.matmul"), "highest")}
    matmul = torch.backends.cuda.matmul
    return {
        "float32_matmul": "high" if _fp32_precision("cuda.matmul") == "tf32" else "highest",
        "cudnn_tf32": str(_fp32_precision("cudnn.conv") == "tf32"),
        "cudnn_rnn_tf32": str(_fp32_precision("cudnn.rnn") == "tf32"),
        "matmul_fp16_reduced_precision_reduction": str(matmul.allow_fp16_reduced_precision_reduction),
        "matmul_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "matmul_fp16_accumulation": str(matmul.allow_fp16_accumulation),
    }


def active_autocast(device: torch.device) -> str:
    """The format of the autocast that this thread is under; ``off`` for none."""
    on = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if on else "off"


def job_software(model: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """:func:`software_versions`, with the device's name and the layout of the model's convolution weights."""
    layout = memory_format(model)
    return {**software_versions(device), "device": device_type(device).name, **({"memory_format": layout} if layout else {})}


def _fp32_precision(where: str) -> str:
    precision: str = attrgetter(f"{where}.fp32_precision")(torch.backends)
    return precision


@functools.lru_cache(maxsize=1)
def driver_version() -> str:
    """Return the version of NVIDIA's driver; ``unknown`` where nvidia-smi does not say."""
    return next(iter(nvidia_smi("gpu=driver_version")), "unknown")


def nvidia_smi(query: str) -> tuple[str, ...]:
    """Lines with which nvidia-smi answers a query such as ``gpu=name``, without units; none where it fails or is not there.

    It starts CUDA in no process.
    """
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.splitlines() if line.strip())


def memory_format(model: torch.nn.Module) -> str:
    """Layout of a model's convolution weights: ``contiguous``, ``channels_last`` or ``mixed``; empty where none shows it."""
    found = set()
    for parameter in model.parameters():
        if parameter.dim() in (4, 5):
            last = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
            by_format = {
                "contiguous": parameter.is_contiguous(),
                "channels_last": parameter.is_contiguous(memory_format=last),
            }
            if sum(by_format.values()) == 1:  # both where a kernel has one pixel or one channel
                found.add(next(name for name, holds in by_format.items() if holds))
    return "mixed" if len(found) > 1 else "".join(found)


def gradient_format(device: torch.device) -> Precision:
    """The 16-bit format for gradients of 8-bit operators: bfloat16 where the device has it in hardware, else float16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Precision.FLOAT16
    return Precision.BFLOAT16


def standard_ladder(device: torch.device, dag: PrecisionDag | None = None) -> tuple[Variant, ...]:
    """What is profiled where no ladder is named, lowest first: the chip's 8-bit and 16-bit formats that it has products for.

    Of an unknown chip and of a CPU these are int8 and the format of gradients: profiling measures whether they pay.  On GPUs, int8
    is there with an output in 16 bit and in float32, of which the plan chooses by who reads it, and for a graph whose base is
    16 bit with all three products in int8 (docs/decisions/int8-gradients.md).
    """
    sixteen_bit = gradient_format(device)
    chip = find_chip(device_type(device).name)
    rungs = chip.rungs if chip else (Precision.INT8, sixteen_bit, Precision.FLOAT32)
    int8 = int8_rungs(sixteen_bit, dag) if device.type == "cuda" else (Variant.of(Precision.INT8, sixteen_bit=sixteen_bit),)
    return (*(int8 if Precision.INT8 in rungs else ()), *(Variant.of(rung) for rung in rungs if not rung.needs_scale))


def int8_rungs(sixteen_bit: Precision, dag: PrecisionDag | None = None) -> tuple[Variant, ...]:
    """int8 with each output that a plan may choose, gradients in ``sixteen_bit``; of a graph that gains by it, first all three
    products in int8.
    """
    outputs = (sixteen_bit, Precision.FLOAT32)
    rungs = tuple(Variant.of(Precision.INT8, sixteen_bit=sixteen_bit, output=output) for output in outputs)
    if dag is None or not _gains_by_int8_gradients(dag):
        return rungs
    return (Variant.named(f"{Precision.INT8}{ALL}", sixteen_bit=sixteen_bit), *rungs)


def _gains_by_int8_gradients(dag: PrecisionDag) -> bool:
    """Whether its base is 16 bit, beside which int8 forward alone saves next to nothing, and most of its work products of rows:
    convolutions have no int8 product for the weight's gradient.
    """
    work = [(operator.flops, operator.row.of_rows) for operator in dag.adjustable]
    return dag.base.nbytes == 2 and 2 * sum(flops for flops, of_rows in work if of_rows) > sum(flops for flops, _ in work)


def any_chips_ladder(dag: PrecisionDag | None = None) -> tuple[Variant, ...]:
    """What is observed of a graph where no ladder is named: the standard ladders of all chips."""
    sixteen = (Precision.BFLOAT16, Precision.FLOAT16)
    return (*(rung for p in sixteen for rung in int8_rungs(p, dag)), *map(Variant.of, (*sixteen, Precision.FLOAT32)))

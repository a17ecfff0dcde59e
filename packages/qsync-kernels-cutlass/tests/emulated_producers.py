"""The producers' CUDA sources, compiled for the CPU by the system's compiler, with ``cuda_on_cpu/`` in place of CUDA's headers."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import attrs
import torch
from kernel_requests import every_producer

from qsync_core.errors import NumericsError
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op
from qsync_kernels_cutlass import support
from qsync_kernels_cutlass.architectures import SM_75
from qsync_kernels_cutlass.backend import CutlassBackend
from qsync_kernels_cutlass.compiling import compile
from qsync_kernels_cutlass.kernels import producers
from qsync_kernels_cutlass.sources import KernelSource, producer_source

COMPILER = shutil.which("g++") or shutil.which("c++")
FOLDER = "QSYNC_EMULATED_PRODUCERS"
"""Environment variable: where the library is kept for other processes; by default for this one alone."""
_OWN_FOLDER = tempfile.TemporaryDirectory()
_FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE")


@functools.cache
def emulated() -> Path:
    """The library of all producers, for the CPU."""
    texts = []
    for source in {producer_source(request, SM_75) for request in every_producer()}:
        # Each is a file of its own for nvcc.
        texts.append(source.text.replace("Kernel =", f"Kernel_{source.name} =").replace("Kernel::", f"Kernel_{source.name}::"))
    folder = Path(os.environ.get(FOLDER) or _OWN_FOLDER.name)
    if (folder / "producers.so").exists():
        return folder / "producers.so"
    (folder / "producers.cpp").write_text("\n".join(texts))
    includes = (f"-I{Path(__file__).parent / 'cuda_on_cpu'}", f"-I{compile.TEMPLATES}")
    command = [COMPILER or "", *_FLAGS, *includes, "-o", "producers.so", "producers.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return folder / "producers.so"


class EmulatedBackend:
    """The backend's producers on CPU tensors, which the conformance suite takes as those of any other backend."""

    name = "emulated"
    api_version = BACKEND_API_VERSION
    offset_tensors = True

    def kernel_specs(self) -> list[KernelSpec]:
        return [
            attrs.evolve(spec, device_kinds=("cpu",), min_compute_capability="")
            for spec in CutlassBackend().kernel_specs()
            if spec.op in Op.PRODUCERS
        ]

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        if request.device_kind != "cpu":
            return [f"it runs on CPU devices, and this request is for {request.device_kind}"]
        return support.reasons(_on_t4(request))

    def candidate_configs(self, request: KernelRequest) -> list[KernelConfig]:
        return [KernelConfig()]

    def compiled(self, source: KernelSource) -> Any:
        with unittest.mock.patch.object(compile, "compile_files", return_value=[emulated()]):
            return compile.compiled(source)

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        with unittest.mock.patch.object(producers, "compiled", self.compiled):
            kernel = producers.Producer(_on_t4(request), SM_75)

        def on_cpu(*given: object) -> None:
            with unittest.mock.patch.multiple(producers, sm_count=lambda device: 2, current_stream=lambda device: 0):
                kernel(*given)
            checked(request, given)

        return on_cpu


def _on_t4(request: KernelRequest) -> KernelRequest:
    return attrs.evolve(request, device_kind="cuda", compute_capability="7.5")


def checked(request: KernelRequest, given: tuple[object, ...]) -> None:
    """What a backend on a CPU has to do and one on a GPU must not: raise where a scale is not finite."""
    for operand, value in zip(producers.operands_of(request), given, strict=True):
        if operand.written and operand.field.endswith("scale") and isinstance(value, torch.Tensor) and not value.isfinite().all():
            raise NumericsError(f"{operand.name} is not finite")

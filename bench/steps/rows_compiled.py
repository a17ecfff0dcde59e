"""Row L9: every fused kernel builds for sm_75 and sm_80; needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from kernels.bench import Bench, Row
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import KernelRequest
from qsync_torch.conformance.producers import ACTIVATION, FORMS, Producer, variant_of
from results import ROOT

CAPABILITIES = ("7.5", "8.0")
TRITON = ROOT / "packages" / "qsync-kernels-triton" / "tests"


def requests(capability: str) -> list[KernelRequest]:
    """Every producer with every chain, forward and backward, in float16 with what is kept in float16 and in int8.

    Not ReLU's input in int8, which no kernel keeps: its sign would be lost.
    """
    import torch

    found = []
    for form in FORMS:
        for saved in (Precision.FLOAT16, Precision.INT8):
            if saved.needs_scale and FORMS[form] == (ACTIVATION, ChainForm(Activation.RELU)):
                continue
            problem = Producer.of(form, variant_of(saved=saved, output=Precision.FLOAT16), (84, 64), torch.device("cpu"))
            for part in ("output", "grad_input"):
                op = f"{problem.name}.{part}"
                found.append(
                    KernelRequest(
                        op,
                        problem.variant,
                        (problem.shape,),
                        device_kind="cuda",
                        compute_capability=capability,
                        chain=problem.chain,
                    )
                )
    return found


def build_rows(bench: Bench) -> Iterator[Row]:
    """L9: of the kernels that are asked for, the share that some backend builds for both chips."""
    said, built, asked = [], 0, 0
    for capability in CAPABILITIES:
        arch = f"sm_{capability.replace('.', '')}"
        wanted = requests(capability)
        done: set[KernelRequest] = set()
        for name, backend in bench.backends.by_name.items():
            if name == "aten":  # its kernels are PyTorch's
                continue
            taken = [request for request in wanted if not backend.unsupported_reasons(request)]
            if not taken:
                continue
            builds, kernels = _build(name, arch)
            said.append(f"{arch} {name}: {kernels} for {len(taken)} requests")
            if builds:
                done.update(taken)
        if not done:
            said.append(f"{arch}: no backend offers a producer")
        built, asked = built + len(done), asked + len(wanted)
    yield bench.row(
        "L9", "requests for fused kernels that build for sm_75 and sm_80", built / asked, "fraction", "1", "; ".join(said)
    )


_COMPILE = """
import compile_producers as producers
capability = int({arch!r})
for name, function, constants, types in producers.cases(capability):
    producers.compiled(function, constants, producers.HALF | types, capability)
    print(name)
"""
"""Every case of the Triton backend's own tests, compiled for one chip."""


def _build(name: str, arch: str) -> tuple[bool, str]:
    """Whether it builds, and how many kernels or why not."""
    if name != "triton":
        return False, "it compiles nothing ahead of time"
    path = os.pathsep.join(filter(None, [str(TRITON), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", _COMPILE.format(arch=arch[3:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return False, done.stderr.strip().splitlines()[-1][:300]
    return True, f"{len(done.stdout.splitlines())} kernels"

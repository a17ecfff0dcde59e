"""Row C2: the canary on GPUs, share by share, and what is wrong there.

    python bench/cluster/canary.py [--out FOLDER] [--raw FOLDER] [--seconds 340] [--shares 10,20,… | --shares ""] [--changed 40,60]
                                    [--gpus 2,3]

Each GPU has an MPS daemon of its own, and processes under each share multiply in every format on every backend: each result is
compared with the exact one in full (float64, which is certified by a random vector), and shown to the canary.  Then a small model
is trained on what the canary leaves, beside the same in float64 on CPUs.  What was seen of wrong kernels (their names, and what
makes them right) is printed, and kept in ``--raw``.  Without a GPU it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import parser_of, write_rows

SHARES = (10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100)
LOOKED_AT = (5, 8, 12, 15, 18, 22, 28, 33, 35, 38, 39, 41, 42, 45, 48, 52, 55, 58, 59, 61, 62, 65, 68, 72, 78, 85, 88, 92, 95, 98)
"""Further shares at which 16-bit products alone are tried, to see which numbers of SMs are wrong."""
SHAPES = (
    (50176, 192, 768),
    (50176, 768, 192),
    (12544, 384, 1536),
    (4096, 1024, 4096),
    (4608, 768, 3072),
    (8192, 2048, 8192),
)
"""(M, K, N)."""
FORMATS = ("float32", "bfloat16", "float16", "int8")
BACKENDS = ("aten", "triton", "cutlass")
AT_ONCE = 4
"""Processes on a GPU at once: nothing is timed but the canary, in a process by itself."""
TRAINED = ("int8", "bfloat16", "float16")
STEPS, LAYERS = 5, ((192, 768), (768, 192), (192, 768), (768, 64))
ROWS = 50176
_MANY = 16.0
"""Relative errors that formats and sums explain, beyond which an element counts as wrong."""
HERE = Path(__file__).resolve()


def main() -> None:
    """Start processes under every share and write the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--raw", type=Path, default=None, help="folder for what each process found")
    parser.add_argument("--seconds", type=float, default=340.0, help="when to stop starting processes")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="those that kernels are tried at; none: C2c alone")
    parser.add_argument("--look", action="store_true", help="see also which numbers of SMs are wrong, by MPS and in green contexts")
    parser.add_argument("--changed", default="", help="shares at which it is tried what makes wrong products right: 40,60")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpus", default="", help="which of this machine's are used; all unless said: 2,3")
    options = parser.parse_args()
    if options.worker:
        found = WORKERS[options.worker](options)
        options.result.write_text(json.dumps(found))
        return
    names = gpu_names()
    gpus = [int(gpu) for gpu in options.gpus.split(",") if gpu] or list(range(len(names)))
    if not gpus:
        print("canary: skipped, it needs a GPU and MPS, and nvidia-smi names none")
        return
    with tempfile.TemporaryDirectory(prefix="qsync-canary-", ignore_cleanup_errors=True) as folder:
        raw = options.raw or Path(folder) / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        found = Runs(Path(folder), raw, gpus, options).all()
    report(found, options, f"{len(gpus)} {names[0]}")


def gpu_names() -> list[str]:
    """Name the GPUs of this machine; does not start CUDA."""
    from qsync_torch.devices import nvidia_smi

    return [name.removeprefix("NVIDIA ") for name in nvidia_smi("gpu=name")]


class Runs:
    """The processes, several on each GPU."""

    def __init__(self, folder: Path, raw: Path, gpus: Sequence[int], options: argparse.Namespace) -> None:
        self.raw, self.gpus, self.options, self.begin = raw, gpus, options, time.monotonic()
        self.environments = {gpu: self._daemon(folder / f"mps{gpu}", gpu) for gpu in gpus}
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))

    @staticmethod
    def _daemon(folder: Path, gpu: int) -> dict[str, str]:
        own = {name: str(folder / part) for name, part in (("CUDA_MPS_PIPE_DIRECTORY", "pipe"), ("CUDA_MPS_LOG_DIRECTORY", "log"))}
        for path in own.values():
            Path(path).mkdir(parents=True)
        start = {**os.environ, **own, "CUDA_VISIBLE_DEVICES": str(gpu)}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=start, check=True, timeout=30)
        return own

    def one(self, worker: str, gpu: int, share: int | None, label: str = "", limit_s: float = 200.0, **more: str) -> dict[str, Any]:
        """What a process found; ``{"failed": …}`` where it did not end well or there was no time."""
        name = f"{worker}.{share or 'whole'}{label and '.' + label}"
        left = self.options.seconds - (time.monotonic() - self.begin)
        if left < 10:
            return {"worker": worker, "share": share, "label": label, "failed": "no time was left"}
        environment = {**os.environ, **more, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4"}
        if share is None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
            environment |= {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
        else:
            environment |= {**self.environments[gpu], "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share), "CUDA_VISIBLE_DEVICES": "0"}
        result, log = self.raw / f"{name}.json", self.raw / f"{name}.log"
        command = [sys.executable, str(HERE), "--worker", worker, "--result", str(result), "--raw", str(self.raw)]
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=min(left, limit_s), check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = "it was stopped"
        found = json.loads(result.read_text()) if result.exists() else {}
        if code:
            found["failed"] = f"ended with {code}: {log.read_text()[-300:]}"
        print(f"[{time.monotonic() - self.begin:4.0f} s] {name} {found.get('failed', '')[-200:]}", flush=True)
        return {"worker": worker, "share": share, "label": label, **found}

    def all(self) -> list[dict[str, Any]]:
        """Everything, in the order of its worth."""
        shares = [int(share) for share in self.options.shares.split(",") if share]
        found: list[dict[str, Any]] = []
        try:
            with ThreadPoolExecutor(1) as side, ThreadPoolExecutor(AT_ONCE * len(self.gpus)) as pool:
                reference = side.submit(self.one, "reference", self.gpus[0], None) if shares else None
                changed = [int(share) for share in self.options.changed.split(",") if share]
                jobs = [(share, "", {}) for share in (*shares, *LOOKED_AT)] if self.options.look else []
                jobs += [(share, *change) for share in changed for change in CHANGES.items()]
                found += list(pool.map(
                    lambda n: self.one("look", self.gpus[n[0] % len(self.gpus)], n[1][0], n[1][1], 60, **n[1][2]), enumerate(jobs)
                ))  # fmt: skip
                if self.options.look:
                    found.append(self.one("green", self.gpus[0], None, limit_s=60))
                if reference is not None:
                    found.append(reference.result())
                found += list(pool.map(lambda n: self.one("share", self.gpus[n[0] % len(self.gpus)], n[1]), enumerate(shares)))
            found.append(self.one("cost", self.gpus[-1], 50))
        finally:
            for own in self.environments.values():
                subprocess.run(
                    ["nvidia-cuda-mps-control"], input=b"quit -t 5\n", env={**os.environ, **own}, timeout=30, check=False
                )
        return found


CHANGES: Mapping[str, Mapping[str, str]] = {
    "cublas": {"CANARY_LIBRARY": "cublas"},
    "cublaslt": {"CANARY_LIBRARY": "cublaslt"},
    "no-workspace": {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"},
    "small-workspace": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "16"},
    "large-workspace": {"CUBLAS_WORKSPACE_CONFIG": ":65536:8", "CUBLASLT_WORKSPACE_SIZE": "65536"},
    "eager-modules": {"CUDA_MODULE_LOADING": "EAGER"},
    "full-reduction": {"CANARY_REDUCTION": "full"},
    "blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
    "one-connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    **{f"{sms} SMs left out": {"CANARY_SM_CARVEOUT": str(sms)} for sms in (4, 8, 16, 24)},
}
"""What may make a wrong product right: variables of the environment, or settings that the process makes of them."""


# What the processes do


def _settings() -> None:
    import torch

    if library := os.environ.get("CANARY_LIBRARY"):
        torch.backends.cuda.preferred_blas_library(library)
    if os.environ.get("CANARY_REDUCTION"):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if carveout := os.environ.get("CANARY_SM_CARVEOUT"):
        torch._C._set_sm_carveout_experimental(int(carveout))


def exact(first: Any, second: Any) -> Any:
    """``first @ second.T`` in float64, certified: a random vector is multiplied by element-wise products and sums alone."""
    import torch

    product = torch.empty(first.shape[0], second.shape[0], dtype=torch.float64, device=first.device)
    torch.mm(first, second.t(), out=product)
    vector = torch.randn(second.shape[0], dtype=torch.float64, device=first.device)
    expected = (first * (second * vector[:, None]).sum(0)).sum(1)
    error = ((product * vector).sum(1) - expected).abs().max() / (first.norm(dim=1).max() * second.norm() + 1e-300)
    if not float(error) < 1e-12:  # the library is wrong in float64 too
        for row in range(0, first.shape[0], 64):
            for column in range(0, second.shape[0], 256):
                part = first[row : row + 64, None] * second[None, column : column + 256]
                product[row : row + 64, column : column + 256] = part.sum(-1)
    return product


def wrong_elements(product: Any, known: list[Any]) -> int:
    """How many elements of a product of matrices are wrong, all of them compared; ``known`` keeps the exact product."""
    a = product.first.part(0, product.first.count).flatten(1).double()
    b = product.second.part(0, product.second.count).flatten(1).double()
    if product.what == "grad_weight":
        a, b = a.t().contiguous(), b.t().contiguous()
    elif product.what == "grad_input":
        b = b.t().contiguous()
    if not known:
        known.append(exact(a, b))
    scale = 1.0 if product.scale is None or not product.scale.numel() else product.scale.double().view(-1, 1)
    wanted = known[0] * scale
    if product.bias is not None:
        wanted = wanted + product.bias.double()
    usual = (a.norm(dim=1)[:, None] * b.norm(dim=1)) / a.shape[1] ** 0.5 * scale
    error = (product.found.double() - wanted).abs()
    return int((~(error <= _MANY * product.allowed * (usual + wanted.abs()))).sum())


def of_share(options: argparse.Namespace) -> dict[str, Any]:
    """Every kernel: compared in full, and shown to the canary; then a small model's training."""
    import attrs
    import torch

    from qsync_core.errors import QSyncError
    from qsync_core.ir.precision import Precision
    from qsync_core.ir.variant import Variant
    from qsync_core.kernels.backend import Op
    from qsync_core.kernels.choice import KernelChoice
    from qsync_core.kernels.requests import CallShapes, operator_requests
    from qsync_torch.devices import device_facts
    from qsync_torch.kernels.canary import canary_operands, float_products_of, problem_of_call, product_of_call
    from qsync_torch.kernels.exact_products import problem_of
    from qsync_torch.kernels.selection import build_kernel, reasons_against

    device, rows, refused = _device(), [], Counter[str]()
    faults: list[str] = []
    counts: Counter[str] = Counter()

    def judge(name: tuple[str, ...], product: Any, problem: str, known: list[Any]) -> None:
        rows.append([*name, wrong_elements(product, known), product.found.numel(), problem])
        if not rows[-1][-3]:
            found = {what: bool(problem_of(attrs.evolve(product, found=bad))) for what, bad in planted(product.found)}
            faults.extend(what for what, seen in found.items() if not seen)
            counts.update(found)

    for number, (m, k, n) in enumerate(SHAPES):
        call, shape = CallShapes("linear", (m, k), (n, k), (m, n)), f"{m}x{k}x{n}"
        for name in FORMATS:
            variant = Variant.of(Precision(name))
            if name != "int8":
                torch.manual_seed(number)
                for product in float_products_of(call, variant, device):
                    judge(("aten", name, product.what, shape), product, problem_of(product), [])
                del product
            for asked in operator_requests(call, variant, *device_facts(device)):
                known: list[Any] = []
                for backend in BACKENDS:
                    if backend == "aten" and name != "int8":
                        continue  # autograd's own, above
                    choice = KernelChoice((backend,))
                    try:
                        if reasons_against(asked.request, choice):
                            refused[f"{backend} {name} {asked.role}"] += 1
                            continue
                        torch.manual_seed(number)
                        arguments = canary_operands(asked, device)
                        build_kernel(asked.request, choice)(*arguments)
                        product_of = arguments[1] if asked.request.op == Op.QUANTIZE else arguments[-1]
                        product_of.view(-1)[:1].float().item()  # a kernel that fails says so here
                    except (QSyncError, RuntimeError) as error:
                        refused[f"{backend} {name} {asked.role}: {str(error)[:90]}"] += 1
                        continue
                    problem = problem_of_call(asked, arguments)
                    if asked.request.op == Op.QUANTIZE:
                        rows.append([backend, name, asked.role, shape, wrong_copies(asked.request, arguments), m * n, problem])
                    else:
                        product = product_of_call(asked.request, arguments)
                        judge((backend, name, asked.role.partition(".")[2], shape), product, problem, known)
                    del arguments
        found = {"sms": _sms(), "kernels": rows, "refused": dict(refused), "planted": dict(counts), "not seen": faults}
        options.result.write_text(json.dumps(found))
    return {**found, "training": list(trainings(options.raw))}


def planted(found: Any) -> Iterator[tuple[str, Any]]:
    """A right result with faults in it: what the canary says of them is counted apart."""
    rows, columns = found.shape
    bad = found.clone()
    bad[rows // 3, columns // 2] = float("nan")
    yield "one NaN", bad
    bad = found.clone()
    tile = bad[rows // 2 : rows // 2 + 64, columns // 2 : columns // 2 + 64]
    tile.copy_(tile.flip(0, 1).clone())
    yield "a tile of other numbers", bad
    bad = found.clone()
    bad[-1].zero_()
    yield "a row not written", bad
    bad = found.clone()
    bad[0, 0] = 64 * bad.abs().max()
    yield "one large number", bad


def wrong_copies(request: Any, arguments: Sequence[Any]) -> int:
    """Elements of a quantized copy that are more than a step from what they are of; all are compared."""
    from qsync_core.ir.precision import Granularity

    x, q, scale, *_ = arguments
    step = scale.double().view(-1, 1) if request.variant.x_granularity is Granularity.PER_CHANNEL else scale.double()
    wrong = ~((q.double() * step - x.double()).abs() <= 1.02 * step)
    transposed = arguments[7:8]
    return int(wrong.sum()) + sum(int((copy.t() != q).sum()) for copy in transposed)


def _device() -> Any:
    """The GPU; a CPU where there is none, which is enough to see that everything runs."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _sms() -> int:
    import torch

    return 0 if not torch.cuda.is_available() else torch.cuda.get_device_properties(0).multi_processor_count


def reference(options: argparse.Namespace) -> dict[str, Any]:
    """Compile what workers are going to need, and train in float64 on the CPU."""
    import torch

    from qsync_core.ir.precision import Precision
    from qsync_core.ir.variant import Variant
    from qsync_core.kernels.choice import KernelChoice
    from qsync_core.kernels.requests import CallShapes, operator_requests
    from qsync_torch.devices import device_facts
    from qsync_torch.kernels.selection import build_kernel, reasons_against

    begin, device = time.monotonic(), _device()
    wanted: dict[str, Any] = {}
    for m, k, n in (*SHAPES, *((ROWS, k, n) for k, n in LAYERS)):
        for name in FORMATS:
            for asked in operator_requests(
                CallShapes("linear", (m, k), (n, k), (m, n)), Variant.of(Precision(name)), *device_facts(device)
            ):
                wanted.setdefault(str(asked.request), asked.request)
    choice = KernelChoice(("cutlass",))

    def build(request: Any) -> str:
        try:
            return "" if reasons_against(request, choice) else str(build_kernel(request, choice) and "")
        except Exception as error:  # the others still count
            return str(error)[:200]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failed = sorted({said for said in pool.map(build, wanted.values()) if said})
    torch.set_num_threads(16)
    losses = train(torch.float64, torch.device("cpu"))
    return {"losses": losses, "seconds": time.monotonic() - begin, "not built": failed}


def _model(dtype: Any, device: Any) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [part for k, n in LAYERS for part in (nn.Linear(k, n), nn.GELU())][:-1]
    return nn.Sequential(*layers).to(device, dtype)


def train(dtype: Any, device: Any, model: Any = None, amp: Any = None) -> list[float]:
    """Losses of some steps, always the same model on the same numbers."""
    import torch

    generator = torch.Generator().manual_seed(2)
    model = _model(dtype, device) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, LAYERS[0][0], generator=generator).to(device, dtype)
        with torch.autocast(device.type, amp or torch.bfloat16, enabled=amp is not None):
            y = model(x)
        loss = (y.to(dtype) - x[:, : LAYERS[-1][1]]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trainings(raw: Path) -> Iterator[dict[str, Any]]:
    """A small model's training by what the canary leaves of each rung, in float32 and under autocast."""
    import torch

    import qsync_torch as qsync
    from qsync_core.ir.plan import Assignment
    from qsync_core.ir.precision import Precision
    from qsync_core.ir.variant import Variant
    from qsync_core.kernels.requests import CallShapes
    from qsync_torch.kernels.canary import Canary
    from qsync_torch.tuning.chooser import KernelChooser

    stored = raw / "reference.whole.json"
    wanted = json.loads(stored.read_text())["losses"] if stored.exists() else []
    device = _device()
    canary = Canary(device)
    for base in (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16):
        for rung in dict.fromkeys((str(base), *TRAINED)):
            if rung != str(base) and rung in ("bfloat16", "float16") and base is not Precision.FLOAT32:
                continue
            model, entries, refused = _model(torch.float32, device), {}, False
            for position, (k, n) in enumerate(LAYERS):
                call = CallShapes("linear", (ROWS, k), (n, k), (ROWS, n), input_gradient=position > 0)
                for name in (rung, str(base)):
                    variant = Variant.of(Precision(name)) if name != str(base) else Variant.plain(base)
                    choice = KernelChooser(device, "auto").for_operator(call, variant)
                    if not canary.of_operator(call, variant, choice):
                        entries[f"{2 * position}#0"] = Assignment(variant, choice.backend, choice.config, "")
                        break
                else:
                    refused = True
            lowered = sum(entry.variant != Variant.plain(base) for entry in entries.values())
            facts = {"base": str(base), "rung": rung, "refused": refused, "lowered": lowered}
            if not refused:
                amp = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(base))
                if lowered:
                    qsync.apply_(model, entries, base=base)
                losses = train(torch.float32, device, model, amp)
                facts |= {"losses": losses, "wrong": sum(not abs(a - b) <= 0.02 * b for a, b in zip(losses, wanted, strict=True))}
            yield facts


def look(options: argparse.Namespace) -> dict[str, Any]:
    """16-bit products of PyTorch alone, again and again: which are wrong, how often, and which kernel runs."""

    _settings()
    return {"sms": _sms(), "wrong": list(wrong_products(_device(), with_names=True))}


def wrong_products(device: Any, with_names: bool = False, repeats: int = 6) -> Iterator[dict[str, Any]]:
    """Products of which some run was wrong."""
    import torch
    import torch.nn.functional as F

    for dtype in (torch.bfloat16, torch.float16):
        for m, k, n in (*SHAPES, (200704, 96, 384)):
            x = torch.randn(m, k, device=device, dtype=dtype)
            w = torch.randn(n, k, device=device, dtype=dtype)
            b = torch.randn(n, device=device, dtype=dtype)
            vector = torch.randn(n, device=device, dtype=torch.float64)
            expected = (x.double() * (w.double() * vector[:, None]).sum(0)).sum(1)
            calls = {"bias": lambda x=x, w=w, b=b: F.linear(x, w, b), "plain": lambda x=x, w=w: F.linear(x, w)}
            for way, call in calls.items():
                wanted = expected + (b.double() * vector).sum() if way == "bias" else expected
                rows = []
                for _ in range(repeats):
                    y = call().double()
                    error = ((y * vector).sum(1) - wanted).abs()
                    bad = ~(error <= 0.2 * k**0.5 * n**0.5)
                    rows.append((int(bad.sum()), int((~torch.isfinite(y)).sum())))
                names = kernel_names(call) if with_names and (any(bad for bad, _ in rows) or way == "plain") else []
                if any(bad for bad, _ in rows):
                    where = bad.nonzero().flatten()
                    yield {
                        "format": str(dtype)[6:], "shape": [m, k, n], "way": way, "wrong rows": [bad for bad, _ in rows],
                        "not finite": [bad for _, bad in rows], "kernels": names,
                        "first and last wrong row": [int(where[0]), int(where[-1])] if len(where) else [],
                    }  # fmt: skip
                elif names:
                    yield {"format": str(dtype)[6:], "shape": [m, k, n], "way": "right", "kernels": names}


def kernel_names(call: Any) -> list[str]:
    """Kernels that a call launches, with their grids."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return [f"{e['name'][:110]} grid={e['args'].get('grid')}" for e in events if e.get("cat") == "kernel"]


def green(options: argparse.Namespace) -> dict[str, Any]:
    """The same in green contexts of many sizes, on a GPU without MPS."""
    import torch
    from torch.cuda.green_contexts import GreenContext

    device, found, kept = _device(), {}, []
    for sms in range(8, _sms() + 1, 4):
        try:
            kept.append(GreenContext.create(num_sms=sms, device_id=0))
            with torch.cuda.stream(kept[-1].Stream()):
                bad = [entry for entry in wrong_products(device, repeats=2) if entry["way"] != "right"]
                torch.cuda.synchronize()
            found[sms] = len(bad)
        except Exception as error:
            found[sms] = str(error)[:100]
        options.result.write_text(json.dumps({"wrong by SMs": found}))
    return {"wrong by SMs": found}


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds that the canary takes of a profile, of three jobs, with what it loads."""

    from qsync_core.ir.precision import Precision
    from qsync_core.ir.profile import DeviceKind
    from qsync_core.ir.variant import Variant
    from qsync_torch.devices import standard_ladder
    from qsync_torch.kernels.canary import Canary
    from qsync_torch.load_job import load_job
    from qsync_torch.profiling.items import distinct_items, right_kernels
    from qsync_torch.tracing.trace import trace
    from qsync_torch.tuning.chooser import KernelChooser

    device, found = _device(), {}
    for name, batch in (("bert-base:seq=384", 12), ("resnet50:image=224", 64), ("vgg16_bn:image=224", 32)):
        dag = trace(load_job(name, batch))
        variants = (*standard_ladder(device), Variant.plain(Precision.FLOAT32))
        chooser, canary = KernelChooser(device, "triton+aten"), Canary(device)
        items = distinct_items(dag, tuple(dict.fromkeys(variants)), DeviceKind.CUDA)
        right_kernels(items, dag, chooser, canary)
        again = Canary(device)  # what is compiled and loaded at first is not loaded again by what is measured then
        right_kernels(items, dag, chooser, again)
        wrong = [str(one) for one in canary.wrong][:5]
        found[name] = {"seconds": again.seconds, "with loading": canary.seconds, "kernels": canary.checked, "wrong": wrong}
        options.result.write_text(json.dumps({"sms": _sms(), "jobs": found}))
    return {"sms": _sms(), "jobs": found}


WORKERS = {"share": of_share, "reference": reference, "look": look, "green": green, "cost": cost}


# What is said of it


def report(found: Sequence[Mapping[str, Any]], options: argparse.Namespace, device: str) -> None:
    """Print what was seen, and write the rows."""
    shares = [entry for entry in found if entry["worker"] == "share" and entry.get("kernels")]
    failed = [
        f"{entry['worker']} {entry['share']} {entry['label']}: {entry['failed'][-120:]}" for entry in found if "failed" in entry
    ]
    kernels = [(entry["share"], *row) for entry in shares for row in entry.get("kernels", ())]
    wrong = [row for row in kernels if row[5]]
    seen = [row for row in wrong if row[7]]
    false = [row for row in kernels if row[7] and not row[5]]
    for entry in shares:
        bad = Counter((row[0], row[1], row[2]) for row in entry.get("kernels", ()) if row[4])
        print(entry["share"], "%", entry.get("sms"), "SMs:", len(entry.get("kernels", ())), "kernels, wrong:", dict(bad) or "none")
    for row in (*[row for row in wrong if not row[7]][:10], *false[:10]):
        print("missed or false:", row)
    print("refused:", dict(sum((Counter(entry.get("refused", {})) for entry in shares[:1]), Counter())))
    for entry in found:
        if entry["worker"] in ("look", "green", "cost", "reference"):
            facts = {k: v for k, v in entry.items() if k not in ("worker", "wrong", "losses")}
            bad = [item for item in entry.get("wrong", ()) if item.get("way") != "right"]
            print(json.dumps(facts), "wrong:", len(bad), *(json.dumps(item) for item in bad[:1] if not entry["label"]))
    steps = [training for entry in shares for training in entry.get("training", ())]
    trained = [training for training in steps if "losses" in training]
    for training in steps:
        if training.get("wrong"):
            print("training:", training)
    times = [job["seconds"] for entry in found for job in entry.get("jobs", {}).values()]
    print(*failed, sep="\n")
    counted = Counter((row[1], row[2]) for row in wrong)
    told = "; ".join(f"{share}%: {number}" for share, number in Counter(row[0] for row in wrong).items())
    whole = sum("training" in entry for entry in shares)
    says = f"{len(kernels)} kernels at {len(shares)} shares ({whole} of them to the end) on {device}"
    planted_faults = sum((Counter(entry.get("planted", {})) for entry in shares), Counter())
    missed = sum((Counter(entry.get("not seen", ())) for entry in shares), Counter())
    sown = sum(planted_faults.values()) + sum(missed.values())
    print("planted faults:", dict(planted_faults), "not found:", dict(missed))
    what = "wrong kernels that the canary found, of those that are wrong"
    if not wrong:
        what = "faults planted in right results that the canary found (no kernel is wrong here)"
    rows: list[dict[str, Any]] = []
    if wrong or sown:
        rows.append({
            "id": "C2", "what": f"{what}; {says}", "unit": "ratio",
            "value": len(seen) / len(wrong) if wrong else 1 - sum(missed.values()) / max(1, sown), "target": "all",
            "spread": f"{len(seen)} of {len(wrong)} ({told or 'none is wrong'}; {dict(counted) if wrong else ''}); "
            f"right ones called wrong: {len(false)}; of {sown} faults planted in right ones {sum(missed.values())} were not found "
            f"{dict(missed) or ''}; processes that failed: {len(failed)}",
        })  # fmt: skip
    if trained:
        rows.append({
            "id": "C2b", "what": "training steps with a wrong number, on what the canary leaves", "unit": "steps", "target": "0",
            "value": sum(training["wrong"] for training in trained),
            "spread": f"of {STEPS * len(trained)} steps at {sum('training' in entry for entry in shares)} shares; "
            f"{sum(t['refused'] for t in steps)} of {len(steps)} trainings refused",
        })  # fmt: skip
    if times:
        jobs = {name: job for entry in found for name, job in entry.get("jobs", {}).items()}
        each = ", ".join(f"{name} {job['seconds']:.2f} s ({job['with loading']:.1f} with loading)" for name, job in jobs.items())
        rows.append({
            "id": "C2c", "what": "seconds that the canary adds to a profile, the longest of three jobs, at 50%", "unit": "s",
            "value": max(times), "target": "≤ 2",
            "spread": f"{each}; what is compiled and loaded here is not again by what is measured then",
        })  # fmt: skip
    if rows:
        command = "python bench/cluster/canary.py"
        print(write_rows("cluster", [{**row, "device": device} for row in rows], command, directory=options.out))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()

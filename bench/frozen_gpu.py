"""Plans of frozen weights on a GPU: rows of ``docs/results/frozen.json`` (docs/frozen-weights.md).

    python bench/frozen_gpu.py --only F1,F2,F3,F6 --directory RUN
    python bench/frozen_gpu.py --only F7 --directory RUN [--seed 1]
    torchrun --nproc-per-node 2 bench/frozen_gpu.py --only F5 --directory RUN
    python bench/frozen_gpu.py --size 3b --only F1,F2,F3,F6 --directory RUN-3B
    python bench/frozen_gpu.py --size tiny --only F1,F2,F3,F6,F7 --directory RUN

A Llama-like model of 1.2 billion parameters, held in bfloat16, with LoRA r = 16 on all linears and 4 x 1024 tokens, trained on the
text of Python's library for a while first; with ``--size`` one of 3 billion, or a tiny one, on a CPU too.  The directory keeps the
base, its graph, profile and sensitivity, the losses of F7 (of one seed, with ``--seed``, or of all that are not there yet), and
``frozen.json`` with the rows; ``python bench/results.py`` merges these.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fitting.stored_omega import adapted_llama, batch_of, loss_of, read_of
from qsync_core.artifacts.files import load, save
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.indicate import indicate
from qsync_planner.replayer.process_memory import ProcessMemory
from qsync_planner.replayer.replay import Replayer
from qsync_torch import apply_, load_planned
from qsync_torch.apply.stored_modules import stored_tensors
from qsync_torch.job import Batch, Job
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.memory import memory_rise, storage_bytes
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.replaying import extension
from qsync_torch.tracing.trace import trace
from results import write_rows

LADDER = tuple(Variant.named(name) for name in ("bfloat16@nf4", "bfloat16@int8-block", "bfloat16@int8-row", "bfloat16"))
NF4, BFLOAT16 = LADDER[0], LADDER[-1]
CAPS, TIMED, TURNS, UPDATES, LAST, SEEDS = 12, 4, 6, 400, 50, 3
_ANY_TIME = 5.0
Stored = Mapping[OpId, Variant]


@attrs.frozen
class Size:
    """What is trained: a model and its batch, and how long its base is trained first."""

    layers: int = 18
    width: int = 2048
    inner: int = 8192
    heads: int = 32
    vocabulary: int = 32768
    rank: int = 16
    samples: int = 4
    length: int = 1024
    pretrained: int = 100
    updates: int = UPDATES
    seeds: int = SEEDS
    pretrained_samples: int = 16
    observed: int = 6
    suffix: str = ""


TINY = Size(2, 128, 352, 4, 256, 8, 4, 64, 100, 12, 2)
SIZES = {"1b": Size(), "3b": Size(28, 3072, heads=24, pretrained=60, pretrained_samples=8, observed=2, suffix="-3b"), "tiny": TINY}
"""By what ``--size`` says.  The larger one is trained and observed for less long: it is there for memory, time and loading."""


class Bench:
    """The job with all that is measured of it once, kept in a directory."""

    def __init__(self, size: Size, directory: Path, device: torch.device, seed: int | None = None) -> None:
        self.size, self.directory, self.device, self.seed = size, directory, device, seed
        directory.mkdir(parents=True, exist_ok=True)
        self.base = self._trained()
        self.job = self.job_of(0)
        self.dag = self._kept("graph", PrecisionDag, lambda: trace(self.job))
        self.profile = self._kept("profile", Profile, self._profiled)
        self.sensitivity = self._kept("sensitivity", Sensitivity, self._rated)
        self.replayer = Replayer(self.inputs(0))
        self.names = [operator.op_id for operator in self.dag.adjustable]

    def _trained(self) -> nn.Module:
        """The base with its adapters; of a later process, as the first one has trained it."""
        size, path = self.size, self.directory / "base.safetensors"
        began = time.monotonic()
        model = adapted_llama(
            size.layers, size.width, 0, inner=size.inner, heads=size.heads, vocabulary=size.vocabulary, length=size.length,
            rank=size.rank, trained=0 if path.exists() else size.pretrained,
            samples=size.pretrained_samples, device=self.device,
        )  # fmt: skip
        if path.exists():
            load_model(model, path)
        else:
            save_model(model, str(path))
        print(f"base: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return model

    def job_of(self, seed: int) -> Job:
        """The job, with adapters that begin otherwise and batches of its own for each seed."""
        model = copy.deepcopy(self.base)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                nn.init.kaiming_uniform_(parameter, a=5**0.5)

        def batch(step: int, samples: int) -> Batch:
            return batch_of(step + 100_000 * seed, samples, self.size.length)

        return Job("llama", model, batch, loss_of, lambda ps: torch.optim.AdamW(ps, lr=3e-4), self.size.samples)

    def _kept(self, name: str, kind: type[Any], make: Callable[[], Any]) -> Any:
        path = self.directory / f"{name}.qsync"
        if not path.exists():
            began = time.monotonic()
            save(make(), path)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return load(path, kind)

    def _profiled(self) -> Profile:
        return profile(self.job, self.dag, ProfileRequest(self.device, ladder=LADDER, with_collectives=False), note=print)

    def _rated(self) -> Sensitivity:
        asked = ObserveRequest(LADDER, steps=self.size.observed, device=self.device, collectors=[HutchinsonCollector()])
        return indicate(observe(self.job, self.dag, asked, announce=print), self.dag, LADDER)

    def inputs(self, memory_bytes: int) -> Inputs:
        """One group with this budget of a process (0: none)."""
        group = DeviceGroup("card", self.profile.device.name, 1, Role.INFER, Precision.BFLOAT16, LADDER, memory_bytes=memory_bytes)
        return Inputs(self.dag, Cluster("one card", (group,)), {"card": self.profile}, self.sensitivity)

    def uniform(self, variant: Variant) -> Stored:
        """All weights stored alike."""
        return dict.fromkeys(self.names, variant)

    def peak_bytes(self, stored: Stored) -> int:
        """Predicted peak of tensors."""
        return self.replayer.memory("card", stored).peak_bytes

    def caps(self, count: int = CAPS) -> list[int]:
        """Budgets of a process between uniform NF4's and uniform bfloat16's, both included."""
        process = ProcessMemory.of(self.profile)
        low, high = (process.process_bytes(self.peak_bytes(self.uniform(variant))) for variant in (NF4, BFLOAT16))
        return [low + (high - low) * step // max(1, count - 1) for step in range(count)]

    def planned(self, cap: int) -> Stored:
        """The plan of least Σ Ω within a cap."""
        plan = allocate(self.inputs(cap), Request("auto", tolerance=_ANY_TIME))
        return {op_id: entry.variant for op_id, entry in plan.groups[0].assignments.items()}

    def model(self, stored: Stored, job: Job | None = None) -> nn.Module:
        """A copy on the device with its weights stored so; the float ones are gone, and so is the copy before it."""
        gc.collect()
        model = (job or self.job).copy_model().train().to(self.device)  # which is quicker than a CPU at quantizing weights
        if any(variant != BFLOAT16 for variant in stored.values()):
            apply_(model, {op_id: str(variant) for op_id, variant in stored.items()}, base=Precision.BFLOAT16)
        return model

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        """One update; its loss."""
        loss = self.job.compute_loss(batch, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def batch(self, step: int, job: Job | None = None) -> Batch:
        """A batch on the device."""
        return (job or self.job).batch(step, self.size.samples).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The job's, over what is trained."""
        return self.job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])

    def distributed(self, model: nn.Module) -> nn.Module:
        """What trains it on all ranks: weights that one rank stores are no parameters there, so no rank sends them."""
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [f"{op_id.fqn}.weight" for op_id in self.names])
        return DistributedDataParallel(model)

    def measured_peak(self, stored: Stored, cap: int) -> tuple[int, int]:
        """Peak of tensors in a step, and what the process takes, under a cap; raises OutOfMemoryError where it is too small."""
        model, batch = self.model(stored), self.batch(0)
        optimizer = self.optimizer(model)
        if self.device.type == "cpu":
            self.step(model, optimizer, batch)
            state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
            rise, _ = memory_rise(lambda: self.step(model, optimizer, batch))
            peak = storage_bytes([*model.parameters(), *model.buffers(), *stored_tensors(model), *state, *batch.tensors]) + rise
            return peak, peak
        outside = ProcessMemory.of(self.profile).outside_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap - outside) / total))
        torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(3):
                self.step(model, optimizer, batch)
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved() + outside
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def of_bitsandbytes(self) -> nn.Module:
        """The same with that library's own modules, NF4 with double quantization, in the place of the frozen ones."""
        import bitsandbytes

        gc.collect()
        model, options = self.job.copy_model().train(), {"compress_statistics": True, "quant_type": "nf4"}
        for op_id in self.names:
            before = model.get_submodule(op_id.fqn)
            layer = bitsandbytes.nn.Linear4bit(
                before.in_features, before.out_features, before.bias is not None, torch.bfloat16, device="meta", **options
            )
            layer.weight = bitsandbytes.nn.Params4bit(before.weight.data, requires_grad=False, **options)
            layer.bias = before.bias
            model.set_submodule(op_id.fqn, layer.to(self.device))  # which quantizes it
        return model.to(self.device)

    def of_torchao(self) -> nn.Module:
        """The same with that library's NF4 weights in PyTorch's own modules."""
        from torchao.quantization import NF4Tensor

        gc.collect()
        model = self.job.copy_model().train().to(self.device)
        for op_id in self.names:
            layer = model.get_submodule(op_id.fqn)
            blocks = math.gcd(layer.weight.numel() // 64, 256)  # of as many scales as it has for one of theirs, where they divide
            layer.weight = nn.Parameter(NF4Tensor.from_tensor(layer.weight.data, 64, blocks), requires_grad=False)
        return model

    def steps_ns(self, models: Mapping[str, nn.Module]) -> dict[str, list[float]]:
        """Time of a step of each in each turn: the median of some, behind one that is not timed."""
        optimizers, found = {name: self.optimizer(model) for name, model in models.items()}, {name: [] for name in models}
        batches = [self.batch(number) for number in range(TIMED)]
        for turn in range(TURNS + 1):
            for name, model in models.items():
                times = []
                for batch in (batches[0], *batches):
                    self._wait()
                    began = time.perf_counter_ns()
                    self.step(model, optimizers[name], batch)
                    self._wait()
                    times.append(time.perf_counter_ns() - began)
                if turn:  # in the first, kernels are compiled and memory is taken
                    found[name].append(statistics.median(times[1:]))
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> str:
        """The job, for rows."""
        size, where = self.size, "a CPU" if self.device.type == "cpu" else torch.cuda.get_device_name()
        count = sum(parameter.numel for parameter in self.dag.parameters if not parameter.requires_grad)
        return (
            f"Llama-like, {size.layers} layers of {size.width} ({count / 1e9:.2g} billion frozen), LoRA r = {size.rank}, "
            f"{size.samples} x {size.length} tokens, {where}"
        )


def row(name: str, what: str, value: float, unit: str, target: str) -> dict[str, Any]:
    return {"id": name, "what": what, "value": round(value, 4), "unit": unit, "target": target}


def caps(bench: Bench) -> Iterator[dict[str, Any]]:
    """F1: plans under caps."""
    run, used, off = 0, [], []
    for cap in bench.caps():
        stored = bench.planned(cap)
        try:
            peak, process = bench.measured_peak(stored, cap)
        except torch.OutOfMemoryError as error:
            print(f"cap {cap:,}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        run += process <= cap
        used.append(process / cap)
        off.append(abs(bench.peak_bytes(stored) / peak - 1))
        counts = {v.label: sum(one == v for one in stored.values()) for v in LADDER}
        print(f"cap {cap:,}: {process:,} used, predicted peak {off[-1]:.2%} off, {counts}", file=sys.stderr, flush=True)
    what = f"{bench.describe()}: {CAPS} plans under caps from uniform NF4's to uniform bfloat16's"
    yield row("F1", f"{what}: run under their cap", run, "plans", f"= {CAPS}")
    yield row("F1b", "the same: share of the cap that is used, the least", min(used, default=0.0), "share", "≥ .93")
    yield row("F1c", "the same: predicted peak off the measured one, the most", max(off, default=1.0), "share", "≤ .03")


def errors(bench: Bench) -> Iterator[dict[str, Any]]:
    """F2: the adapters' gradients in float64 under the plan at the middle cap, and under what else fits."""
    cap = bench.caps(3)[1]
    fits = ProcessMemory.of(bench.profile).tensors_within(cap)
    rules = {"uniform NF4": bench.uniform(NF4), "plan": bench.planned(cap)}
    for variant in LADDER[1:-1]:
        rules[f"uniform {variant.label}"] = bench.uniform(variant)
    layers = sorted({_layer(op_id) for op_id in bench.names})
    for kept in range(1, len(layers)):
        for which, some in (("first", layers[:kept]), ("last", layers[-kept:])):
            rules[f"{which} layers"] = {o: BFLOAT16 if _layer(o) in some else NF4 for o in bench.names}
        if bench.peak_bytes(rules["first layers"]) > fits or bench.peak_bytes(rules["last layers"]) > fits:
            break
        known = {name: rules[name] for name in ("first layers", "last layers")}
        rules |= {f"{name}, bfloat16": stored for name, stored in known.items()}
    rules = {name: stored for name, stored in rules.items() if bench.peak_bytes(stored) <= fits}
    found = _true_errors(bench, rules)
    print({name: f"{error:.4g}" for name, error in found.items()}, file=sys.stderr, flush=True)
    others = [error for name, error in found.items() if name != "plan"]
    what = f"{bench.describe()}: relative error of the adapters' gradients (float64, 4 batches) of the plan at the middle cap"
    yield row("F2", f"{what}, over uniform NF4's", found["plan"] / found["uniform NF4"], "ratio", "≤ .5")
    yield row("F2b", "the same, over the best uniform storage or first- or last-layers rule that fits", found["plan"] / min(others),
              "ratio", "≤ .8")  # fmt: skip


def _layer(op_id: OpId) -> int:
    """A layer's number; that of a head is beyond all."""
    parts = op_id.fqn.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else 1 << 20


def _true_errors(bench: Bench, rules: Mapping[str, Stored]) -> dict[str, float]:
    """√(Σ ‖Δg‖² / Σ ‖g‖²) over batches."""
    model = copy.deepcopy(bench.job.model).to(bench.device).double().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # in float64, what billions keep for backward fills a card
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator(bench.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which are zero before the first update, and let no gradient through to A
            parameter.data.normal_(std=0.01, generator=generator)

    def gradient(step: int) -> torch.Tensor:
        loss = bench.job.compute_loss(bench.batch(step), model)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained)])

    before = [gradient(step) for step in range(4)]
    found = {}
    for name, stored in rules.items():
        kept = {op_id: model.get_submodule(op_id.fqn).weight.data for op_id in stored}
        for op_id, variant in stored.items():
            if variant.storage.is_quantized:
                model.get_submodule(op_id.fqn).weight.data = read_of(kept[op_id], variant)
        moved = sum(float((gradient(step) - one).square().sum()) for step, one in enumerate(before))
        found[name] = (moved / sum(float(one.square().sum()) for one in before)) ** 0.5
        for op_id, weight in kept.items():
            model.get_submodule(op_id.fqn).weight.data = weight
    return found


def times(bench: Bench) -> Iterator[dict[str, Any]]:
    """F3: the step at the middle cap, in turns with NF4 of the libraries that are installed."""
    is_replayed = extension.want(bench.device, wait=True) is not None
    stored = {"plan": bench.planned(bench.caps(3)[1]), "own NF4": bench.uniform(NF4), "bfloat16": bench.uniform(BFLOAT16)}
    models = {name: bench.model(one) for name, one in stored.items()}
    for library, make in (("bitsandbytes", bench.of_bitsandbytes), ("torchao", bench.of_torchao)):
        if importlib.util.find_spec(library) is not None:
            models[library] = make()
    found = bench.steps_ns(models)
    told = ", ".join(f"{name} {statistics.median(times) / 1e6:.1f} ms" for name, times in found.items())
    libraries = [name for name in found if name not in stored] or ["own NF4"]
    fastest = min(libraries, key=lambda name: statistics.median(found[name]))

    def over(upper: str, lower: str) -> tuple[float, str]:
        each = [a / b for a, b in zip(found[upper], found[lower], strict=True)]
        return statistics.median(each), f"{min(each):.3f} to {max(each):.3f} of {len(each)} turns; {told}"

    what, own = f"{bench.describe()}: step of the plan at the middle cap", ""
    if not is_replayed:
        what, own = f"{what}, all calls in Python", "-python"
    value, spread = over("plan", fastest)
    yield row(f"F3{own}", f"{what}, over that of uniform NF4 in {fastest}", value, "ratio", "≤ .95") | {"spread": spread}
    for id_, upper, lower in (("F3-own", "plan", "own NF4"), ("F3b", "plan", "bfloat16"), ("F3c", "own NF4", "bfloat16")):
        value, spread = over(upper, lower)
        yield row(f"{id_}{own}", f"the same model, {upper} over {lower}", value, "ratio", "reported") | {"spread": spread}


def loading(bench: Bench) -> Iterator[dict[str, Any]]:
    """F6: memory while a checkpoint is read straight into the plan at the middle cap, over that of the plan's training steps."""
    plan, checkpoint = bench.planned(bench.caps(3)[1]), bench.directory / "checkpoint.safetensors"
    prefix, adapted = "base_model.model.", ".base_layer"
    if not checkpoint.exists():
        frozen = {name: p.detach() for name, p in bench.base.named_parameters() if not p.requires_grad}
        save_file({name.removeprefix(prefix).replace(adapted, ""): p for name, p in frozen.items()}, checkpoint)
    model = bench.job.copy_model().train()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                module.register_parameter(name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    gc.collect()

    def load_it() -> None:
        named = {op_id: str(variant) for op_id, variant in plan.items()}
        load_planned(model, named, checkpoint, device=bench.device, base=Precision.BFLOAT16)

    began = time.monotonic()
    most, stay = memory_rise(load_it, bench.device)
    took = time.monotonic() - began
    optimizer, batch = bench.optimizer(model), bench.batch(0)
    rise, _ = memory_rise(lambda: [bench.step(model, optimizer, batch) for _ in range(3)], bench.device)
    loaded, steps = stay / 2**20, (stay + rise) / 2**20
    told = f"{most / 2**20:,.0f} MiB while loading, in {took:.1f} s; {steps:,.0f} in steps, {loaded:,.0f} of which were loaded"
    what = f"{bench.describe()}: most memory of tensors while a checkpoint is loaded into the plan at the middle cap"
    yield row("F6", f"{what}, over that of its training steps", most / (stay + rise), "ratio", "≤ 1.05") | {"spread": told}
    predicted = bench.peak_bytes(plan)
    yield row("F6-predicted", "the same, over the plan's predicted peak", most / predicted, "ratio", "≤ 1.05")
    yield row("F6-kept", "the same, over what stays of it", most / stay, "ratio", "reported")


def losses(bench: Bench) -> Iterator[dict[str, Any]]:
    """F7: adapters trained under the plan, in bfloat16 and in NF4."""
    ways = {"plan": bench.planned(bench.caps(3)[1]), "bfloat16": bench.uniform(BFLOAT16), "nf4": bench.uniform(NF4)}
    for seed in range(bench.size.seeds) if bench.seed is None else [bench.seed]:
        job = bench.job_of(seed)
        for name, stored in ways.items():
            kept = bench.directory / f"losses-{seed}-{name}.json"
            if kept.exists():
                continue
            model = bench.model(stored, job)
            optimizer = bench.optimizer(model)
            found = [bench.step(model, optimizer, bench.batch(step, job)) for step in range(bench.size.updates)]
            kept.write_text(json.dumps(torch.stack(found).tolist()))
            del model, optimizer
    names = {name: [bench.directory / f"losses-{seed}-{name}.json" for seed in range(bench.size.seeds)] for name in ways}
    if not all(path.exists() for paths in names.values() for path in paths):
        return
    ends = {name: [statistics.fmean(json.loads(path.read_text())[-LAST:]) for path in paths] for name, paths in names.items()}
    print(ends, file=sys.stderr, flush=True)
    apart = {name: [a - b for a, b in zip(ends[name], ends["bfloat16"], strict=True)] for name in ("plan", "nf4")}
    error = {name: statistics.stdev(of) / len(of) ** 0.5 for name, of in apart.items()}
    count = bench.size.updates
    what = f"{bench.describe()}: loss of the last {min(LAST, count)} of {count} updates, {bench.size.seeds} seeds"
    yield row("F7", f"{what}: the plan at the middle cap less bfloat16", statistics.fmean(apart["plan"]), "nats", "within 2 of F7b")
    yield row("F7b", "the same: its standard error", error["plan"], "nats", "reported")
    yield row("F7c", f"{what}: uniform NF4 less bfloat16", statistics.fmean(apart["nf4"]), "nats", "reported")
    yield row("F7d", "the same: its standard error", error["nf4"], "nats", "reported")


def hybrid(bench: Bench) -> Iterator[dict[str, Any]]:
    """F5: two ranks, the second at the middle cap; under torchrun.  In turns, as F3."""
    rank, tiny = dist.get_rank(), bench.size == TINY
    plan = bench.planned(bench.caps(3)[1])
    made = {
        "hybrid": lambda: bench.model(plan if rank else bench.uniform(BFLOAT16)),
        "own NF4": lambda: bench.model(bench.uniform(NF4)),
    }
    if importlib.util.find_spec("bitsandbytes") and bench.device.type == "cuda":
        made["bitsandbytes"] = bench.of_bitsandbytes
    models = {name: bench.distributed(make()) for name, make in made.items()}
    optimizers = {name: bench.optimizer(model) for name, model in models.items()}
    count = dict.fromkeys(models, 1) if tiny else {name: 40 if name == "hybrid" else 8 for name in models}
    numbers = dict.fromkeys(models, 0)
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(5):
        for name, model in models.items():
            bench._wait()
            dist.barrier()
            began = time.monotonic()
            for _ in range(count[name]):
                bench.step(model, optimizers[name], bench.batch(2 * numbers[name] + rank))
                numbers[name] += 1
            bench._wait()
            dist.barrier()
            found[name].append((time.monotonic() - began) / count[name])
    mine = torch.cat([parameter.detach().flatten() for parameter in models["hybrid"].parameters() if parameter.requires_grad])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    extension_was = "calls replayed" if extension.loaded() is not None else "all calls in Python"
    steps = {name: statistics.median(times[1:]) for name, times in found.items()}  # kernels are compiled in the first turn
    if not rank:
        print({name: [round(1e3 * one, 1) for one in times] for name, times in found.items()}, file=sys.stderr, flush=True)
    what = f"{bench.describe()}: two ranks, one at the middle cap and one in bfloat16, {numbers['hybrid']} steps, {extension_was}"
    over = "bitsandbytes" if "bitsandbytes" in steps else "own NF4"
    yield row("F5", f"{what}: samples a second over both in uniform NF4 ({over})", steps[over] / steps["hybrid"], "ratio", "≥ 1.05")
    yield row("F5-own", "the same, over both in own NF4", steps["own NF4"] / steps["hybrid"], "ratio", "reported")
    yield row("F5b", "the same: adapters of the ranks are equal, bit for bit", float(torch.equal(*both)), "yes is 1", "= 1")


PARTS = {"F1": caps, "F2": errors, "F3": times, "F5": hybrid, "F6": loading, "F7": losses}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="F1", help="parts, comma-separated")
    parser.add_argument("--directory", type=Path, required=True, help="what was measured of the job, and the rows")
    parser.add_argument("--seed", type=int, help="of F7: this one alone")
    parser.add_argument("--size", choices=SIZES, default="1b", help="of the model; tiny is to try the script")
    options = parser.parse_args()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if torch.cuda.is_available()
        else (torch.device("cpu"))
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank = dist.get_rank()
        if rank:
            dist.barrier()  # until the first one has measured and written
    bench = Bench(SIZES[options.size], options.directory, device, options.seed)
    if dist.is_initialized() and not rank:
        dist.barrier()
    for name in options.only.split(","):
        try:
            rows = [row | {"id": row["id"] + bench.size.suffix} for row in PARTS[name](bench)]
        except Exception:
            traceback.print_exc()
            continue
        for one in rows:
            print(one)
        if not rank:
            command = f"python bench/frozen_gpu.py --size {options.size} --only {name} --directory RUN"
            write_rows("frozen", rows, command, directory=options.directory)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

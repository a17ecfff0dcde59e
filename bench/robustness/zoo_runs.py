"""T1: every job of the zoo from the trace to three training steps under plans, against a reference that patches nothing.

Each job goes through the commands (trace, profile, observe, indicate, plan). The planner's plan then gets other variants in its
inference group, so that something is lowered on any machine, in three ways: int8 and bfloat16 in turn; the same with float32
between operators; int8, float32 and bfloat16 in turn (two operators or one: the planner's own choice). int8 rounds to nearest.
In each of three steps outputs, loss, gradients and buffers must be those of :mod:`reference`, with the same weights and batch, and
with the sums of 16-bit products that are nearer in the first step. They may differ by eight times what the reference itself moves
when its weights change in their last bits, or a quarter of what all roundings to bfloat16 move, those of int8's gradients too.
Besides: by what arrives at PyTorch's dispatcher every operator runs in the format that was planned; gradients are finite and
float32; ``remove()`` gives the plain model back; and it is counted how many plans with one operator changed are told apart by
numbers alone. A job may instead be refused, in one sentence that names a line or an operator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attrs
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_core.artifacts.files import load
from qsync_core.cli.root import cli
from qsync_core.errors import QSyncError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from results import write_rows
from robustness.reference import SUMS, Reference, attributes_of, quantized, sums_by, widened_output
from robustness.zoo import ZOO

CLUSTER = """
[[group]]
name = "train"
device = "cpu"
count = 1
role = "train"
[[group]]
name = "infer"
device = "cpu"
count = 1
role = "infer"
ladder = ["int8", "bfloat16", "float32"]
[[link]]
between = ["train", "infer"]
latency_us = 20
bandwidth_gbps = 10
"""
RUNGS = ["--rungs", "int8,bfloat16,float32"]
COMMANDS = (
    ["trace", "job.py:job", "-o", "dag.qsync"],
    ["profile", "job.py:job", "--device", "cpu", "--dag", "dag.qsync", "-o", "cpu.qsync", *RUNGS],
    ["observe", "job.py:job", "--device", "cpu", "--dag", "dag.qsync", "-o", "seen.qsync", "--steps", "2", "--warmup", "0", *RUNGS],
    ["indicate", "seen.qsync", "--dag", "dag.qsync", "-o", "omega.qsync"],
    ["plan", "--dag", "dag.qsync", "--cluster", "cluster.toml", "--profile", "train=cpu.qsync", "--profile", "infer=cpu.qsync",
     "--sensitivity", "omega.qsync", "--solver", "greedy", "-o", "plan.qsync"],
)  # fmt: skip
INT8 = Variant.of(Precision.INT8, rounding=Rounding.NEAREST)
BFLOAT16, FLOAT32 = Variant.parse("bfloat16"), Variant.parse("float32")
STEPS = 3
NAMED = re.compile(r"\.py:\d+|line \d+|#\d|no linear or convolution operator")
LEAST = 1e-6
"""Relative differences below this are the order of float32 sums."""


class Refused(Exception):
    """A job that was refused in one sentence."""


class Wrong(Exception):
    """A job that neither runs right nor is refused properly."""


@attrs.frozen
class Outcome:
    """What became of a job: ``right``, ``refused``, ``silent`` (other numbers without a word) or ``failed`` (a traceback)."""

    name: str
    status: str
    detail: str = ""
    steps: int = 0
    operators: int = 0
    swaps: int = 0
    unseen: int = 0
    worst: float = 0.0
    seconds: float = 0.0


def made_plan(name: str) -> PrecisionPlan:
    """Through the commands, with the least effort."""
    from robustness.short import shorten_profiles

    shorten_profiles(3, 0.01)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("job.py").write_text(f"from robustness.zoo import ZOO\njob = ZOO[{name!r}]\n")
        Path("cluster.toml").write_text(CLUSTER)
        for arguments in COMMANDS:
            result = CliRunner().invoke(cli, arguments)
            if result.exit_code == 0:
                continue
            if result.exit_code == 1 and isinstance(result.exception, SystemExit) and "Traceback" not in result.output:
                refuse(f"{arguments[0]}: {result.stderr.partition('error: ')[2].strip()}")
            raise Wrong(
                f"{arguments[0]}: Traceback: {result.output}{''.join(traceback.format_exception(result.exception))[-1500:]}"
            )
        return load(Path("plan.qsync"), PrecisionPlan)


def refuse(sentence: str) -> None:
    """A refusal, if it is a good one."""
    if "\n" in sentence or not NAMED.search(sentence):
        raise Wrong(f"the refusal is no sentence that names a line or an operator: {sentence}")
    raise Refused(sentence)


def with_variants(plan: PrecisionPlan, variants: Mapping[str, Variant]) -> PrecisionPlan:
    """The plan with other variants in its inference group, by FQN."""

    def changed(group: Any) -> Any:
        assignments = {key: attrs.evolve(entry, variant=variants[key.fqn]) for key, entry in group.assignments.items()}
        return attrs.evolve(group, assignments=assignments)

    return attrs.evolve(plan, groups=tuple(changed(g) if g.group == "infer" else g for g in plan.groups))


def decided(plan: PrecisionPlan, variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """The variants with the outputs that the graph allows, by FQN."""
    assert plan.output_formats is not None
    outputs = {name: variant.output for name, variant in variants.items()}
    return {name: attrs.evolve(variant, output=plan.output_formats.delivered(name, outputs)) for name, variant in variants.items()}


def plans_of(plan: PrecisionPlan) -> Iterator[tuple[str, dict[str, Variant]]]:
    """By name, variants by FQN."""
    planned = {key.fqn: entry.variant for key, entry in plan.group("infer").assignments.items()}
    names = list(planned)
    narrow = attrs.evolve(BFLOAT16, output=Precision.FLOAT32)
    yield "float32 between", {name: (INT8, narrow)[i % 2] for i, name in enumerate(names)}
    yield "alternating", {name: (BFLOAT16, INT8)[i % 2] for i, name in enumerate(names)}
    nearest = {name: INT8 if variant.compute is Precision.INT8 else variant for name, variant in planned.items()}
    if len(names) > 2:  # beside operators that stay
        nearest |= {name: (INT8, FLOAT32, BFLOAT16)[i % 3] for i, name in enumerate(names)}
    yield "with float32", nearest


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, copied."""
    return {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}


def restore(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Write them back, in place."""
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            value.copy_(state[name])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of an output, those in objects too."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        else:
            found += [part for name in sorted(attributes_of(leaf)) for part in tensors_of(getattr(leaf, name))]
    return found


def run_step(
    job: Any, model: nn.Module, step: int, state: Mapping[str, torch.Tensor] | None = None, widen: bool = False
) -> dict[str, Any]:
    """One forward, loss and backward; returns outputs, loss, gradients and buffers."""
    if state is not None:
        restore(model, state)
    model.zero_grad()
    torch.manual_seed(step)
    batch = job.batch(step, job.batch_size)
    output = model(*batch.args, **batch.kwargs)
    output = widened_output(output) if widen else output
    found = {f"output {i}": t.detach().clone() for i, t in enumerate(tensors_of(output))}
    loss = job.loss(output, batch)
    loss.backward()
    found["loss"] = loss.detach().clone()
    found |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """By tensor, relative to its norm, or to a thousandth of the largest norm of its kind."""
    if found.keys() != expected.keys():
        raise Wrong(f"there is {sorted(found.keys() ^ expected.keys())} on one side only")
    largest: Counter[str] = Counter()
    norms = {
        name: value.to(torch.complex128 if value.is_complex() else torch.float64).norm().item() for name, value in expected.items()
    }
    for name, norm in norms.items():
        largest[name.split()[0]] = max(largest[name.split()[0]], norm)  # type: ignore[assignment]
    result = {}
    for name, value in expected.items():
        if found[name].dtype is not value.dtype or found[name].shape != value.shape:
            raise Wrong(f"{name} is {found[name].dtype} {tuple(found[name].shape)}, expected {value.dtype} {tuple(value.shape)}")
        wide = torch.complex128 if value.is_complex() else torch.float64
        scale = max(norms[name], 1e-3 * largest[name.split()[0]], 1e-30)
        result[name] = (found[name].to(wide) - value.to(wide)).norm().item() / scale
    return result


class Seen(TorchDispatchMode):
    """Which low-precision copies of which weights arrive at PyTorch's dispatcher."""

    def __init__(self, copies: Mapping[tuple[Any, ...], tuple[str, str]]) -> None:
        super().__init__()
        self._copies, self.found = copies, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int8, torch.bfloat16):
                self.found.add(self._copies.get(content(leaf)))
        return func(*args, **(kwargs or {}))


def content(x: torch.Tensor) -> tuple[Any, ...]:
    """Values in whatever layout."""
    values = x.detach().flatten()
    return (
        x.dtype,
        x.numel(),
        hash(values.view(torch.int8 if x.dtype is torch.int8 else torch.int16).sort().values.numpy().tobytes()),
    )


def low_copies(model: nn.Module, names: Iterator[str] | list[str]) -> dict[tuple[Any, ...], tuple[str, str]]:
    """By content, the operator and format of every copy of a weight that could be told."""
    parameters, copies, ambiguous = (
        dict(model.named_parameters(remove_duplicate=False)),
        {},
        set(),
    )
    for name in names:
        weight = parameters.get(name, parameters.get(f"{name}.weight"))
        if weight is None or weight.numel() < 8 or not weight.abs().sum():
            continue
        made = [("int8", quantized(weight, True)[0].to(torch.int8)), ("bfloat16", weight.detach().to(torch.bfloat16))]
        if weight.dim() > 1:  # of x @ weight and of transposed convolutions, whose scales run along the other side
            made.append(("int8", quantized(weight.transpose(0, 1), True)[0].to(torch.int8)))
        for text, copy in made:
            key = content(copy)
            if key in copies and copies[key][0] != name:
                ambiguous.add(key)
            copies[key] = (name, text)
    return {key: value for key, value in copies.items() if key not in ambiguous}


def check_formats(job: Any, variants: Mapping[str, Variant], used: set[str]) -> None:
    """What was planned in low precision ran in it, and nothing else did."""
    copies = low_copies(job.model, list(variants))
    with Seen(copies) as seen:
        run_step(job, job.model, STEPS + 1)
    for name, text in set(copies.values()):
        planned = str(variants[name].compute) == text
        if planned and name in used and (name, text) not in seen.found:
            raise Wrong(f"{name} is planned in {text}, and no such copy of its weight was used")
        if not planned and (name, text) in seen.found:
            raise Wrong(f"{name} is planned in {variants[name].compute}, and a copy of its weight in {text} was used")


def perturbed(state: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Weights with other last bits."""
    generator = torch.Generator().manual_seed(seed)

    def change(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        return value * (1 + 2.0**-22 * (2 * torch.rand(value.shape, generator=generator) - 1))

    return {name: change(value) for name, value in state.items()}


OTHER = {"int8": BFLOAT16, "bfloat16": INT8, "float32": BFLOAT16}


def tried(name: str, label: str, variants: dict[str, Variant], plan: PrecisionPlan, swaps: int) -> tuple[float, int, int]:
    """Train a job under a plan; returns the worst difference over its bound, and how many changed plans were (not) told apart."""
    job, twin = ZOO[name](), ZOO[name]()
    plain = run_step(job, job.model, 0)
    start = state_of(twin.model)
    restore(job.model, start)
    applied = apply_(job.model, with_variants(plan, variants), group="infer")
    optimizer = job.optimizer(job.model.parameters())
    reference, worst, sums = Reference(twin.model, variants), 0.0, SUMS
    seen_swaps = unseen = 0
    for step in range(STEPS):
        state = state_of(job.model)
        found = run_step(job, job.model, step)
        for key, value in found.items():
            if key.startswith("gradient") and not (value.isfinite().all() and value.dtype in (torch.float32, torch.complex64)):
                raise Wrong(f"{label}, step {step}: {key} is {value.dtype}, or holds infinite values")

        def expected(at: Mapping[str, torch.Tensor], who: str, of: Reference = reference, step: int = step) -> dict[str, Any]:
            with sums_by(who), of.running():
                return run_step(twin, twin.model, step, at, widen=True)

        trials = []
        for who in sums:
            right = expected(state, who)
            unrounded = {fqn: FLOAT32 if v.compute is Precision.BFLOAT16 else v for fqn, v in variants.items()}
            wide = Reference(twin.model, unrounded, rounds=False)
            rounding = differences(expected(state, who, wide), right)
            middle = sorted(rounding.values())[len(rounding) // 2]
            response = [differences(expected(perturbed(state, seed), who), right) for seed in range(3)]
            typical = max(sorted(one.values())[len(one) // 2] for one in response)
            actual = differences(found, right)
            bounds = {
                key: max(LEAST, 8 * max(one[key] for one in response), 8 * typical, max(rounding[key], middle) / 4)
                for key in actual
            }
            over = {key: value / bounds[key] for key, value in actual.items()}
            key = max(over, key=lambda key: over[key])
            trials.append((over[key], key, who, right, actual, bounds))
        most, key, who, right, actual, bounds = min(trials, key=lambda trial: trial[0])
        sums, worst = (who,), max(worst, most)
        if most > 1:
            raise Wrong(f"{label}, step {step}: {key} differs by {actual[key]:.1e}, at most {bounds[key]:.1e} expected")
        if step == 0:
            for fqn in list(variants)[:swaps]:
                swapped = attrs.evolve(OTHER[str(variants[fqn].compute)], output=variants[fqn].output)
                other = Reference(twin.model, {**variants, fqn: swapped})
                changed = differences(expected(state, who, other), right)
                seen_swaps += 1
                unseen += all(value <= bounds[key] for key, value in changed.items())
        optimizer.step()
    used = {fqn for fqn in variants if any(key.startswith(f"gradient of {fqn}") for key in found)}
    check_formats(job, variants, used)
    applied.remove()
    restore(job.model, start)
    again = run_step(job, job.model, 0)
    if any(not torch.equal(plain[key], again[key]) for key in plain):
        raise Wrong(f"{label}: after remove() the model is not what it was")
    return worst, seen_swaps, unseen


def run(name: str, swaps: int = 6) -> Outcome:
    """One job through everything."""
    torch.set_num_threads(1)
    start = time.monotonic()
    outcome = Outcome(name, "right")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = made_plan(name)
            outcome = attrs.evolve(outcome, operators=len(plan.operator_ids))
            for label, wanted in plans_of(plan):
                variants = decided(plan, wanted)
                worst, told, unseen = tried(name, label, variants, plan, swaps)
                outcome = attrs.evolve(
                    outcome, steps=outcome.steps + STEPS, worst=max(outcome.worst, worst), swaps=outcome.swaps + told,
                    unseen=outcome.unseen + unseen,
                )  # fmt: skip
    except Refused as error:
        outcome = attrs.evolve(outcome, status="refused", detail=str(error))
    except QSyncError as error:
        try:
            refuse(str(error))
        except (Refused, Wrong) as judged:
            outcome = attrs.evolve(outcome, status="refused" if isinstance(judged, Refused) else "failed", detail=str(judged))
    except Wrong as error:
        outcome = attrs.evolve(outcome, status="failed" if "Traceback" in str(error) else "silent", detail=str(error))
    except Exception:
        outcome = attrs.evolve(outcome, status="failed", detail=traceback.format_exc()[-2500:])
    return attrs.evolve(outcome, seconds=round(time.monotonic() - start, 1))


def run_all(names: list[str], jobs: int) -> list[Outcome]:
    """In processes."""
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        found = []
        for outcome in pool.imap_unordered(run, names):
            print(json.dumps(attrs.asdict(outcome)), file=sys.stderr, flush=True)
            found.append(outcome)
    return found


def rows_of(found: list[Outcome]) -> list[dict[str, Any]]:
    """The rows T1."""
    count = Counter(outcome.status for outcome in found)
    swaps, unseen = sum(o.swaps for o in found), sum(o.unseen for o in found)
    spread = (
        f"{len(found)} jobs: {count['right']} right ({sum(o.steps for o in found)} steps under 3 plans each), "
        f"{count['refused']} refused in a sentence ({', '.join(o.name for o in found if o.status == 'refused') or 'none'}); "
        f"{count['failed']} failed with a traceback or a refusal that names nothing; largest difference "
        f"{max((o.worst for o in found), default=0):.2f} of its bound; of {swaps} plans with one operator changed {swaps - unseen} "
        "were told apart"
    )
    what = "jobs of the zoo under plans: other numbers than an independent reference, without a word"
    return [{"id": "T1", "what": what, "value": count["silent"], "unit": "jobs", "spread": spread, "target": "0"}]


def main() -> None:
    """Run, print, and write the row T1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs, comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or list(ZOO)
    found = sorted(run_all(names, options.jobs), key=lambda outcome: list(ZOO).index(outcome.name))
    rows = rows_of(found)
    print(json.dumps(rows, indent=2))
    if not options.no_write and not options.only:
        write_rows("robustness", rows, "python bench/robustness/zoo_runs.py")
    if any(outcome.status in ("silent", "failed") for outcome in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Row L6: replays of one graph round without bias and no two alike.  Row L7: fused kernels against float64."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator

import attrs
import torch
import torch.nn.functional as F

import qsync_torch
from kernels.bench import Bench, Row
from kernels.whole_model import Setting, compiled
from qsync_core.ir.chain import Activation
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelBackend
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.quantize import build_quantize
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.producers import BATCH_NORM, EPS, FORMS, LAYER_NORM, RMS_NORM, Producer, variant_of
from qsync_torch.conformance.subject import Subject

REPLAYS = 4_000
SHAPES, PART = 200, 50
"""Random shapes of L7, and after how many of them the row is written anew."""
DRAWS = 256
INT8 = Precision.INT8
_FUNCTIONS = {
    Activation.NONE: lambda z: z,
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda z: F.gelu(z, approximate="tanh"),
    Activation.SILU: F.silu,
}


def replay_rows(bench: Bench) -> Iterator[Row]:
    """L6, of a layer norm and a linear whose products are all int8: as they are, and with the chain fused."""
    count = 40 if bench.quick else REPLAYS
    worst, said = 0.0, []
    for title, setting in (("unfused", None), ("fused", Setting("fused", fused=True, saved="int8"))):
        if setting is not None and getattr(qsync_torch, "compile", None) is None:
            bench.say("L6 fused: this version of qsync-torch has no qsync_torch.compile")
            continue
        drawn, exact = _drawn(bench.device, setting, count)
        if any(drawn[:, column].unique().numel() < count for column in range(drawn.shape[1])):
            raise RuntimeError(f"L6 {title}: of {count} replays some gave the same result to the last bit")
        errors = (drawn.mean(0) - exact) / (drawn.std(0) / math.sqrt(count))
        said.append(f"{title}: output {errors[0]:+.2f}, gradient of the weight {errors[1]:+.2f}")
        worst = max(worst, errors.abs().max().item())
    how = "replays of a captured step" if bench.device.type == "cuda" else "eager steps (a CPU has no graphs)"
    what = f"{count} {how}, int8 forward and backward: largest distance of a mean from the exact value, no two alike"
    yield bench.row("L6", what, worst, "standard errors", "≤ 3", "; ".join(said))


def _drawn(device: torch.device, setting: Setting | None, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections of output and weight gradient in every step, (count, 2), and what they are in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 48, bias=False)).to(device)
    x, along = torch.randn(32, 64, device=device), torch.randn(32, 48, device=device)
    across, weight = torch.randn(48, 64, device=device), model[1].weight
    normalized = F.layer_norm(x.double(), (64,))
    # Detached: a graph kept of the default stream would tie the captured backward to that stream.
    plain = weight.detach().double()
    exact = torch.stack([(normalized @ plain.t() * along).sum(), (along.double().t() @ normalized * across).sum()])
    variant = attrs.evolve(Variant.of(INT8), output=Precision.FLOAT32, grad_input=INT8, grad_weight=INT8)
    applied = qsync_torch.apply_(model, {OpId("1"): variant}, backend="triton+aten" if device.type == "cuda" else "aten")
    run = model if setting is None else compiled(model, setting, device)

    def step() -> torch.Tensor:
        weight.grad = None
        y = run(x)
        (y * along).sum().backward()
        return torch.stack([(y.detach().double() * along).sum(), (weight.grad.double() * across).sum()])

    replay, found = _captured(step, device)
    drawn = torch.empty(count, 2, dtype=torch.float64, device=device)
    for i in range(count):
        applied.advance()  # as an optimizer's step would: a step draws other numbers than the one before
        drawn[i] = found if (made := replay()) is None else made
    return drawn, exact


def _captured(step: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], torch.Tensor | None], torch.Tensor]:
    """What runs one more step, and where its result is then."""
    if device.type != "cuda":
        return step, step()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph.replay, found


def producer_rows(bench: Bench, words: str = "") -> Iterator[Row]:
    """L7-gradients and L7, of every backend that offers producers here (of those with one of the words in their names); L7 after
    every few shapes, the worst so far."""
    backends = {**bench.backends.by_name, "aten": AtenBackend()}
    backends = {name: backend for name, backend in backends.items() if any(word in name for word in words.split("|"))}
    subjects = {name: Subject(backend, bench.device, 1) for name, backend in backends.items()}

    def row(id_: str, found: dict[str, list[tuple[float, str]]], unit: str, bound: str, what: str) -> Row:
        if not found:
            raise RuntimeError("no backend here offers producers")
        ours = "triton" if "triton" in found else next(iter(found))
        each = {name: max(entries, key=lambda entry: entry[0]) for name, entries in found.items()}
        said = "; ".join(f"{name} {value:.2f} ({where})" for name, (value, where) in each.items())
        return bench.row(id_, f"fused kernels of {ours}: {what}", each[ours][0], unit, bound, said)

    errors: dict[str, list[tuple[float, str]]] = {}
    for name, subject in subjects.items():
        for form in FORMS:
            problem = Producer.of(form, variant_of(saved=Precision.FLOAT32 if form == "relu" else INT8), (96, 40), bench.device, 7)
            if not _is_refused(problem, subject):
                errors.setdefault(name, []).extend(_gradient_errors(subject, problem, 24 if bench.quick else DRAWS))
    what = "gradients from what was kept in int8: largest distance of a mean from the exact"
    yield row("L7-gradients", errors, "standard errors", "≤ 4", what)
    ratios: dict[str, list[tuple[float, str]]] = {}
    shapes, part = (12, 6) if bench.quick else (SHAPES, PART)
    for number in range(shapes):
        problem = _random_problem(number, bench.device)
        for name, subject in subjects.items():
            if not _is_refused(problem, subject):
                ratios.setdefault(name, []).extend(_error_ratios(backends[name], subject, problem))
        if (number + 1) % part == 0:
            what = "error against float64 over that of PyTorch's unfused operators in the same format, worst of"
            yield row("L7", ratios, "ratio", "≤ 2", f"{what} {number + 1} shapes")


def _is_refused(problem: Producer, subject: Subject) -> bool:
    """Whether the backend has reasons against one of its two kernels."""
    ops = (f"{problem.name}.output", f"{problem.name}.grad_input")
    return any(subject.refuses(op, problem.variant, (problem.shape,), chain=problem.chain) for op in ops)


def _random_problem(number: int, device: torch.device) -> Producer:
    choose = random.Random(number)
    form, output = choose.choice(list(FORMS)), choose.choice((Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16))
    shape = (choose.choice((12, 60, 210, 1176, 6272)), choose.choice((8, 17, 64, 100, 256, 768)))
    rows = FORMS[form][0] != BATCH_NORM and choose.random() < 0.5
    granularity = Granularity.PER_ROW if rows else Granularity.PER_TENSOR
    variant = variant_of(saved=output, output=output, granularity=granularity, rounding=Rounding.NEAREST)
    return Producer.of(form, variant, shape, device, number, mean=choose.choice((0.0, 2.0)), deviation=choose.choice((1.0, 3.0)))


def _unfused(problem: Producer, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """PyTorch's operators one by one, each rounding its result to ``dtype``; parameters as they are."""
    residual = None if problem.residual is None else problem.residual.to(dtype)
    parameters = [None if p is None else p.to(dtype) for p in (problem.weight, problem.bias)]
    if problem.name == BATCH_NORM:
        z = F.batch_norm(x, None, None, *parameters, training=True, eps=EPS)
        z = z if residual is None else z + residual
    elif problem.name == LAYER_NORM:
        z = F.layer_norm(x if residual is None else x + residual, (x.shape[1],), *parameters, eps=EPS)
    elif problem.name == RMS_NORM:
        z = F.rms_norm(x if residual is None else x + residual, (x.shape[1],), parameters[0], eps=EPS)
    else:
        z = x
    y = _FUNCTIONS[problem.chain.activation](z)
    return y if problem.factor is None else y * problem.factor.to(dtype)


def _error_ratios(backend: KernelBackend, subject: Subject, problem: Producer) -> Iterator[tuple[float, str]]:
    """Of the result, its copy, and the gradient of the input: our error over PyTorch's, each in the norm."""
    title = f"{problem.name} {tuple(problem.x.shape)} {problem.variant.output} {problem.chain}"
    outputs, dtype = Outputs(subject.device), problem.x.dtype
    exact_x, plain_x = (problem.x.clone().to(kind).requires_grad_() for kind in (torch.float64, dtype))
    exact, plain = _unfused(problem, exact_x, torch.float64), _unfused(problem, plain_x, dtype)
    (kernel,) = problem.kernels(subject)
    written = problem.run(kernel, outputs)
    yield _ratio(written.out, plain, exact), f"result of {title}"
    q, scale = torch.empty_like(plain, dtype=torch.int8), torch.empty_like(written.scale)
    build_quantize(problem.variant)(plain.detach(), q, scale, None, 1, 2)
    copies = [
        copy.double() * of.double()[:, None] if of.numel() > 1 else copy.double() * of.double()
        for copy, of in ((written.q, written.scale), (q, scale))
    ]
    yield _ratio(copies[0], copies[1], exact), f"copy of {title}"
    grad = floats(tuple(problem.x.shape), torch.float32, subject.device, 50).to(dtype)
    (exact_grad,), (plain_grad,) = (torch.autograd.grad(y, x, grad.to(y.dtype)) for y, x in ((exact, exact_x), (plain, plain_x)))
    kept = problem.x if written.sum is None else written.sum
    (backward,) = problem.backward().kernels(subject)
    found = problem.run_backward(backward, outputs, grad, kept, None, written.mean, written.spread, written.bits)
    yield _ratio(found.x, plain_grad, exact_grad), f"gradient of {title}"


def _ratio(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> float:
    """Where PyTorch happens to be exact, a rounding of the format counts as its error."""
    smallest = torch.finfo(plain.dtype if plain.dtype.is_floating_point else torch.float32).eps / 8 * exact.norm()
    return ((ours.double() - exact).norm() / torch.maximum((plain.double() - exact).norm(), smallest).clamp(min=1e-30)).item()


def _gradient_errors(subject: Subject, problem: Producer, draws: int) -> Iterator[tuple[float, str]]:
    """Means over draws of the projected gradients, in standard errors from float64's."""
    outputs, grad = Outputs(subject.device), floats(tuple(problem.x.shape), torch.float32, subject.device, 50)
    x = problem.x.clone().double().requires_grad_()
    parameters = {name: p for name in ("weight", "bias") if (p := getattr(problem, name)) is not None}
    leaves = {name: p.double().requires_grad_() for name, p in parameters.items()}
    exact = torch.autograd.grad(_unfused(attrs.evolve(problem, **leaves), x, torch.float64), (x, *leaves.values()), grad.double())
    along = [floats(tuple(g.shape), torch.float32, subject.device, 60 + i).double() for i, g in enumerate(exact)]
    (forward,), (backward,) = (one.kernels(subject) for one in (problem, problem.backward()))
    found: list[list[float]] = []
    for draw in range(draws):
        w = problem.run(forward, outputs, offset=draw)
        kept = (problem.x, None) if w.x_q is None else (w.x_q, w.x_scale)
        made = problem.run_backward(backward, outputs, grad, *kept, w.mean, w.spread, w.bits, w.factor_q, w.factor_scale)
        gradients = [made.x, *(g for g in (made.weight, made.bias) if g is not None)]
        found.append([(g.double() * a).sum().item() for g, a in zip(gradients, along, strict=True)])
    for name, values, wanted, a in zip(("x", "weight", "bias"), zip(*found, strict=True), exact, along, strict=False):
        true, spread = (wanted * a).sum().item(), statistics.stdev(values) / math.sqrt(draws)
        # What draws do not change has float32's errors alone.
        allowed = max(spread, 1e-5 * (wanted.abs() * a.abs()).sum().item())
        yield abs(statistics.fmean(values) - true) / allowed, f"{name} of {problem.name} {problem.chain}"

"""The producers' part of the table: every chain in every format, and the numbers that kernels stumble over."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import attrs
import torch

from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.conformance.calls import Call, Case, Entry
from qsync_torch.conformance.operands import floats
from qsync_torch.conformance.producers import (
    BATCH_NORM,
    FORMS,
    GLU,
    LAYER_NORM,
    NORMS,
    RMS_NORM,
    SIGNATURES,
    Backward,
    Producer,
    variant_of,
)  # fmt: skip
from qsync_torch.conformance.products import FLOATS

INT8, FLOAT32 = Precision.INT8, Precision.FLOAT32
TENSOR, ROW = Granularity.PER_TENSOR, Granularity.PER_ROW
NEAREST, STOCHASTIC = Rounding.NEAREST, Rounding.STOCHASTIC
KEPT = (FLOAT32, INT8)
SHAPES = [(1, 1), (1, 9), (6, 1), (30, 13), (56, 64), (84, 200), (420, 24)]
"""One position, one channel, no multiple of 8 channels, more positions than a program takes."""
COPIED = [(56, 40), (1050, 24), (30, 13), (0, 16)]
Change = Callable[[Producer], Producer]


def unchanged(problem: Producer) -> Producer:
    """Leave a call as it was drawn."""
    return problem


def rows_of_all_magnitudes(problem: Producer) -> Producer:
    """Each row has another largest magnitude."""
    return problem.changed(x=problem.x * torch.logspace(-3, 3, len(problem.x), device=problem.x.device)[:, None])


def without(missing: str, problem: Producer) -> Producer:
    """``affine=False``, or a layer norm without a bias."""
    return problem.changed(**{name: None for name in ("weight", "bias") if name in missing})


def large_means(problem: Producer) -> Producer:
    """A large mean beside a small deviation: a mean of squares minus a squared mean has no digit left."""
    small = problem.residual is not None and problem.name != BATCH_NORM
    residual = problem.residual * 0.5 if small and problem.residual is not None else problem.residual
    return problem.changed(x=(problem.x - 0.5) / 4 + 3000, residual=residual)


def large_numbers(problem: Producer) -> Producer:
    """float16 ends at 65,504, and so do squares of 256; arithmetic between reading and writing is wider."""
    factor = None if problem.factor is None else problem.factor.clamp(-1, 1)
    return problem.changed(x=(problem.x.float() * 8000).clamp(-6e4, 6e4).half(), factor=factor)


def equal_numbers(every: int, problem: Producer) -> Producer:
    """All channels, or every third, without variance: x̂ is 0, σ⁻¹ is 1/sqrt(eps), and zeros have the scale 1."""
    x = problem.x.clone()
    x[:, ::every] = 3.0
    if every > 1:
        return problem.changed(x=x)
    zeros = {name: torch.zeros_like(value) for name in ("residual", "bias") if (value := getattr(problem, name)) is not None}
    return problem.changed(x=x, **zeros)


def of_one_sign(sign: float, problem: Producer) -> Producer:
    """The largest magnitude is that of the smallest number, or of the largest, and behind a ReLU never of a negative one."""
    bias = None if problem.bias is None else torch.full_like(problem.bias, 20.0 * sign)
    return problem.changed(x=problem.x.abs() * sign, bias=bias)


def positive_weights(problem: Producer) -> Producer:
    """No channel is nearly closed."""
    changes = {name: value.abs() + 0.1 for name in ("weight", "factor") if (value := getattr(problem, name)) is not None}
    return problem.changed(**changes)


def largest_on_the_diagonal(problem: Producer) -> Producer:
    """Row i has its largest value at place i."""
    problem.x.diagonal().fill_(300.0)
    return problem


def open_everywhere(problem: Producer) -> Producer:
    """No ReLU is closed, and the chain copies its gradient."""
    bias = None if problem.bias is None else torch.full_like(problem.bias, 9.0)
    return problem.changed(bias=bias, chain=attrs.evolve(problem.chain, grad_copy=True))


def forward_call(
    form: str, variant: Variant, shape: tuple[int, int], change: Change, seed: int, device: torch.device
) -> Producer:  # fmt: skip
    """A forward call, changed."""
    return change(Producer.of(form, variant, shape, device, seed))


def backward_call(
    form: str, variant: Variant, shape: tuple[int, int], change: Change, seed: int, device: torch.device
) -> Backward:  # fmt: skip
    """The backward call of one that is changed."""
    return forward_call(form, variant, shape, change, seed, device).backward()


def copying_call(
    form: str, variant: Variant, shape: tuple[int, int], multiplied: bool, parts: int, seed: int, device: torch.device
) -> Backward:  # fmt: skip
    """A backward call of a batch norm that copies its gradient, perhaps times factors, and takes it in one part or two."""
    problem = Producer.of(form, variant, shape, device, seed)
    problem = problem.changed(chain=attrs.evolve(problem.chain, grad_copy=True, grad_sum=parts == 2))
    call = problem.backward()
    multiplier = floats((shape[1],), torch.float32, device, 31).abs() + 0.1 if multiplied else None
    return call.changed(multiplier=multiplier, other=problem.backward(51).grad if parts == 2 else None)


def random_call(op: str, number: int) -> Case:
    """Shapes of no particular kind, in every combination of chains, formats and roundings."""
    choose = random.Random(number)
    name, _, part = op.partition(".")
    form, output = choose.choice([form for form in FORMS if FORMS[form][0] == name]), choose.choice(FLOATS)
    shape = (choose.choice((1, 2, 5, 12, 60, 210)), choose.choice((1, 3, 8, 17, 64, 100)))
    granularity = ROW if name != BATCH_NORM and part == "output" and choose.random() < 0.5 else TENSOR
    saved = INT8 if choose.random() < 0.5 and INT8 in _kept(form) else output
    variant = variant_of(saved=saved, output=output, granularity=granularity, rounding=choose.choice(list(Rounding)))
    mean, deviation = choose.choice((0.0, 4.0)), choose.choice((1.0, 1e-3 if part == "output" else 0.1, 30.0))

    def draw(device: torch.device) -> Call:
        problem = Producer.of(form, variant, shape, device, number, mean=mean, deviation=deviation)
        return problem if part == "output" else problem.backward(number)

    how = f"to {output}, kept in {saved}, by {granularity} {variant.rounding}, mean {mean:g}, deviation {deviation:g}"
    return Case(f"{op}, random {number}: {form} {shape} {how}", draw)


def entry_of(op: str) -> Entry:
    """The table's entry of one producer, forward or backward."""
    name, _, part = op.partition(".")
    call: Callable[..., Call] = forward_call if part == "output" else backward_call

    def case(what: str, form: str, variant: Variant, shape: tuple[int, int], change: Change = unchanged, seed: int = 3) -> Case:
        return Case(f"{op}, {form}, {what}", functools.partial(call, form, variant, shape, change, seed))

    values = functools.partial(_forward, case) if part == "output" else functools.partial(_backward, case)
    forms = [form for form, (producer, _) in FORMS.items() if producer == name]
    found = Entry(
        values=[one for form in forms for one in values(form)],
        typical=[case(f"kept in {saved}", form, _nearest(form, saved), (56, 40)) for form in forms for saved in _kept(form)],
        ones=[
            case(f"{shape}, kept in {saved}", form, _nearest(form, saved), shape)
            for form in forms
            for saved in _kept(form)
            for shape in ((1, 1), (1, 40), (42, 1))
        ],
    )
    found.values.extend(random_call(op, number) for number in range(12))
    affine = attrs.evolve(variant_of(), symmetric=False)
    found.impossible["a zero point"] = affine, found.typical[0].draw(torch.device("cpu")).asked.shapes
    if part == "output":
        _add_copies(found, case, forms)
    elif name == BATCH_NORM:
        _add_copies_of_gradients(found, case, forms)
    elif name == GLU:
        _add_copies_again(found, forms)
        _add_maxima(found, forms)
    return found


def _kept(form: str) -> tuple[Precision, ...]:
    name, chain = FORMS[form]
    return (FLOAT32,) if name not in NORMS and chain.activation is Activation.RELU else KEPT


def _nearest(form: str, saved: Precision) -> Variant:
    return variant_of(saved=saved, rounding=NEAREST)


def _normalized(form: str) -> bool:
    return FORMS[form][0] in NORMS


def _forward(case: Callable[..., Case], form: str) -> Iterator[Case]:
    for output, saved in itertools.product(FLOATS, _kept(form)):
        variant = variant_of(saved=saved if saved.needs_scale else output, output=output, rounding=NEAREST)
        yield case(f"{output}, kept in {saved}", form, variant, (56, 40))
    for shape in SHAPES:
        yield case(str(shape), form, variant_of(), shape)
    if FORMS[form][0] != BATCH_NORM:
        for by, rounding in itertools.product((TENSOR, ROW), Rounding):
            variant = variant_of(granularity=by, rounding=rounding)
            yield case(f"by {by} {rounding}", form, variant, (24, 56), rows_of_all_magnitudes)
        for columns, saved in itertools.product((7, 129), _kept(form)):
            variant = variant_of(saved=saved, granularity=ROW, rounding=NEAREST)
            yield case(f"largest of {columns} rows, kept in {saved}", form, variant, (columns, columns), largest_on_the_diagonal)
    yield case("float8", form, variant_of(Precision.FLOAT8_E4M3FN), (42, 24))
    for output in FLOATS:
        yield case(f"{output} without a copy", form, variant_of(output, saved=output, output=output), (42, 24))
    kept = _kept(form)[-1]
    if _normalized(form):
        yield case("large means", form, variant_of(saved=INT8), (70, 24), large_means)
    yield from _without_parameters(case, form)
    half = variant_of(output=Precision.FLOAT16, saved=Precision.FLOAT16)
    yield case("large numbers", form, half, (28, 40), large_numbers)
    for every in (1, 3):
        change = functools.partial(equal_numbers, every)
        yield case(f"equal numbers in every {every}", form, variant_of(saved=kept), (28, 16), change)
    for sign in (1.0, -1.0):
        yield case(f"of sign {sign:+.0f}", form, variant_of(rounding=NEAREST), (28, 16), functools.partial(of_one_sign, sign))
    for saved in _kept(form):
        yield case(f"empty, kept in {saved}", form, variant_of(saved=saved), (0, 16))


def _backward(case: Callable[..., Case], form: str) -> Iterator[Case]:
    for saved, output in itertools.product(_kept(form), FLOATS):
        variant = variant_of(saved=saved if saved.needs_scale else output, output=output)
        yield case(f"{output}, kept in {saved}", form, variant, (56, 40))
    for saved, shape in itertools.product(_kept(form), (*SHAPES, (1050, 24), (0, 16))):
        yield case(f"{shape}, kept in {saved}", form, variant_of(saved=saved), shape)
    yield from _without_parameters(case, form)
    if _normalized(form):
        yield case("equal numbers", form, variant_of(), (28, 16), functools.partial(equal_numbers, 1))


def _without_parameters(case: Callable[..., Case], form: str) -> Iterator[Case]:
    for missing in ("weight", "bias", "weight and bias") if _normalized(form) else ():
        yield case(f"without {missing}", form, variant_of(), (35, 17), functools.partial(without, missing))


def _add_copies(entry: Entry, case: Callable[..., Case], forms: list[str]) -> None:
    for form in forms:
        edge = case("edges", form, variant_of(saved=_kept(form)[-1], rounding=NEAREST), (21, 65), positive_weights)
        entry.edges.append((edge, "x", 300.0))
        by = TENSOR if FORMS[form][0] == BATCH_NORM else ROW
        if FORMS[form][1].residual or form in (BATCH_NORM, LAYER_NORM, RMS_NORM, "gelu", "glu silu"):
            entry.drawn.append(case("draws", form, variant_of(saved=INT8, granularity=by), (56, 40)))


def _add_copies_of_gradients(entry: Entry, case: Callable[..., Case], forms: list[str]) -> None:
    for form, saved in itertools.product(forms, KEPT):
        for shape, multiplied, parts in ((shape, multiplied, 1) for shape in COPIED for multiplied in (False, True)):
            draw = functools.partial(copying_call, form, variant_of(saved=saved), shape, multiplied, parts, 30)
            name = f"batch_norm.grad_input, {form}, copy{' times factors' if multiplied else ''}, {shape}, kept in {saved}"
            entry.values.append(Case(name, draw))
        draw = functools.partial(copying_call, form, variant_of(saved=saved, rounding=NEAREST), (56, 40), True, 1, 30)
        entry.typical.append(Case(f"batch_norm.grad_input, {form}, copy, kept in {saved}", draw))
    for form in forms:
        entry.edges.append((case("edges", form, variant_of(), (42, 40), open_everywhere), "grad", 300.0))
        draw = functools.partial(copying_call, form, variant_of(), (56, 40), False, 1, 30)
        entry.drawn.append(Case(f"batch_norm.grad_input, {form}, draws", draw))


def again_call(form: str, variant: Variant, shape: tuple[int, int], seed: int, device: torch.device) -> Backward:
    """A backward call of a gated unit that writes the copy of its result again."""
    problem = Producer.of(form, variant, shape, device, seed)
    return problem.changed(chain=attrs.evolve(problem.chain, copy_again=True)).backward()


def _add_copies_again(entry: Entry, forms: list[str]) -> None:
    for form, by in itertools.product(forms, (TENSOR, ROW)):
        for saved, rounding in itertools.product(_kept(form), (NEAREST, STOCHASTIC)):
            for shape in ((30, 13), (56, 40), (0, 16)):
                variant = variant_of(saved=saved, granularity=by, rounding=rounding)
                name = f"glu.grad_input, {form}, copy again by {by}, {shape}, kept in {saved}, {rounding}"
                entry.values.append(Case(name, functools.partial(again_call, form, variant, shape, 3)))
        draw = functools.partial(again_call, form, variant_of(granularity=by), (56, 40), 3)
        entry.drawn.append(Case(f"glu.grad_input, {form}, copy again by {by}, draws", draw))


def maxima_call(form: str, variant: Variant, shape: tuple[int, int], seed: int, device: torch.device) -> Backward:
    """A backward call of a gated unit that writes the maxima of its gradients, one of them times very different factors."""
    problem = Producer.of(form, variant, shape, device, seed)
    call = problem.changed(chain=attrs.evolve(problem.chain, grad_maxima=True)).backward()
    return call.changed(multiplier=torch.logspace(-2, 2, shape[1], device=device))


def _add_maxima(entry: Entry, forms: list[str]) -> None:
    for form in forms:
        for saved, output in itertools.product(_kept(form), FLOATS):
            for shape in ((30, 13), (56, 40), (5, 3001), (1, 1), (0, 16)):
                name = f"glu.grad_input, {form}, maxima, {shape}, kept in {saved}, {output}"
                variant = variant_of(saved=saved if saved.needs_scale else output, output=output)
                entry.values.append(Case(name, functools.partial(maxima_call, form, variant, shape, 4)))
        typical = functools.partial(maxima_call, form, variant_of(saved=_kept(form)[0]), (56, 40), 4)
        entry.typical.append(Case(f"glu.grad_input, {form}, maxima", typical))


ENTRIES = {op: entry_of(op) for op in SIGNATURES}
"""The table of all producers."""

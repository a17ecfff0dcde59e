"""Rows K11: what share of the copy rate the producers reach, forward and backward, and their time over PyTorch's own operators.

The bytes are those that the algorithm moves: every operand read once and every result written once; twice where something has to be
known of the whole tensor first, x and the gradient of a batch norm, and x where the copy of rows has one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import torch
from torch.nn import functional

from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_torch.benchmarking.contenders import build_best, compile_ahead
from qsync_torch.benchmarking.peaks import copy_calls
from qsync_torch.benchmarking.race import Thunk, race
from qsync_torch.devices import device_facts
from qsync_torch.timing import rotation_count

from .bench import Bench, Row, best_of, ratio, ratio_spread

_COPY, _UNFUSED = "copy", "PyTorch"
_EPS = 1e-5
INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT16, sixteen_bit=Precision.FLOAT16)
BY_ROW = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)
RELU = ChainForm(Activation.RELU, float_result=False)
ADD_RELU = ChainForm(Activation.RELU, residual=True)
ADD = ChainForm(residual=True)
ALONE = ChainForm(float_result=False)
SWIGLU = ChainForm(Activation.SILU, float_result=False)
GELU = ChainForm(Activation.GELU, float_result=False)


@attrs.frozen
class Case:
    """One kernel of a chain at one size: what is kept for backward is ``variant.saved``, floats are float16."""

    id: str
    op: str
    shape: tuple[int, ...]
    chain: ChainForm
    variant: Variant

    @property
    def label(self) -> str:
        """As people read it."""
        kept = "int8" if self.variant.saved.needs_scale else "float16"
        parts = [self.op, "×".join(map(str, self.shape)), *(f"{k}={v}" for k, v in self.chain.attributes.items()), f"keeps {kept}"]
        return " ".join(parts)

    def request(self, device: torch.device) -> KernelRequest:
        """What backends are asked."""
        kind, capability = device_facts(device)
        return KernelRequest(
            self.op, self.variant, (self.shape,), device_kind=kind, compute_capability=capability, chain=self.chain
        )

    @property
    def moved_bytes(self) -> int:
        """Reads and writes of all elements; what there is one of for each channel or row is not counted."""
        kept = 1 if self.variant.saved.needs_scale else 2
        residual, bits = 2 if self.chain.residual else 0, 1 / 8
        of_batch, is_gated = self.op.startswith("batch_norm"), self.op.startswith("glu")
        if is_gated and self.op.endswith("output"):
            one_scale = self.variant.x_granularity is Granularity.PER_TENSOR
            each = 4 * (2 if one_scale else 1) + 1 + (2 if kept == 1 else 0)
        elif is_gated:
            each = 2 + 2 * kept + 4 + (1 if self.chain.copy_again else 0)
        elif self.op.endswith("output"):
            one_scale = self.variant.x_granularity is Granularity.PER_TENSOR
            each = 2 * (2 if of_batch or one_scale else 1) + residual + 1  # x, the residual, and the copy
            each += 2 if self.chain.float_result else 0
            each += 1 if kept == 1 else 2 if self.op in (Op.LAYER_NORM_OUTPUT, Op.RMS_NORM_OUTPUT) and self.chain.residual else 0
            each += bits if of_batch and self._wants_bits else 0
        else:
            each = (2 + kept) * (2 if of_batch else 1) + 2
            each += residual + 2 * bits if of_batch and self._wants_bits else 0
        return int(each * math.prod(self.shape))

    @property
    def _wants_bits(self) -> bool:
        return self.chain.activation is Activation.RELU and (self.chain.residual or self.variant.saved.needs_scale)

    def operands(self, device: torch.device, seed: int) -> tuple[Any, ...]:
        """Arguments of the kernel, outputs included."""
        generator = torch.Generator(device).manual_seed(seed)
        layout = torch.channels_last if len(self.shape) == 4 else torch.contiguous_format

        def tensor(dtype: torch.dtype = torch.float16, wanted: bool = True) -> torch.Tensor | None:
            return torch.empty(self.shape, dtype=dtype, device=device, memory_format=layout) if wanted else None

        def drawn(wanted: bool = True) -> torch.Tensor | None:
            if not wanted:
                return None
            return torch.randn(self.shape, device=device, generator=generator).to(torch.float16, memory_format=layout)

        def vector(length: int, wanted: bool = True) -> torch.Tensor | None:
            return torch.rand(length, device=device, generator=generator) + 0.5 if wanted else None

        rows, columns, chain, byte = self.shape[0], self.shape[1], self.chain, torch.int8
        saves, of_batch = self.variant.saved.needs_scale, self.op.startswith("batch_norm")
        groups, numbers = columns if of_batch else rows, (seed, seed + 1, 7)
        scales = vector(rows if self.variant.x_granularity is Granularity.PER_ROW else 1)
        stream = torch.empty(1, dtype=torch.int64, device=device)
        copies = (tensor(byte), scales, stream, tensor(byte, saves), vector(groups, saves))
        statistics, parameters = (vector(groups), vector(groups)), (vector(columns), vector(columns))
        bits = None
        if of_batch and self._wants_bits:
            b, c, h, w = self.shape
            bits = torch.zeros((b, h, w, -(-c // 8)), dtype=torch.uint8, device=device)
        if self.op.endswith("output"):
            out = tensor(wanted=chain.float_result)
            if self.op == Op.ACTIVATION_OUTPUT:
                return (drawn(), out, *copies, *numbers)
            if self.op == Op.GLU_OUTPUT:
                return (drawn(), drawn(), out, *copies, tensor(byte, saves), vector(rows, saves), seed, seed + 1, seed + 2, 7)
            if self.op == Op.RMS_NORM_OUTPUT:
                kept = tensor(wanted=chain.residual and not saves)
                return (drawn(), parameters[0], _EPS, drawn(chain.residual), kept, statistics[1], out, *copies, *numbers)
            if self.op == Op.LAYER_NORM_OUTPUT:
                kept = tensor(wanted=chain.residual and not saves)
                return (drawn(), *parameters, _EPS, drawn(chain.residual), kept, *statistics, out, *copies, *numbers)
            most = torch.full((1,), 8.0, device=device) if chain.residual else None
            largest = vector(1, chain.float_result)
            return (drawn(), *parameters, _EPS, drawn(chain.residual), most, *statistics, out, largest, *copies, bits, *numbers)

        def kept_tensor() -> torch.Tensor | None:
            if not saves:
                return drawn()
            return torch.randint(-127, 128, self.shape, dtype=byte, device=device).contiguous(memory_format=layout)

        kept = kept_tensor()
        kept_x, sums = (kept, vector(groups, saves)), (vector(columns), vector(columns))
        if self.op == Op.ACTIVATION_GRAD_INPUT:
            return (drawn(), *kept_x, tensor())
        if self.op == Op.GLU_GRAD_INPUT:
            again = (scales, tensor(byte), seed, stream.zero_()) if chain.copy_again else ()
            return (drawn(), *kept_x, kept_tensor(), vector(rows, saves), tensor(), tensor(), *again)
        if self.op == Op.RMS_NORM_GRAD_INPUT:
            return (drawn(), *kept_x, statistics[1], parameters[0], tensor(), sums[0])
        if self.op == Op.LAYER_NORM_GRAD_INPUT:
            return (drawn(), *kept_x, *statistics, parameters[0], tensor(), *sums)
        gradients = (tensor(), tensor(wanted=chain.residual), *sums)
        return (drawn(), *kept_x, *statistics, *parameters, _EPS, bits, *gradients)

    def unfused(self, operands: tuple[Any, ...]) -> Thunk | None:
        """PyTorch's operators one by one, in float16, without any quantization; of forward kernels only."""
        x = operands[0]
        if self.op == Op.ACTIVATION_OUTPUT:
            return partial(functional.gelu, x)
        if self.op == Op.GLU_OUTPUT:
            return partial(_swiglu, x, operands[1])
        if self.op == Op.RMS_NORM_OUTPUT:
            return partial(_rms_norm, x, operands[1].half(), operands[3])
        if self.op == Op.LAYER_NORM_OUTPUT:
            return partial(_layer_norm, x, operands[1].half(), operands[2].half(), operands[4])
        if self.op == Op.BATCH_NORM_OUTPUT:
            return partial(_batch_norm, x, operands[1], operands[2], operands[4], self.chain.activation)
        return None


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return functional.layer_norm(x if residual is None else x + residual, x.shape[1:], weight, bias, _EPS)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return functional.rms_norm(x if residual is None else x + residual, x.shape[1:], weight, _EPS)


def _swiglu(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return functional.silu(x) * factor


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    z = functional.batch_norm(x, None, None, weight, bias, training=True, eps=_EPS)
    if residual is not None:
        z = z.add_(residual)
    return z.relu_() if activation is Activation.RELU else z


def cases(quick: bool) -> Iterator[Case]:
    """Sizes of ResNet50 at batch 128, of BERT-base at 12 x 384 and of a Llama-like 1B at 4 x 2048; tiny ones to try the script."""
    large, small = ((4, 32, 6, 6), (4, 16, 5, 5)) if quick else ((128, 256, 56, 56), (128, 512, 7, 7))
    narrow, wide = ((24, 64), (24, 96)) if quick else ((4608, 768), (4608, 3072))
    floats = attrs.evolve(INT8, saved=Precision.FLOAT16)
    for part, name in (("output", ""), ("grad_input", "-back")):
        for size, shape in (("", large), ("-small", small)):
            yield Case(f"K11-bn{size}{name}", f"batch_norm.{part}", shape, RELU, INT8)
            yield Case(f"K11-bn-add{size}{name}", f"batch_norm.{part}", shape, ADD_RELU, INT8)
        yield Case(f"K11-bn-float{name}", f"batch_norm.{part}", large, RELU, floats)
        yield Case(f"K11-ln{name}", f"layer_norm.{part}", narrow, ADD, attrs.evolve(BY_ROW, saved=Precision.FLOAT16))
        yield Case(f"K11-ln-kept8{name}", f"layer_norm.{part}", narrow, ADD, BY_ROW)
        yield Case(f"K11-gelu{name}", f"activation.{part}", wide, GELU, BY_ROW)
    yield Case("K11-gelu-one-scale", Op.ACTIVATION_OUTPUT, wide, GELU, INT8)
    stream, gated = ((24, 64), (24, 96)) if quick else ((8192, 2048), (8192, 8192))
    for kept, name in ((floats, ""), (INT8, "-kept8")):
        again = attrs.evolve(SWIGLU, copy_again=kept is INT8)
        yield Case(f"K11-rms{name}", Op.RMS_NORM_OUTPUT, stream, ALONE, attrs.evolve(kept, x_granularity=Granularity.PER_ROW))
        yield Case(f"K11-rms{name}-one-scale", Op.RMS_NORM_OUTPUT, stream, ALONE, kept)
        yield Case(f"K11-rms{name}-back", Op.RMS_NORM_GRAD_INPUT, stream, ALONE, kept)
        yield Case(f"K11-swiglu{name}", Op.GLU_OUTPUT, gated, SWIGLU, attrs.evolve(kept, x_granularity=Granularity.PER_ROW))
        yield Case(f"K11-swiglu{name}-one-scale", Op.GLU_OUTPUT, gated, SWIGLU, kept)
        yield Case(f"K11-swiglu{name}-back", Op.GLU_GRAD_INPUT, gated, again, kept)


def producer_rows(bench: Bench) -> Iterator[Row]:
    """K11: one row for each case that a backend runs."""
    compile_ahead(bench.backends, [case.request(bench.device) for case in cases(bench.quick)])
    for case in cases(bench.quick):
        first = case.operands(bench.device, 0)
        nbytes = sum(operand.nbytes for operand in first if isinstance(operand, torch.Tensor))
        count = rotation_count(nbytes, bench.device, most=16)
        operands = [first, *(case.operands(bench.device, seed) for seed in range(1, count))]
        request = case.request(bench.device)
        configs, thunks = {}, {}
        for name, backend in bench.backends.by_name.items():
            if why := bench.backends.reasons(name, request):
                bench.say(f"{case.label}: {name}: {'; '.join(why)}")
                continue
            configs[name], thunks[name] = build_best(backend, request, operands, bench.device)
        thunks[_COPY] = copy_calls(bench.device)
        if all(call := [case.unfused(set_) for set_ in operands]):
            thunks[_UNFUSED] = tuple(call)
        measured, failures = race(thunks, bench.device, rounds=5 if bench.quick else 15, timer=bench.timer)
        for name, why in failures.items():
            bench.say(f"{case.label}: {name}: {why}")
        best = best_of(measured, configs)
        copy_rate = 2 * thunks[_COPY][0].args[0].nbytes / measured[_COPY].median_ns
        share = case.moved_bytes / copy_rate / measured[best].median_ns
        spread = (
            f"{measured[best].median_ns / 1e3:.1f} µs for {case.moved_bytes / 1e6:.1f} MB, copy {copy_rate / 1e3:.2f} TB/s; "
            f"IQR/median {measured[best].spread:.3f}"
        )
        spread += "".join(
            f"; {name} {measured[name].median_ns / 1e3:.1f} µs, {ratio(measured[name], measured[best]):.2f} of it"
            for name in configs
            if name in measured and name != best
        )
        if _UNFUSED in measured:
            times = ratio(measured[best], measured[_UNFUSED])
            spread += f"; {times:.2f} of PyTorch's float16 operators, {ratio_spread(measured[best], measured[_UNFUSED])}"
        who = f"{best} {configs[best]}".strip()
        yield bench.row(case.id, f"{case.label}: share of the copy rate ({who})", share, "fraction", "reported", spread)

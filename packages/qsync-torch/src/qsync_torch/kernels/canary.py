"""The canary: every kernel runs once on random numbers, and is compared with the exact product, before anything rests on it.

A library may be wrong on one device and right on all others: cuBLAS of CUDA 13.0 returns garbage in 16-bit products under some
shares of a GPU (docs/shared-gpus.md#canary).  So the check is made where the kernels are going to run, on the shapes that they get,
with the settings in force, and its reference uses no library for products (:mod:`qsync_torch.kernels.exact_products`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import attrs
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_core.kernels.choice import ATEN, FLOAT_BACKEND, KernelChoice
from qsync_core.kernels.requests import CallShapes, OperatorRequest, operator_requests
from qsync_torch.aten import float_products
from qsync_torch.aten.quantize import affine_parts, affine_scale, scale_view, write_scale
from qsync_torch.aten.stored_weights import dequantize_weight, quantize_weight
from qsync_torch.devices import device_facts
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.exact_products import STEPS, Factor, Product, problem_of
from qsync_torch.kernels.operands import OUT, REPLACED, Arguments, make_operands, memory_of
from qsync_torch.kernels.rehearsal import rehearse
from qsync_torch.kernels.selection import backend_of, build_kernel, dequantize_request

_CPU_SIZE, _CPU_PIXELS, _CPU_GROUPS = 64, 12, 8
"""Rows and channels, height and width of an image, and groups that are checked on a CPU, about: the kernels are the same."""
_INT8_SCALE = 1e-4
"""Keeps products of integers within float16."""
_SCALE_ERROR = 1e-4
"""What float32 arithmetic may change of a scale, relative, and more."""


@attrs.frozen
class WrongKernel:
    """A kernel whose result is wrong here.

    Attributes:
        request: what was asked.
        role: under which a choice of kernels has it.
        backend: whose kernel.
        problem: what is wrong, in half a sentence.
    """

    request: KernelRequest
    role: str
    backend: str
    problem: str

    def __str__(self) -> str:
        shapes = " and ".join(str(list(shape)) for shape in self.request.shapes)
        return f"{self.role} of {self.backend} in {self.request.variant.label} on {shapes}: {self.problem}"


class Canary:
    """Checks kernels on one device, each once.

    Attributes:
        device: where.
        checked: how many kernels ran.
        wrong: those that are wrong, in the order in which they were found.
        seconds: what it took.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.checked = 0
        self.wrong: list[WrongKernel] = []
        self.seconds = 0.0
        self._known: dict[tuple[object, ...], list[WrongKernel]] = {}

    def of_operator(
        self, call: CallShapes, variant: Variant, choice: KernelChoice = ATEN, *, channels_last: bool = False
    ) -> list[WrongKernel]:
        """Which of an operator's kernels are wrong, forward and backward.

        Args:
            call: its shapes; on a CPU smaller ones are taken.
            variant: how it runs; float formats on PyTorch's own kernels, as autograd calls them.
            choice: whose kernels run an 8-bit one.
            channels_last: of a convolution's float operands.

        Raises:
            BackendError: when a backend refuses a kernel.
        """
        call = smaller(call) if self.device.type == "cpu" else call
        requests = operator_requests(call, variant, *device_facts(self.device))
        if variant.compute.needs_scale:
            return [wrong for asked in requests for wrong in self._eight_bit(asked, choice)]
        stored = self._stored(call, variant) if variant.storage.is_quantized else []
        return [*stored, *self._float(call, variant, requests, channels_last)]

    def rehearse(
        self, operators: Iterable[tuple[CallShapes, Variant, KernelChoice]], tell: Callable[[], None] = lambda: None
    ) -> None:
        """Have the kernels of 8-bit operators on a GPU compiled side by side, before :meth:`of_operator` launches them.

        ``tell`` is called where that is done.
        """
        wanted = dict.fromkeys(
            (asked, _own(asked, choice))
            for call, variant, choice in operators
            for asked in operator_requests(call, variant, *device_facts(self.device))
            if variant.compute.needs_scale
        )
        rehearse((partial(self._launch, *each) for each in wanted if each not in self._known), self.device, tell)

    def _launch(self, asked: OperatorRequest, own: KernelChoice) -> None:
        build_kernel(asked.request, own)(*canary_operands(asked, self.device))

    def of_function(self, key: tuple[object, ...], request: KernelRequest, find: Callable[[], str]) -> list[WrongKernel]:
        """What PyTorch runs beside the adjustable operators, without a backend: batched products, attention.

        Args:
            key: what tells it from others.
            request: its name, format and shapes, for messages.
            find: runs it and says what is wrong.
        """

        def run() -> Iterator[WrongKernel]:
            self.checked += 1
            if problem := find():
                yield WrongKernel(request, request.op, FLOAT_BACKEND, problem)

        return self._once(key, run)

    def _eight_bit(self, asked: OperatorRequest, choice: KernelChoice) -> list[WrongKernel]:
        own = _own(asked, choice)

        def find() -> Iterator[WrongKernel]:
            kernel = build_kernel(asked.request, own)
            self.checked += 1
            if problem := problem_of_kernel(asked, kernel, self.device):
                yield WrongKernel(asked.request, asked.role, backend_of(asked.request, own), problem)

        return self._once((asked, own), find)

    def _stored(self, call: CallShapes, variant: Variant) -> list[WrongKernel]:
        """Whether a weight is read as its storage is defined, bit for bit, in memory that held NaN."""
        request, choice = dequantize_request(self.device, variant.storage, call.w, variant.compute)

        def find() -> Iterator[WrongKernel]:
            dtype = TORCH_DTYPE[variant.compute]
            stored = quantize_weight(torch.randn(call.w, device=self.device, dtype=dtype), variant.storage)
            out = torch.full(call.w, math.nan, device=self.device, dtype=dtype)
            before = memory_of((*stored, out))
            build_kernel(request, choice)(*stored, out)
            self.checked += 1
            if memory_of((*stored, out)) != before:
                yield WrongKernel(request, request.op, backend_of(request, choice), REPLACED)
                return
            differ = int((out != dequantize_weight(stored, variant.storage, call.w, dtype)).sum())
            if differ:
                problem = f"{differ:,} of its {out.numel():,} elements are not what is stored"
                yield WrongKernel(request, request.op, backend_of(request, choice), problem)

        return self._once((request,), find)

    def _float(
        self, call: CallShapes, variant: Variant, requests: tuple[OperatorRequest, ...], channels_last: bool
    ) -> list[WrongKernel]:
        def find() -> Iterator[WrongKernel]:
            products = float_products_of(call, variant, self.device, channels_last)
            problems = {product.what: problem_of(product) for product in products}
            self.checked += len(problems)
            for asked in requests:
                if problem := problems[asked.role.partition(".")[2]]:
                    yield WrongKernel(asked.request, asked.role, FLOAT_BACKEND, problem)

        return self._once((call, variant, channels_last), find)

    def _once(self, key: tuple[object, ...], find: Callable[[], Iterator[WrongKernel]]) -> list[WrongKernel]:
        if key not in self._known:
            begin = time.perf_counter()
            self._known[key] = list(find())
            self.seconds += time.perf_counter() - begin
            self.wrong += self._known[key]
        return self._known[key]


def _own(asked: OperatorRequest, choice: KernelChoice) -> KernelChoice:
    """Who runs one kernel of an operator of this choice."""
    pinned = choice.of(asked.role)
    return KernelChoice(choice.chain, () if pinned is None else ((asked.request.op, pinned),))


def smaller(call: CallShapes) -> CallShapes:
    """A call with fewer rows, channels and pixels, for a CPU to check in milliseconds; calls that differ in size alone become one.

    What remains of each size by eight, in which kernels work, is kept.
    """
    if call.of_rows:
        n, k, rows = (_capped(size) for size in (*call.w, math.prod(call.x[:-1])))
        return attrs.evolve(call, x=(rows, k), w=(n, k), y=(rows, n))
    g, kernel = call.geometry, call.w[2:]
    groups = min(g.groups, _CPU_GROUPS)
    inputs, outputs = _capped(call.w[1]), _capped(call.w[0] // g.groups)
    least = [1 if g.transposed else far + 1 - 2 * pad for far, pad in zip(g.reach(kernel), g.padding, strict=True)]
    image = tuple(max(1, few, min(size, _CPU_PIXELS + size % 2)) for few, size in zip(least, call.x[2:], strict=True))
    geometry = attrs.evolve(g, groups=groups)
    x, y = (1, groups * inputs, *image), (1, groups * outputs, *geometry.output_size(image, kernel))
    return attrs.evolve(call, x=x, w=(groups * outputs, inputs, *kernel), y=y, geometry=geometry)


def _capped(size: int) -> int:
    return size if size <= _CPU_SIZE else _CPU_SIZE + size % 8


def float_products_of(call: CallShapes, variant: Variant, device: torch.device, channels_last: bool = False) -> Iterator[Product]:
    """The products of a float operator on random numbers, forward and as autograd calls them backward."""
    dtype, step = TORCH_DTYPE[variant.compute], STEPS[TORCH_DTYPE[variant.compute]]
    x, w = (torch.randn(shape, device=device, dtype=dtype) for shape in (call.x, call.w))
    bias = torch.randn(call.w[0], device=device, dtype=dtype)
    of_rows, geometry = call.of_rows, call.geometry
    if channels_last and x.dim() == 4 and not of_rows:
        x, w = (operand.to(memory_format=torch.channels_last) for operand in (x, w))
    wanted = [w.requires_grad_()] + ([x.requires_grad_()] if call.input_gradient else [])
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        y = float_products.product(x, w, bias, None if of_rows else geometry)
        grad = torch.randn_like(y)
        grads = torch.autograd.grad(y, wanted, grad)

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1, tensor.shape[-1]) if of_rows else tensor.detach()

    fx, fw, fg = Factor(flat(x)), Factor(w.detach()), Factor(flat(grad))
    yield Product("output", fx, fw, flat(y), step, bias=bias, geometry=geometry)
    yield Product("grad_weight", fg, fx, grads[0], step, geometry=geometry)
    if call.input_gradient:
        yield Product("grad_input", fg, fw, flat(grads[1]), step, geometry=geometry)


def problem_of_kernel(asked: OperatorRequest, kernel: Kernel, device: torch.device) -> str:
    """What is wrong with a kernel, found by calling it, one of ``quantize`` twice; empty where it is right."""
    arguments = canary_operands(asked, device)
    before = memory_of(arguments)

    def problem() -> str:
        kernel(*arguments)
        return problem_of_call(asked, arguments) if memory_of(arguments) == before else REPLACED

    found = problem()
    if found or asked.request.op != Op.QUANTIZE:
        return found
    renew(arguments)
    found = problem()
    return f"of other numbers in the same memory, {found}" if found else ""


def canary_operands(asked: OperatorRequest, device: torch.device) -> Arguments:
    """Random operands for a kernel; the output holds NaN (integers: -128), which a kernel that leaves elements out leaves there."""
    arguments = make_operands(asked, device)
    if asked.request.op == Op.QUANTIZE:
        for argument in (arguments[1], *arguments[7:8]):
            argument.view(torch.int8).fill_(-128)
        return arguments
    if arguments[0].dtype is torch.int8 and not asked.request.op.endswith(".output"):
        arguments[2].mul_(_INT8_SCALE)
    arguments[OUT[asked.request.op.partition(".")[2]]].fill_(math.nan)
    return arguments


def renew(arguments: Arguments) -> None:
    """Other numbers in the same tensor to quantize, the last one much larger: no copy and no scale of an earlier call is right."""
    x = arguments[0].data  # as where another tensor gets this memory, its version says nothing of it
    x.mul_(-2.0)
    if x.numel():
        x[(-1,) * x.dim()] = 300.0


def problem_of_call(asked: OperatorRequest, arguments: Arguments) -> str:
    """What is wrong with what a kernel wrote into its arguments; empty where it is right."""
    request = asked.request
    if request.op == Op.QUANTIZE:
        return _quantize_problem(request, arguments)
    return problem_of(product_of_call(request, arguments))


def product_of_call(request: KernelRequest, arguments: Arguments) -> Product:
    """A kernel's arguments after its call, as a product."""
    variant, geometry, what = request.variant, request.geometry, request.op.partition(".")[2]
    out = arguments[OUT[what]]
    formats = {a.dtype for a in arguments if isinstance(a, torch.Tensor) and a.dim() > 1}
    step = max(STEPS.get(dtype, 0.0) for dtype in formats)
    if what == "output":
        x, x_scale, w, w_scale, bias, _ = arguments
        return Product(what, _activation(x, x_scale, variant), Factor(w, w_scale), out, step, bias, geometry=geometry)
    grad, second, scale, _, *columns = arguments
    if columns:  # the product is linear in its columns
        out = out / columns[0]
    if grad.dtype is torch.int8 and scale.numel() > 1 and what == "grad_input":
        out, scale = out / scale[:, None], torch.ones_like(scale[:1])
    if grad.dtype is torch.int8:  # the scale is of the whole product
        return Product(what, Factor(grad), Factor(second), out, step, scale=scale, geometry=geometry)
    if variant.compute.needs_scale:
        # Saved copies are dequantized to the format of the gradient.
        step = max(step, STEPS[grad.dtype])
    second_factor = Factor(second, scale) if what == "grad_input" else _activation(second, scale, variant)
    return Product(what, Factor(grad), second_factor, out, step, geometry=geometry)


def _activation(x: torch.Tensor, scale: torch.Tensor, variant: Variant) -> Factor:
    if variant.symmetric or not variant.compute.needs_scale:
        return Factor(x, scale)
    scale, zero_point = affine_parts(scale)
    return Factor(x, scale, zero_point)


def _quantize_problem(request: KernelRequest, arguments: Arguments) -> str:
    """Whether each number lies within a step of its copy, each scale is its group's, and a transposed copy is that of the other.

    One by column is of the numbers times their rows' factors.
    """
    x, q, scale, _, _, _, *more = arguments
    variant = request.variant
    if more and more[0] is not None:
        factors = more[0].view(1, -1, *(1,) * (x.dim() - 2)) if x.dim() > 2 else more[0]
        x = x.float() * factors
    if not bool(torch.isfinite(scale).all()):
        return "its scales are not finite"
    zero = None
    if not variant.symmetric:
        scale, zero = affine_parts(scale)
    if request.transposed and variant.x_granularity is Granularity.PER_ROW:
        of_rows, of_columns = scale.split(list(x.shape))
        by_row = _quantize_problem(attrs.evolve(request, transposed=False), (x, q, of_rows, None, 1, 0))
        columns = x.t() if len(more) < 3 else x.t().float() * more[2]
        by_column = _quantize_problem(attrs.evolve(request, transposed=False), (columns, more[1], of_columns, None, 1, 0))
        return by_row or (f"of its transposed copy, {by_column}" if by_column else "")
    step = scale_view(scale, x.dim(), variant.x_granularity, x.shape)
    values = q.float() if zero is None else q.float() - scale_view(zero, x.dim(), variant.x_granularity, x.shape)
    allowed = step if variant.compute is Precision.INT8 else torch.maximum(x.abs() * 2.0**-3, step * 2.0**-9)
    error = ((values * step - x.float()).abs() / (1.01 * allowed + 1e-30)).nan_to_num(torch.inf).max()
    # A copy with too large a scale has small steps only in name, and one row's is lost among those of thousands.
    needed = _needed_scales(x.float(), variant)
    ratio = (step / needed).flatten()
    off = ratio[(ratio - 1).abs().argmax()]
    differs = (more[1].view(torch.int8) != q.view(torch.int8).t()).any() if len(more) > 1 else torch.zeros_like(error)
    worst, times, is_other = torch.stack([error, off, differs.float()]).tolist()
    if not abs(times - 1) <= _SCALE_ERROR:
        return f"one of its scales is {times:.4g} times what its numbers need"
    if not worst <= 1:
        return f"its copies are up to {worst:.1e} steps off"
    return "its transposed copy is another" if is_other else ""


def _needed_scales(x: torch.Tensor, variant: Variant) -> torch.Tensor:
    """The scale of each group of float32 numbers, by which it can be multiplied."""
    first = {Granularity.PER_TENSOR: 0, Granularity.PER_CHANNEL: 1, Granularity.PER_ROW: x.dim() - 1}[variant.x_granularity]
    low, high = (of(x, tuple(range(first, x.dim())), keepdim=True) for of in (torch.amin, torch.amax))
    if not variant.symmetric:
        return affine_scale(low.clamp(max=0), high.clamp(min=0))
    absmax = torch.maximum(-low, high)
    write_scale(absmax, variant.compute, absmax, variant.x_granularity.scale_of_zeros)
    return absmax

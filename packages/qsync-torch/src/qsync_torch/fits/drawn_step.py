"""One training step, drawn: what it allocates and what its kernels have to do, without memory or arithmetic.

Floating-point tensors are on PyTorch's ``meta`` device and have shapes only.  Integers and booleans that are computed from the
batch stay on the CPU with their values, so that a model can ask whether a mask hides anything.  Both count: in training all of them
are on the GPU.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from qsync_core.errors import JobError
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.work import Work
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.failures import first_line
from qsync_torch.fits.as_on_cuda import AsOnCuda, on_meta, tensors_of
from qsync_torch.job import Batch, Job
from qsync_torch.torch_internals import TorchDispatchMode, pytree

PARAMETERS, GRADIENTS, STATE, BATCH = "parameters", "gradients", "optimizer state", "batch"
ACTIVATIONS, WORKSPACE = "activations", "workspace"
PARTS = (PARAMETERS, GRADIENTS, STATE, BATCH, ACTIVATIONS, WORKSPACE)
_BLOCK_BYTES = 512
"""PyTorch's CUDA allocator rounds up to it."""
_TILE, _SPLIT = 64, 1024
"""Rows and columns of the smallest tiles of a product, and how long a sum is at least where libraries split it."""
_FOURIER_CHANNELS = 4
"""cuDNN 9 transforms images of at least so many channels for each pixel of their side: found in ten convolutions on Hopper."""
_PRECISION = {dtype: precision for precision, dtype in TORCH_DTYPE.items()}


@attrs.frozen
class Kernel:
    """What one operator's kernels do.

    Attributes:
        name: ATen's.
        wide: whether it reads float32.
    """

    name: str
    wide: bool
    work: Work


@attrs.frozen
class DrawnStep:
    """A step as it was drawn.

    Attributes:
        batch_size: samples of a micro-batch.
        accumulate: how often the kernels run for one step of the optimizer.
        peak: bytes by part, at the moment of the most.
        trained_bytes: of the parameters that get gradients.
        kernels: operators with kernels of a micro-batch, each with how many do the same.
        update: those of the optimizer's step, likewise.
        seconds: how long drawing took.
    """

    batch_size: int
    accumulate: int
    peak: dict[str, int]
    trained_bytes: int
    kernels: tuple[tuple[Kernel, int], ...]
    update: tuple[tuple[Kernel, int], ...]
    seconds: float

    @property
    def of_step(self) -> Iterator[tuple[Kernel, int]]:
        """The operators of a whole step, and how often each runs."""
        yield from ((kernel, count * self.accumulate) for kernel, count in self.kernels)
        yield from self.update

    @property
    def starts(self) -> int:
        """How many operators it starts."""
        return sum(count for _, count in self.of_step)

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at the moment of the most."""
        return sum(self.peak.values())


class _Memory:
    """Storages that are alive, by part, and their most."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.most = self.now = 0
        self._parts: Any = WeakIdKeyDictionary()

    def see(self, tensors: Iterable[Any], part: str) -> None:
        """Count what is new."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not (tensor.dim() or tensor.device.type == "meta"):
                continue  # an optimizer's counters are on the CPU of a GPU's job, too
            storage = tensor.untyped_storage()
            if storage in self._parts or not storage.nbytes():
                continue
            nbytes = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
            entry = self._parts[storage] = [part, nbytes]
            weakref.finalize(storage, self._forget, entry)
            self._change(part, nbytes)

    def call(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count tensors that are there under another name."""
        for tensor in tensors:
            entry = self._parts.get(tensor.untyped_storage())
            if entry is not None and entry[0] != part:
                self._change(entry[0], -entry[1])
                entry[0] = part
                self._change(part, entry[1])

    def begin(self) -> None:
        """Look for the most from here on."""
        self.most = 0
        self._change(PARAMETERS, 0)

    def need(self, nbytes: int) -> None:
        """Count what a kernel takes while it runs."""
        self._change(WORKSPACE, nbytes)
        self._change(WORKSPACE, -nbytes)

    def _forget(self, entry: list[Any]) -> None:
        self._change(entry[0], -entry[1])

    def _change(self, part: str, nbytes: int) -> None:
        self.alive[part] += nbytes
        self.now += nbytes
        if self.now > self.most:
            self.most, self.peak = self.now, dict(self.alive)


class _Drawing(TorchDispatchMode):
    """Counts what every operator allocates, and what its kernels do."""

    def __init__(self, memory: _Memory, tf32: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.part, self.tf32 = memory, ACTIVATIONS, tf32
        self.kernels: Counter[Kernel] = Counter()
        self.update: Counter[Kernel] = Counter()
        self.updates = self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if _stays_an_integer(args, kwargs, given):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        elif len({tensor.device.type for tensor in given}) > 1:
            args, kwargs = pytree.tree_map(_as_meta, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not (self.updates and self.fused):
            self.memory.see(made, self.part)
        name, work = func.overloadpacket.__name__, _work_of(func, args, kwargs, given, made, result)
        if name in ("convolution", "convolution_backward") and work is not None:
            backward = name == "convolution_backward"
            x, weight, output = args[backward], args[1 + backward], args[0] if backward else made[0]
            self.memory.need(_convolution_workspace(x, weight, output, backward, self.tf32))
            work = attrs.evolve(work, transposed=2 * (1 + backward) * _transposed(x, output, self.tf32))
        if work is not None:
            wide = any(tensor.dtype is torch.float32 for tensor in given[:1] or made)
            (self.update if self.updates else self.kernels)[Kernel(name, wide, work)] += 1
        return result


def _stays_an_integer(args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]) -> bool:
    """Whether a call makes integers or booleans of values that are there, for a device on which they would lose them."""
    if kwargs.get("device") is None or kwargs["device"].type != "meta" or any(t.device.type == "meta" for t in given):
        return False
    if dtype := kwargs.get("dtype"):
        return not (dtype.is_floating_point or dtype.is_complex)
    if given:
        return not any(tensor.is_floating_point() for tensor in given)
    numbers = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, (int, float))]
    return bool(numbers) and all(isinstance(number, int) for number in numbers) and not isinstance(args[0], (list, tuple))


def _as_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" else leaf


def _convolution_workspace(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, backward: bool, tf32: bool) -> int:
    """Bytes that cuDNN takes beside a convolution's operands (docs/fits.md#how).

    Tensor cores read images channels last, so that contiguous ones are copied there and back.  Without them, convolutions of 3 × 3
    have Winograd's tiles, of 36 values for every 16, and 36 for every 9 of the weight; or, forward, of many channels, Fourier
    transforms of inputs and weights, with a copy of each.
    """
    if moved := _transposed(x, result, tf32):
        return moved
    if x.dim() != 4 or _is_channels_last(x) or (x.dtype is not torch.float32 or tf32):
        return 0
    moved = x.nbytes + result.nbytes
    if tuple(weight.shape[2:]) != (3, 3) or x.shape[2:] != result.shape[2:]:
        return 0
    channels, side = x.shape[1], max(x.shape[2:])
    if not backward and channels >= _FOURIER_CHANNELS * side:
        padded = 1 << (side + 1).bit_length()  # the image with its padding, to the next power of two
        spectrum = padded * (padded // 2 + 1) * 8
        return 2 * spectrum * (math.prod(x.shape[:2]) + math.prod(weight.shape[:2])) + weight.nbytes
    return moved * 36 // 16 + 4 * weight.nbytes


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _transposed(x: torch.Tensor, result: torch.Tensor, tf32: bool) -> int:
    """Bytes of contiguous images that tensor cores need channels last."""
    if x.dim() != 4 or _is_channels_last(x) or (x.dtype is torch.float32 and not tf32):
        return 0
    return x.nbytes + result.nbytes


def _work_of(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor], result: Any) -> Work | None:
    """What an operator's kernel reads, writes and multiplies; None for one that only looks at memory in another way."""
    read = {id(tensor.untyped_storage()): tensor for tensor in given}
    in_place = func.overloadpacket.__name__.endswith("_")
    written = [tensor for tensor in made if in_place or id(tensor.untyped_storage()) not in read]
    foreach = in_place and not made  # _foreach_ operators that write to their operands return nothing
    if (not written and not foreach) or not any(tensor.numel() for tensor in (*written, *given)):
        return None
    if func.overloadpacket.__name__ in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"):
        return None
    nbytes = sum(map(_moved, {id(tensor): tensor for tensor in given}.values())) + sum(map(_moved, written))
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return Work(nbytes)
    operations = int(count(*args, **kwargs, out_val=result))
    multiplied = [tensor for tensor in given if tensor.is_floating_point() and tensor.dim() > 1]
    precision = _PRECISION.get(multiplied[0].dtype, Precision.FLOAT32) if multiplied else Precision.FLOAT32
    return Work(nbytes, 1, ((precision, operations),), tiles=_tiles(multiplied, made))


def _moved(tensor: torch.Tensor) -> int:
    """Bytes of its elements, those that a broadcast repeats once."""
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()


def _tiles(multiplied: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """Tiles of a product of matrices; 0 for others, whose tiles libraries choose."""
    if len(made) != 1 or made[0].dim() not in (2, 3) or len(multiplied) < 2:
        return 0.0
    *rest, rows, columns = made[0].shape
    inner = multiplied[-1].shape[-2]
    return math.prod(rest) * math.ceil(rows / _TILE) * math.ceil(columns / _TILE) * max(1, inner // _SPLIT)


def draw(job: Job, batch_size: int, lowered: torch.dtype | None = None, *, tf32: bool = True) -> DrawnStep:
    """Draw the second step of a job, when the optimizer's state is there.

    Args:
        job: with its model anywhere; it gets parameters without memory.
        batch_size: of a micro-batch.
        lowered: the 16-bit format of a plan that lowers all linear layers and convolutions; None as the job is.
        tf32: whether convolutions in float32 may run on tensor cores, as PyTorch has it by default.

    Raises:
        JobError: where the model looks at values that are not there, or calls what has no shapes.
    """
    started = time.perf_counter()
    model = on_meta(job.model)
    batch = _floats_on_meta(job.batch(0, batch_size))
    memory = _Memory()
    base = None if job.amp is None else TORCH_DTYPE[job.base]
    rules = AsOnCuda(base, lowered)
    memory.see(tensors_of(model), PARAMETERS)
    memory.see(batch.tensors, BATCH)
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    drawing = _Drawing(memory, tf32)
    drawing.fused = all(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None:
            group["foreach"] = True  # as on CUDA
        if group.get("fused"):
            group["fused"] = False  # of which the device without memory has no kernels
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p: memory.call([p.grad], GRADIENTS) if p.grad is not None else None)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        for step in range(2):
            if step:
                memory.begin()
                drawing.update.clear()
            with drawing:
                _step(job, batch, optimizer, rules, drawing)
            state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
            memory.see(state, STATE)
            memory.call(state, STATE)
    except JobError:
        raise
    except Exception as error:
        raise JobError(
            f"a step of {job.name} cannot be drawn without values ({first_line(error)}); qsync prepare measures it where it trains"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None
    peak = {part: memory.peak.get(part, 0) for part in PARTS}
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if drawing.fused:  # one kernel in place of those that were drawn: it reads gradients, and reads and writes the others
        nbytes = 3 * trained + 2 * sum(t.nbytes for t in state if t.dim())
        wide = any(kernel.wide for kernel in drawing.update)
        drawing.update = Counter([Kernel("fused", wide, Work(nbytes))])
    kernels, update = tuple(drawing.kernels.items()), tuple(drawing.update.items())
    return DrawnStep(batch_size, job.accumulate, peak, trained, kernels, update, time.perf_counter() - started)


def _step(job: Job, batch: Batch, optimizer: torch.optim.Optimizer, rules: AsOnCuda, drawing: _Drawing) -> None:
    """One step of the training loop."""
    with rules:
        optimizer.zero_grad()
        for _ in range(min(job.accumulate, 2)):  # from the second micro-batch on all are alike
            drawing.kernels.clear()
            drawing.part = ACTIVATIONS
            loss = job.loss(job.model(*batch.args, **batch.kwargs), batch)
            rules.forget_casts()
            drawing.part = WORKSPACE
            end, seed = get_gradient_edge(loss), torch.ones_like(loss)
            del loss
            torch.autograd.backward(end, seed)  # of a tensor it would leave the mode, in which checkpoints compute again
        drawing.updates = True
        optimizer.step()
        drawing.updates = False


def _floats_on_meta(batch: Batch) -> Batch:
    """The batch, of whose floating-point tensors shapes are enough."""
    args, kwargs, target = pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        (batch.args, batch.kwargs, batch.target),
    )
    return Batch(args, kwargs, target)

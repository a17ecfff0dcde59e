"""The Profile: what a model's operators, casts, buckets and optimizer cost on one device type.

Made once per (device, share of it, memory cap, software) by ``qsync profile``.  All times are integer nanoseconds, medians
of repeated measurements.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cached_property

import attrs

from qsync_core.ir import checks
from qsync_core.ir.chain import ChainForm
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage
from qsync_core.ir.variant import Variant


class Compiler(enum.StrEnum):
    """What compiles a model before it is trained."""

    TORCH = "torch.compile"
    QSYNC = "qsync.compile"


@attrs.frozen
class Compiled:
    """How a script compiles its model.

    Attributes:
        by: what compiles it, in its default mode.
        around_ddp: what is compiled is DistributedDataParallel with the model inside, so that graphs are cut at its buckets; else
            the compiled model is inside DistributedDataParallel.
        backend: what turns graphs into code, as ``torch.compile`` calls it.
    """

    by: Compiler = Compiler.TORCH
    around_ddp: bool = False
    backend: str = "inductor"

    def __str__(self) -> str:
        around = " around DistributedDataParallel" if self.around_ddp else ""
        return f"{self.by}{around}" if self.backend == "inductor" else f"{self.by}{around}, backend {self.backend}"


class DeviceKind(enum.StrEnum):
    """Whether kernels run while the CPU goes on (cuda) or the CPU runs them itself (cpu)."""

    CPU = "cpu"
    CUDA = "cuda"


@attrs.frozen
class DeviceType:
    """What a group's devices must match: name, kind, share of the device (0..1], memory cap in bytes (0: none)."""

    name: str
    kind: DeviceKind
    share: float = attrs.field(default=1.0, validator=checks.fraction)
    memory_cap_bytes: int = attrs.field(default=0, validator=checks.non_negative_int)
    compute_capability: str = ""

    @property
    def is_synchronous(self) -> bool:
        """True where the CPU itself runs the kernels, so dispatch and compute never overlap."""
        return self.kind is DeviceKind.CPU


@attrs.frozen
class OpCost:
    """Measured cost of one operator in one variant, without the casts around it.

    Forward starts from operands already in the compute format.  Backward starts from an output gradient already in the
    gradient format and includes dequantizing the operator's own saved copies; the weight gradient comes out in float32.

    Attributes:
        forward_dispatch_ns, backward_dispatch_ns: time the CPU is busy issuing it.
        forward_compute_ns, backward_compute_ns: time the device is busy with it.
        saves_inputs: positions of the inputs that autograd keeps, in the format in which the operator receives them after
            its cast; operators that keep the same tensor share it.
        saves_output: whether autograd keeps the output (relu, softmax).
        saved_own_bytes: bytes that it alone keeps: int8 copies, masks, statistics, low-precision weight copies.
        workspace_bytes: largest temporary allocation during its forward.
        backend, config: who ran it and with which configuration.
        spread: interquartile range of the measured total over its median.
        backward_workspace_bytes: largest temporary allocation during its backward; None: ``workspace_bytes`` is that of both.
    """

    forward_dispatch_ns: int = attrs.field(validator=checks.measured_int)
    forward_compute_ns: int = attrs.field(validator=checks.measured_int)
    backward_dispatch_ns: int = attrs.field(validator=checks.measured_int)
    backward_compute_ns: int = attrs.field(validator=checks.measured_int)
    saves_inputs: tuple[int, ...] = attrs.field(default=(), validator=checks.each(checks.non_negative_int))
    saves_output: bool = False
    saved_own_bytes: int = attrs.field(default=0, validator=checks.measured_int)
    workspace_bytes: int = attrs.field(default=0, validator=checks.measured_int)
    backend: str = "aten"
    config: str = ""
    spread: float = attrs.field(default=0.0, validator=checks.finite)
    backward_workspace_bytes: int | None = attrs.field(default=None, validator=attrs.validators.optional(checks.measured_int))

    def computing(self, forward_ns: int, backward_ns: int) -> OpCost:
        """The same cost with other compute times, made faster than by ``attrs.evolve``."""
        return OpCost(
            self.forward_dispatch_ns,
            forward_ns,
            self.backward_dispatch_ns,
            backward_ns,
            self.saves_inputs,
            self.saves_output,
            self.saved_own_bytes,
            self.workspace_bytes,
            self.backend,
            self.config,
            self.spread,
            self.backward_workspace_bytes,
        )

    @property
    def workspaces(self) -> tuple[int, int]:
        """Largest temporary allocation during its forward, and during its backward."""
        backward = self.backward_workspace_bytes
        return self.workspace_bytes, self.workspace_bytes if backward is None else backward


@attrs.frozen
class ChainCost:
    """Measured cost of a fused chain in one way to run (:class:`qsync_core.ir.semantics.ChainRun`; docs/design/fused-chains.md).

    Attributes:
        chains: the names of those that it holds for.
        cost: of the producer's kernels.  ``saved_own_bytes`` is all that it keeps but an input kept as it is: the 8-bit copy of the
            input with its scales, a sum, statistics, bits; the copy that readers keep is theirs.  ``saves_inputs`` and
            ``saves_output`` say nothing: :func:`qsync_core.ir.semantics.operands_kept` says what is kept.
    """

    chains: tuple[OpId, ...]
    form: ChainForm
    variant: Variant
    cost: OpCost


@attrs.frozen
class CastKey:
    """A kind of cast: from one format to another; with how many scales, which rounding and zero points or none (8-bit targets).

    ``storage``: it dequantizes a weight that is stored so, to ``target``; ``source`` is the target too then.
    """

    source: Precision
    target: Precision
    granularity: Granularity = Granularity.PER_TENSOR
    rounding: Rounding = Rounding.NEAREST
    symmetric: bool = True
    storage: Storage = Storage.AS_IS

    @classmethod
    def dequantizing(cls, storage: Storage, target: Precision) -> CastKey:
        """The cast of a stored weight to a float format."""
        return cls(target, target, storage=storage)


@attrs.frozen
class CastModel:
    """Cost of a cast as a linear function of the number of elements, fitted to measurements (paper, Cost Mapper).

    See docs/design/cost-mapper.md#casting-costs.

    ``cost_ns(n) = max(0, intercept_ns + ns_per_element * n)``, rounded to an integer.  Fixed-point casts include the
    min/max passes.  ``samples`` are the (elements, measured ns) pairs of the fit, ``r2`` its coefficient of determination.
    """

    key: CastKey
    dispatch_ns: int = attrs.field(validator=checks.measured_int)
    intercept_ns: float = attrs.field(validator=checks.measured_rate)
    ns_per_element: float = attrs.field(validator=checks.measured_rate)
    r2: float = attrs.field(validator=checks.finite)
    samples: tuple[tuple[int, int], ...] = attrs.field(default=(), validator=checks.each(checks.each(checks.measured_int)))

    def cost_ns(self, numel: int) -> int:
        """Device time of casting a tensor of ``numel`` elements, in nanoseconds."""
        return min(checks.MAX_MEASURED, max(0, round(self.intercept_ns + self.ns_per_element * numel)))


@attrs.frozen
class CollectiveModel:
    """All-reduce cost of a homogeneous set of ranks: ``alpha_ns + beta_ns_per_byte * bytes``, fitted to the real bucket sizes.

    ``measured`` are (bytes, ns) pairs; ``residuals_ns`` the measured minus fitted time of each.  ``compute_share`` is the share
    of a collective's duration that it takes away from the compute of its own rank (0 on a GPU with free copy engines; measured on
    a CPU, where the collective's threads run on the same cores).
    """

    world_size: int = attrs.field(validator=checks.non_negative_int)
    backend: str
    alpha_ns: float = attrs.field(validator=checks.measured_rate)
    beta_ns_per_byte: float = attrs.field(validator=checks.measured_rate)
    measured: tuple[tuple[int, int], ...] = attrs.field(default=(), validator=checks.each(checks.each(checks.measured_int)))
    residuals_ns: tuple[int, ...] = ()
    compute_share: float = attrs.field(default=0.0, validator=checks.share)

    def cost_ns(self, nbytes: int) -> int:
        """Duration of one all-reduce of ``nbytes``, in nanoseconds; exactly what was measured where that size was."""
        for size, duration in self.measured:
            if size == nbytes:
                return duration
        return min(checks.MAX_MEASURED, max(0, round(self.alpha_ns + self.beta_ns_per_byte * nbytes)))


@attrs.frozen
class StepMeasurement:
    """A whole training step as measured on this device without communication, every adjustable operator at one rung.

    On a synchronous device all time is compute time and the dispatch times are 0.  ``iteration_ns`` is the steady-state
    period of steps run back to back.  ``saved_bytes`` is what autograd keeps of a compiled step for its backward, parameters,
    buffers and the batch apart; None where it was not measured.
    """

    variant: Variant
    iteration_ns: int = attrs.field(validator=checks.measured_int)
    forward_dispatch_ns: int = attrs.field(validator=checks.measured_int)
    forward_compute_ns: int = attrs.field(validator=checks.measured_int)
    backward_dispatch_ns: int = attrs.field(validator=checks.measured_int)
    backward_compute_ns: int = attrs.field(validator=checks.measured_int)
    optimizer_dispatch_ns: int = attrs.field(validator=checks.measured_int)
    optimizer_compute_ns: int = attrs.field(validator=checks.measured_int)
    peak_bytes: int = attrs.field(validator=checks.measured_int)
    spread: float = attrs.field(default=0.0, validator=checks.finite)
    saved_bytes: int | None = attrs.field(default=None, validator=attrs.validators.optional(checks.measured_int))


@attrs.frozen
class MixedStep:
    """A whole step with some adjustable operators at a rung (the variant of ``step``) and the others at the base precision."""

    lowered: tuple[OpId, ...]
    step: StepMeasurement


@attrs.frozen
class BatchStep:
    """A whole step at another local batch than the traced one, in the base precision or with all adjustable operators at a rung."""

    batch_size: int = attrs.field(validator=checks.positive_int)
    step: StepMeasurement


@attrs.frozen
class AlternatingDispatch:
    """How much longer the CPU takes to issue a step with every other adjustable operator at one rung than the mean of steps with
    none and with all of them there: operators that a plan leaves as they are take longer beside lowered ones.

    Attributes:
        variant: of the rung.
        forward_ns, backward_ns: by phase; 0 where it takes no longer.
    """

    variant: Variant
    forward_ns: int = attrs.field(validator=checks.measured_int)
    backward_ns: int = attrs.field(validator=checks.measured_int)


@attrs.frozen
class RungMemory:
    """What PyTorch's allocator held at the peak of steps measured with every adjustable operator at one rung.

    Attributes:
        variant: of the rung.
        allocated_bytes: in tensors.
        reserved_bytes: taken from the device for them.
    """

    variant: Variant
    allocated_bytes: int = attrs.field(validator=checks.measured_int)
    reserved_bytes: int = attrs.field(validator=checks.measured_int)


@attrs.frozen
class DeviceMemory:
    """Memory of a GPU that a step takes beside its tensors (docs/design/memory.md#what-a-process-takes).

    Attributes:
        outside_bytes: of the process outside PyTorch's allocator: the CUDA context, libraries, NCCL.
        rungs: what the allocator held, per measured rung.
    """

    outside_bytes: int = attrs.field(validator=checks.measured_int)
    rungs: tuple[RungMemory, ...] = ()


@attrs.frozen
class WrongKernels:
    """A kernel that computes wrong numbers on the device that was measured, and is left out (docs/shared-gpus.md#canary).

    Attributes:
        operators: that would have run it.
        variant: in which they would have.
        kernel: what it computes, and whose it is: ``linear.output of cutlass``.
        problem: what was wrong, in half a sentence.
    """

    operators: tuple[OpId, ...]
    variant: Variant
    kernel: str
    problem: str


@attrs.frozen
class KernelCheck:
    """What was checked before anything was measured: each kernel against exact products, on the shapes that it gets.

    Attributes:
        wrong: those that were wrong; nothing was measured with them.
    """

    kernels: int = attrs.field(validator=checks.non_negative_int)
    wrong: tuple[WrongKernels, ...] = ()


@attrs.frozen
class Profile:
    """Measured costs of one model on one device type (docs/design/cost-mapper.md#profiled-costs).

    Attributes:
        software: versions that matter (torch, cuda, driver, backend packages).
        model, dag_digest: which PrecisionDag it belongs to.
        costs: distinct costs; ``cost_index[op][variant]`` is the position of an operator's cost in it.  Dependent and guarded
            operators are keyed by ``Variant.plain(precision)`` of the format they run in.
        casts: one model per kind of cast.
        collective: all-reduce costs of this group alone; absent where the group has a single rank and none was measured.
        optimizer_dispatch_ns, optimizer_compute_ns: one optimizer step (with gradient zeroing).
        optimizer_state_bytes: bytes of optimizer state (two float32 copies for Adam).
        input_bytes: bytes of one batch on the device.
        steps: whole steps measured at the base precision and at every rung: what the sum of parts is calibrated with.
        synchronises: a step waits for the device by itself (a model that asks for a value of a tensor), so that the CPU does not
            run ahead into the next one.
        memory: what a process takes of a GPU beside its tensors; absent where it was not measured.
        estimated_from: the device whose measurements these costs were scaled from (docs/absent-gpus.md); empty where measured.
        chains: fused chains, in every way to run that was measured; none where no kernel backend offers producers.
        handed_on: operators whose output is their input itself on this device, although the graph, traced on another one, has them
            copy it (``contiguous`` of what lies in order already).
        alternating: what steps with every other adjustable operator lowered say of the CPU; absent where it cannot be the step.
        check: what is known of the kernels that were measured; absent in profiles of earlier versions, and estimated ones.
        compiled: how the model was compiled of which ``steps`` are; absent where they are eager ones.  Operators and casts are
            measured alone either way.
        mixed: compiled steps with the operators of one kind of layer alone at a rung; none of eager steps, whose operators cost
            what they cost alone.
        batches: steps at other local batches, in rising order: those of the way that ``qsync prepare`` recommends, in the base
            precision and at the fastest rung.
    """

    device: DeviceType
    software: Mapping[str, str]
    model: str
    dag_digest: str
    costs: tuple[OpCost, ...]
    cost_index: Mapping[OpId, Mapping[Variant, int]]
    casts: tuple[CastModel, ...]
    optimizer_dispatch_ns: int = attrs.field(validator=checks.measured_int)
    optimizer_compute_ns: int = attrs.field(validator=checks.measured_int)
    optimizer_state_bytes: int = attrs.field(default=0, validator=checks.measured_int)
    input_bytes: int = attrs.field(default=0, validator=checks.measured_int)
    collective: CollectiveModel | None = None
    steps: tuple[StepMeasurement, ...] = ()
    synchronises: bool = False
    memory: DeviceMemory | None = None
    estimated_from: str = ""
    chains: tuple[ChainCost, ...] = ()
    handed_on: tuple[OpId, ...] = ()
    alternating: AlternatingDispatch | None = None
    check: KernelCheck | None = None
    compiled: Compiled | None = None
    mixed: tuple[MixedStep, ...] = ()
    batches: tuple[BatchStep, ...] = ()

    def __attrs_post_init__(self) -> None:
        for op_id, by_variant in self.cost_index.items():
            for position in by_variant.values():
                if type(position) is not int or not 0 <= position < len(self.costs):
                    raise ValueError(f"Profile.cost_index[{op_id}] points at cost {position!r} of {len(self.costs)}")
        keys = [model.key for model in self.casts]
        if len(keys) != len(set(keys)):
            raise ValueError("Profile.casts has two models for one kind of cast")
        if twice := checks.first_repeated(step.variant for step in self.steps):
            raise ValueError(f"Profile.steps has two measurements of the step at {twice.label}")
        for one in self.mixed:
            if unknown := [op_id for op_id in one.lowered if op_id not in self.cost_index]:
                raise ValueError(f"Profile.mixed lowers {unknown[0]}, which it has no cost of")
        if (sizes := [one.batch_size for one in self.batches]) != sorted(sizes):
            raise ValueError(f"Profile.batches has steps at {sizes} samples, which do not rise")
        if again := checks.first_repeated((one.batch_size, one.step.variant) for one in self.batches):
            raise ValueError(f"Profile.batches has two measurements of the step of {again[0]} samples at {again[1].label}")
        ways = [(name, entry.form, entry.variant) for entry in self.chains for name in entry.chains]
        if twice_on := checks.first_repeated(self.handed_on):
            raise ValueError(f"Profile.handed_on lists {twice_on} twice")
        if stray := [op_id for op_id in self.handed_on if op_id not in self.cost_index]:
            raise ValueError(f"Profile.handed_on has {stray[0]}, which it has no cost of")
        if way := checks.first_repeated(ways):
            raise ValueError(f"Profile.chains has two costs of chain {way[0]} in one way to run")

    @cached_property
    def chain_index(self) -> dict[tuple[OpId, ChainForm, Variant], OpCost]:
        """The cost of every measured chain by its name and how it runs."""
        return {(name, entry.form, entry.variant): entry.cost for entry in self.chains for name in entry.chains}

    def cost(self, op_id: OpId, variant: Variant) -> OpCost:
        """The cost of an operator in a variant; of one that delivers float32, where it was not measured, of the same in 16 bits.

        Raises:
            KeyError: when that pair was not measured.
        """
        by_variant = self.cost_index[op_id]
        return self.costs[by_variant[variant.known_as(by_variant) or variant]]

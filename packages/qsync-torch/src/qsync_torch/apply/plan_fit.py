"""What a plan wants of a model, and whether it fits: what it names is a module, or a weight that functional calls use."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import TypeVar

import attrs
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.chain import ChainForm
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import ATEN, KernelChoice
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.dtypes import LOW_FLOATS, PRECISION, TORCH_DTYPE
from qsync_torch.kernels.selection import DEFAULT_BACKEND, default_backend
from qsync_torch.kinds.table import MODULES, WEIGHT_DIMENSIONS, is_own_forward, kind_of_module

Call = TypeVar("Call")
STORED = "_qsync_stored"
"""Attribute of a module whose weight a plan in force stores: its :class:`~qsync_torch.apply.stored_modules.HeldWeight`."""
_NAMED = 3
"""How many FQNs an error names."""


def weight_name(model: nn.Module, fqn: str) -> str:
    """The parameter that an operator of this FQN reads: its module's, or the one that has this name itself."""
    owner, _, leaf = fqn.rpartition(".")
    return f"{fqn}.weight" if leaf in model.get_submodule(owner)._modules else fqn


@attrs.frozen
class Assigned:
    """The variant that an operator runs in, and whose kernels run it."""

    variant: Variant
    choice: KernelChoice = ATEN


@attrs.frozen
class WeightPlace:
    """A parameter's place in a model: parameters may be replaced by others (``load_state_dict(assign=True)``), places stay."""

    fqn: str
    module: nn.Module
    name: str

    @property
    def weight(self) -> torch.Tensor | None:
        """The parameter that is there now."""
        return self.module._parameters.get(self.name)


@attrs.frozen
class Addressed:
    """Operators found in a model, each by its first call.

    Attributes:
        entries: what every operator runs as, all calls included.
        modules: operators that are the forward of a module.
        weights: the weights of all operators that are parameters, which functional calls use.
    """

    entries: Mapping[OpId, Assigned]
    modules: tuple[tuple[OpId, nn.Module], ...]
    weights: tuple[tuple[OpId, WeightPlace], ...]

    @property
    def planned(self) -> tuple[OpId, ...]:
        """The first call of each module and each weight."""
        return tuple(dict.fromkeys(op_id for op_id, _ in (*self.modules, *self.weights)))

    def places(self, calls: Mapping[OpId, Call], model: nn.Module) -> dict[tuple[nn.Module, str], Call]:
        """The places for what runs instead of operators: by module and name of the parameter, of which one may have several."""
        found = {(module, "weight"): calls[op_id] for op_id, module in self.modules}
        by_weight = {id(place.weight): calls[op_id] for op_id, place in self.weights}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in by_weight:
                    found.setdefault((module, name), by_weight[id(parameter)])
        return found

    def holds(self, base: Precision) -> bool:
        """Whether some weight is held in a job's 16-bit base, so that the script may run without autocast."""
        dtype = TORCH_DTYPE[base]
        return dtype in LOW_FLOATS and any(place.weight is not None and place.weight.dtype is dtype for _, place in self.weights)

    @property
    def functional(self) -> tuple[tuple[OpId, WeightPlace], ...]:
        """The weights that are not those of a module's own forward."""
        modules = {op_id for op_id, _ in self.modules}
        return tuple((op_id, place) for op_id, place in self.weights if op_id not in modules)


@attrs.frozen
class PlannedChain:
    """A chain that a plan fuses.

    Attributes:
        saved: the format in which it keeps its input; None: as it is.
        choice: whose kernels run it.
        form: what it was predicted as; None where the plan does not say.
    """

    saved: Precision | None
    choice: KernelChoice
    form: ChainForm | None


@attrs.frozen
class Planned:
    """What a caller of ``apply_`` wants every operator to run as.

    Attributes:
        entries: a plan, or variants or assignments by operator.
        backend: instead of every planned backend; configurations go with it.
        base: the format of the job: float32, or what it trains under autocast to.
        allow_flags: settings that may differ from those of a plan.
        fuses: the model is compiled, with the chains fused that a plan runs so.
    """

    entries: PrecisionPlan | Mapping[OpId, Variant | Assignment]
    group: str | None = None
    backend: str | None = None
    base: Precision = Precision.FLOAT32
    allow_flags: tuple[str, ...] = ()
    caller: Caller = BY_HAND
    fuses: bool = False

    @property
    def plan(self) -> PrecisionPlan | None:
        """The whole plan, where there is one."""
        return self.entries if isinstance(self.entries, PrecisionPlan) else None

    def on(self, device: torch.device) -> dict[OpId, Assigned]:
        """Variant, backend and configuration of every operator; one with a variant alone runs on a device's default backend, and
        delivers the format of the job.

        Raises:
            PlanError: when the plan has no such group, or runs chains of it fused and the caller does not.
        """

        def assigned(entry: Variant | Assignment) -> Assigned:
            if isinstance(entry, Variant):
                entry = entry if self.base is not Precision.FLOAT32 else entry.in_float32  # without a graph, who reads it?
                return Assigned(entry, KernelChoice.parse(self.backend or default_backend(device)))
            if self.backend:
                return Assigned(entry.variant, KernelChoice.parse(self.backend))
            return Assigned(entry.variant, KernelChoice.parse(entry.backend or DEFAULT_BACKEND, entry.config))

        if not isinstance(self.entries, PrecisionPlan):
            return {op_id: assigned(entry) for op_id, entry in self.entries.items()}
        try:
            chosen = self.entries.group(str(self.group))
        except KeyError:
            known = ", ".join(entry.group for entry in self.entries.groups)
            raise PlanError(f"the plan has no group {self.group!r}; its groups are {known}") from None
        if not self.fuses and (fused := [name for name, entry in chosen.chains.items() if entry.variant.fused]):
            raise PlanError(
                f"the plan runs {len(fused)} chains of group {self.group!r} as fused kernels ({fused[0]} and so on), which apply_ "
                "cannot do: memory and time would not be what was planned; call qsync.compile(model, plan) in its place, or plan "
                "with profiles that were made without --chains"
            )
        found = {op_id: assigned(entry) for op_id, entry in chosen.assignments.items()}
        if self.entries.output_formats is None and self.base is Precision.FLOAT32:
            return {op_id: attrs.evolve(entry, variant=entry.variant.in_float32) for op_id, entry in found.items()}
        return found

    @property
    def chains(self) -> dict[OpId, PlannedChain] | None:
        """The chains that a plan fuses, by their names; None where it says nothing of any chain."""
        group = None if self.plan is None or self.group is None else self.plan.group(self.group)
        if group is None or not group.chains:
            return None
        instead = KernelChoice.parse(self.backend) if self.backend else None
        return {
            name: PlannedChain(
                entry.variant.saved,
                instead or KernelChoice.parse(entry.backend or DEFAULT_BACKEND, entry.config),
                group.chain_forms.get(name),
            )
            for name, entry in group.chains.items()
            if entry.variant.fused
        }


def check_outputs(plan: PrecisionPlan, group: str | None, caller: Caller = BY_HAND) -> None:
    """See that operators of a group deliver 16 bits only where their readers take them, by what the plan says of its graph.

    Raises:
        PlanError: naming an operator; a plan that was edited has such ones.
    """
    chosen = next((entry for entry in plan.groups if entry.group == group), None)
    if chosen is None or plan.base is not Precision.FLOAT32:
        return
    variants = {op_id: entry.variant for op_id, entry in chosen.assignments.items()}
    if plan.output_formats is None:
        if any(variant.output is not Precision.FLOAT32 for variant in variants.values()):
            warnings.warn(
                "this plan is from before QSync decided the format of every operator's output: all deliver float32, which takes "
                f"more memory than was predicted; {caller.plan_again} to have 16 bits where their readers take them",
                stacklevel=4,
            )
        return
    if (wrong := plan.output_formats.first_wrong(variants)) is not None:
        op_id, reason = wrong
        raise PlanError(
            f"the plan lets {op_id} of group {group!r} deliver {variants[op_id].output}, which it must not: {reason}; write "
            f"out=float32 in its variant, or {caller.plan_again}"
        )


def locate(
    model: nn.Module, assigned: Mapping[OpId, Assigned], plan: PrecisionPlan | None = None, caller: Caller = BY_HAND
) -> Addressed:
    """Find every operator in the model.

    Args:
        plan: the plan that says so, where one does.

    Raises:
        PlanError: naming the first FQNs that the model does not have, or calls of one weight with different variants.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    missing: list[str] = []
    first: dict[str, OpId] = {}
    for op_id, entry in assigned.items():
        earlier = first.setdefault(op_id.fqn, op_id)
        if assigned[earlier].variant != entry.variant:
            raise PlanError(
                f"calls of {op_id.fqn} are to run as {assigned[earlier].variant.label} and as {entry.variant.label}; "
                "calls that share a weight share a variant"
            )
    found_modules: list[tuple[OpId, nn.Module]] = []
    found_weights: list[tuple[OpId, WeightPlace]] = []
    for fqn, op_id in first.items():
        module = modules.get(fqn)
        name = fqn if module is None else f"{fqn}.weight"
        owner, _, leaf = name.rpartition(".")
        if module is not None and (is_own_forward(module) or STORED in module.__dict__):
            found_modules.append((op_id, module))
        elif module is None and owner in modules and STORED in modules[owner].__dict__:
            found_weights.append((op_id, WeightPlace(fqn, modules[owner], leaf)))
            continue
        elif not _calls_functions(module) or name not in parameters or parameters[name].dim() not in WEIGHT_DIMENSIONS:
            missing.append(fqn)
            continue
        if name in parameters:
            found_weights.append((op_id, WeightPlace(fqn, modules[owner], leaf)))
    if missing:
        found = {op_id.fqn for op_id, _ in found_weights} | {op_id.fqn for op_id, _ in found_modules}
        raise PlanError(_other_model(model, missing, found, plan, caller))
    return Addressed(dict(assigned), tuple(found_modules), tuple(found_weights))


def _calls_functions(module: nn.Module | None) -> bool:
    """True for no module (a weight was named), and for one of a kind's class with a forward of its own or a patched one."""
    return module is None or (isinstance(module, MODULES) and kind_of_module(module) is None)


def check_weight_dtype(
    fqn: str, weight: torch.Tensor, caller: Caller = BY_HAND, what: str = "weight", base: Precision = Precision.FLOAT32
) -> None:
    """Plans are for parameters in float32, in the job's base where its script trains them so, and in any of both or float16 where
    they are not trained.

    Raises:
        PlanError: with the format that the weight has.
    """
    held = PRECISION.get(weight.dtype)
    if held is not Precision.FLOAT32 and held is not base and (weight.requires_grad or weight.dtype not in LOW_FLOATS):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise PlanError(
            f"the {what} of {fqn} is {dtype}, and plans are for float32 parameters where they are trained: call model.float() "
            f"before {caller.call}, and leave param_dtype out of fully_shard's MixedPrecisionPolicy; a job that computes in 16 bit "
            f"keeps float32 parameters under torch.autocast, with {caller.with_amp('bfloat16')}"
        )


def check_weights(
    model: nn.Module,
    addressed: Addressed,
    plan: PrecisionPlan | None,
    caller: Caller = BY_HAND,
    base: Precision = Precision.FLOAT32,
) -> None:
    """Compare the weights of a model with those that a plan was made for.

    Raises:
        PlanError: naming a weight of another shape or format, or a bias of another format.
    """
    for op_id, place in addressed.weights:
        weight = place.weight
        assert weight is not None
        check_weight_dtype(op_id.fqn, weight, caller, base=base)
        if plan is None or op_id.fqn not in plan.weight_shapes:
            continue
        found, planned = list(weight.shape), list(plan.weight_shapes[op_id.fqn])
        if found != planned:
            raise PlanError(
                f"the plan was made for another model ({plan.model}): the weight of {op_id.fqn} has shape {found} in this "
                f"{type(model).__name__} and {planned} in the plan; {caller.trace_again}"
            )
    for op_id, module in addressed.modules:
        bias = module._parameters.get("bias")
        if bias is not None:
            check_weight_dtype(op_id.fqn, bias, caller, "bias", base)


def _other_model(model: nn.Module, missing: list[str], found: set[str], plan: PrecisionPlan | None, caller: Caller) -> str:
    unknown = list(dict.fromkeys(missing))
    source = f"the plan was made for another model ({plan.model})" if plan else "the variants are for another model"
    text = f"{source}: {type(model).__name__} has no linear or convolution {', '.join(unknown[:_NAMED])}"
    if len(unknown) > _NAMED:
        text += f" (and {len(unknown) - _NAMED} more)"
    named, again = list(model.named_modules()), caller.trace_again
    extra = [name for name, module in named if is_own_forward(module) and name not in found]
    if extra:
        text += f", and the plan does not know {', '.join(extra[:_NAMED])}"
    if any(name.endswith(".base_layer") and name.removesuffix(".base_layer").endswith(tuple(unknown)) for name, _ in named):
        return f"{text}; there are adapters on it that the plan does not know: call {caller.call} before they are added, or {again}"
    wanted = {*missing, *found}
    if inner := next((name for name, module in model.named_modules() if name and wanted <= _names(module)), ""):
        return f"{text}; it fits the module {inner!r} inside this one: call {caller.call} on model.{inner}"
    outer = _common_prefix(wanted)
    if outer and {fqn.removeprefix(f"{outer}.") for fqn in wanted} <= _names(model):
        return f"{text}; it was traced on a module that holds this one as {outer!r}: call {caller.call} on that one"
    return f"{text}; {again}"


def _names(module: nn.Module) -> set[str]:
    """List what can be an operator of a plan: linears, convolutions and parameters, by name."""
    layers = {name for name, layer in module.named_modules() if isinstance(layer, MODULES)}
    return layers | {name for name, _ in module.named_parameters()}


def _common_prefix(names: set[str]) -> str:
    """The longest FQN of a module that holds all the names."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))


def unplanned(model: nn.Module, addressed: Addressed, plan: PrecisionPlan) -> tuple[list[tuple[str, nn.Module]], list[WeightPlace]]:
    """What a whole plan does not name and must not run (an unused auxiliary head does not): modules, and weights of linear and
    convolution operators.

    Args:
        addressed: what the plan names of it.
        plan: a whole plan; operators that it lists as unaddressed run as they are.

    Returns:
        Linear and convolution modules by FQN, and the places of matrices and filters among the other parameters.
    """
    planned = {id(module) for _, module in addressed.modules}
    known = {op_id.fqn for op_id in (*plan.operator_ids, *plan.unaddressed_ids)}
    named = {*dict(model.named_modules()), *dict(model.named_parameters())}
    # A call without an address is named by its function and by the module that makes it, with any parameter below.
    callers = tuple(op_id.fqn[: op_id.fqn.rfind(".") + 1] for op_id in plan.unaddressed_ids if op_id.fqn not in named)
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if is_own_forward(module) and id(module) not in planned and name not in known
    ]
    weights = {id(place.weight) for _, place in addressed.weights}
    places = []
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if id(parameter) in weights or parameter.dim() not in WEIGHT_DIMENSIONS or name in known or owner in known:
            continue
        if name.startswith(callers) or parameter.is_complex():  # of which no operator is adjustable
            continue
        places.append(WeightPlace(name, model.get_submodule(owner), leaf))
    return modules, places

"""A frozen weight that a plan stores in another format: it lies packed in its module, where the parameter was.

It is neither parameter nor buffer, so that optimizers and DistributedDataParallel do not see it, and ranks may store it in
different formats.  On a rank of a group that keeps it as the script has it, it lies there too (:class:`KeptWeight`):
DistributedDataParallel broadcasts what one rank registers into whatever the others register.  Whatever else reads the module sees
the weight that the script has: ``module.weight``, ``state_dict()`` and copies hold it dequantized, in the script's format, and what
is written there is rounded to the format in which it is stored.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from qsync_core.errors import NumericsError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Storage
from qsync_torch.apply.plan_fit import STORED, Addressed, WeightPlace, weight_name
from qsync_torch.aten.random_bits import checksum
from qsync_torch.aten.stored_weights import StoredWeight, empty_stored, quantize_weight
from qsync_torch.kinds.kind import OperatorKind
from qsync_torch.kinds.table import FUNCTIONAL, OF_ROWS, kind_of_module, reads_own_weight
from qsync_torch.operators.stored import dequantize
from qsync_torch.torch_internals import DisableTorchFunction, transforms_are_active


class HeldWeight:
    """The stored weight of one module.

    Attributes:
        fqn: of the parameter; storage: how it is stored; kind: of the operator that reads it.
        tensors: what is stored; shape: of the weight; dtype: in which the script has it.
        parameter: the script's, which is empty meanwhile.
        keep: whether the bits that are written are kept, on the CPU.
        original: gives the weight as its checkpoint has it, or raises PlanError; None where that is not known.
    """

    def __init__(self, fqn: str, parameter: nn.Parameter, storage: Storage, kind: OperatorKind, keep: bool = False) -> None:
        self.fqn, self.storage, self.parameter, self.kind, self.keep = fqn, storage, parameter, kind, keep
        self.shape, self.dtype = tuple(parameter.shape), parameter.dtype
        self.original: Callable[[], torch.Tensor] | None = None
        self._keep(parameter)
        if parameter.device.type == "meta":
            self.tensors = empty_stored(self.shape, storage, "meta")
        else:
            self.tensors = self._quantized(parameter)
        parameter.data = parameter.data.new_empty(0)

    @property
    def device(self) -> torch.device:
        """On which it lies."""
        return self.tensors.values.device

    @property
    def lying(self) -> Iterable[torch.Tensor | None]:
        """The tensors in which it lies there."""
        return self.tensors

    def dequantized(self) -> torch.Tensor:
        """What is stored, in the script's format."""
        return dequantize(self.tensors, self.storage, self.shape, self.dtype)

    def known(self) -> torch.Tensor:
        """The weight as its checkpoint has it, else dequantized; on the CPU, where it takes nothing of what storing it saves."""
        if self.original is not None:
            try:
                return self.original().to(self.dtype)
            except PlanError as error:  # which must not cost a script what it has trained
                self.original = None
                warnings.warn(f"{error}: what a plan stores of it is dequantized", stacklevel=2)
        return self.dequantized().cpu()

    def write(self, weight: torch.Tensor, device: torch.device | None = None) -> None:
        """Store another weight, on this device.

        Raises:
            PlanError: when it has another shape.
        """
        self._check_shape(weight)
        self.tensors = self._quantized(weight.to(device or self.device))
        self._keep(weight)

    def _keep(self, weight: torch.Tensor) -> None:
        """Take these bits for those of the checkpoint, where they are kept."""
        self.original = weight.detach().to("cpu", self.dtype, copy=True).clone if self.keep else None

    def _check_shape(self, weight: torch.Tensor) -> None:
        if tuple(weight.shape) != self.shape:
            raise PlanError(f"{self.fqn} has shape {list(self.shape)}, and what is written into it {list(weight.shape)}")

    def _quantized(self, weight: torch.Tensor) -> StoredWeight:
        try:
            with torch.inference_mode(False):  # whose tensors no later step could save for backward
                return quantize_weight(weight, self.storage)
        except NumericsError as error:
            raise NumericsError(f"{self.fqn}: {error}") from None

    def overwrite(self, weight: torch.Tensor) -> None:
        """Store another weight, and say what that does to it."""
        self.write(weight)
        warnings.warn(
            f"{self.fqn} is stored as {self.storage}: what is written into it, such as a merged adapter, is rounded to that "
            "format; merge into the model as its checkpoint has it to keep all of it",
            stacklevel=3,
        )

    def load(self, weight: torch.Tensor) -> None:
        """Store a weight of a ``state_dict()``; one that is what is stored already leaves the bits as they are."""
        if self.original is not None and torch.equal(weight.to("cpu", self.dtype), self.known()):
            return
        if torch.equal(weight.to(self.device, self.dtype), self.dequantized()):
            self._keep(weight)
        else:
            self.write(weight)

    def moved(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow ``module._apply``: to another device, in the format in which it is stored, and read in another one.

        Raises:
            PlanError: when it has no values yet.
        """
        if self.device.type == "meta":
            raise PlanError(f"{self.fqn} has no values yet: load the model by load_planned, which stores them on its device")
        if (device := function(self.tensors.values).device) != self.device:
            self.to_device(device)
        self.dtype = function(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        self.parameter.data = self.parameter.data.to(self.dtype)

    def to_device(self, device: torch.device) -> None:
        """Move what is stored."""
        self.tensors = StoredWeight(*(None if tensor is None else tensor.to(device) for tensor in self.tensors))  # type: ignore[arg-type]

    def restored(self) -> nn.Parameter:
        """The script's parameter, with the weight in it again; another one where that was on the meta device."""
        if self.device.type == "meta":
            self.parameter.data = self.parameter.data.new_empty(self.shape)
        elif self.parameter.device.type == "meta":
            return nn.Parameter(self.known().to(self.device), requires_grad=False)
        else:
            self.parameter.data = self.known().to(self.device)
        return self.parameter


class KeptWeight(HeldWeight):
    """A weight that this rank keeps as the script has it and another group stores: in no rank is it a parameter of its module."""

    def __init__(self, fqn: str, parameter: nn.Parameter, kind: OperatorKind) -> None:
        self.fqn, self.storage, self.kind, self._scripts = fqn, Storage.AS_IS, kind, parameter
        self.parameter = nn.Parameter(parameter.data, requires_grad=False)
        self.shape, self.dtype, self.original = tuple(parameter.shape), parameter.dtype, self.parameter.detach
        parameter.data = parameter.data.new_empty(0)  # as on the ranks that store it: ZeroRedundancyOptimizer sends what it has

    @property
    def device(self) -> torch.device:
        """On which it lies."""
        return self.parameter.device

    @property
    def lying(self) -> Iterable[torch.Tensor | None]:
        """The parameter itself."""
        return (self.parameter,)

    def dequantized(self) -> torch.Tensor:
        """The weight itself."""
        return self.parameter.detach()

    known = dequantized

    def write(self, weight: torch.Tensor, device: torch.device | None = None) -> None:
        """Take another weight, in the script's format.

        Raises:
            PlanError: when it has another shape.
        """
        self._check_shape(weight)
        value = weight.detach().to(device or self.device, self.parameter.dtype)
        if self.parameter.device.type == "meta":
            self.parameter = nn.Parameter(value, requires_grad=False)
        else:
            self.parameter.data.copy_(value)
        self.original = self.parameter.detach

    load = write

    def moved(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow ``module._apply``, to another format too."""
        self.parameter.data = function(self.parameter.data)
        self.dtype = self.parameter.dtype

    def to_device(self, device: torch.device) -> None:
        """Move it."""
        self.parameter.data = self.parameter.data.to(device)

    def restored(self) -> nn.Parameter:
        """The script's parameter; another one where that was on the meta device and this is not."""
        if self._scripts.device.type == "meta" and self.device.type != "meta":
            return self.parameter
        self._scripts.data = self.parameter.data
        return self._scripts


class ReadWeight(torch.Tensor):
    """A stored weight as code reads it, dequantized; what is written to its ``data``, or into it, is stored.

    Attributes:
        held: what it was read from.
        is_data: whether it stands for the weight's ``data``, into which may be written as a whole.
        is_view: whether it is another view of the same memory, such as a row or ``detach()``: what is written there would be lost.
    """

    held: HeldWeight
    is_data = is_view = False

    @classmethod
    def of(cls, held: HeldWeight) -> ReadWeight:
        """Dequantize a weight."""
        read = held.dequantized().as_subclass(cls)
        read.held = held
        return read

    @property
    def data(self) -> torch.Tensor:
        """The same values, into which may be written."""
        data = self.as_subclass(torch.Tensor).as_subclass(ReadWeight)
        data.held, data.is_data, data.is_view = self.held, not self.is_view, self.is_view
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.is_view:
            raise self._refusal("assignment to data")
        self.held.overwrite(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A tensor of its own."""
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A saved one is a plain tensor, which needs no QSync to be loaded."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def _refusal(self, name: str) -> PlanError:
        what = f"a view of {self.held.fqn}" if self.is_view else self.held.fqn
        return PlanError(
            f"{name} changes {what} in place, which a plan stores as {self.held.storage}: change weight.data as a whole, which is "
            "stored, or call remove() first"
        )

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Refuse what would change a copy that nobody reads; all else runs on the plain tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if (name == "requires_grad_" and all((*args[1:], *kwargs.values()))) or (func == _SET_REQUIRES_GRAD and args[1]):
            raise PlanError(untrainable(args[0].held))
        changed = _changed(name, args, kwargs)
        for read in changed:
            if not read.is_data:
                raise read._refusal(name)
        with DisableTorchFunction():
            result = func(*args, **kwargs)
        for read in changed:
            read.held.overwrite(read.as_subclass(torch.Tensor))
        if name == "as_subclass":
            return result
        if name in ("numpy", "__array__"):
            result.setflags(write=False)  # what is written into it would be lost
            return result
        source = args[0] if args else None
        if not isinstance(source, ReadWeight) or (
            name == "__get__" and isinstance(result, torch.Tensor) and not result._is_view()
        ):  # ``_base``
            return result
        if type(result) in (list, tuple):
            return type(result)(_marked(one, source) for one in result)
        return _marked(result, source)


_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _changed(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[ReadWeight]:
    """What a function writes into, of stored weights."""
    targets: list[Any] = [kwargs.get("out")]
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
        targets += args[:1] or tuple(kwargs.values())[:1]
    flat = (one for target in targets for one in (target if isinstance(target, (list, tuple)) else (target,)))
    return [one for one in flat if isinstance(one, ReadWeight)]


def _marked(result: Any, read: ReadWeight) -> Any:
    """A result as a view, where it has the memory of what was read."""
    if result is read or type(result) not in (torch.Tensor, ReadWeight) or result.layout is not torch.strided:
        return result
    plain = result.as_subclass(torch.Tensor) if isinstance(result, ReadWeight) else result
    if transforms_are_active() or plain.untyped_storage().data_ptr() != read.untyped_storage().data_ptr():
        return plain
    view = plain.as_subclass(ReadWeight)
    view.held, view.is_view = read.held, True
    return view


def untrainable(held: HeldWeight) -> str:
    """What to do where a script is about to train a stored weight."""
    return (
        f"a plan stores {held.fqn} (on this rank {held.storage}), which is no parameter of the model then and is not trained: call "
        "remove(), and apply a plan of the model as it is trained from here on; a copy (weight.data.clone()) may be trained"
    )


def store_weights(model: nn.Module, addressed: Addressed, names: Iterable[str], keep: bool = False) -> Callable[[], None]:
    """Store the weights of a model as their variants say, and empty their parameters.

    Args:
        names: of all weights that some group of the plan stores; those that this one does not are kept out of their modules too.
        keep: what they held is kept, on the CPU.

    Returns:
        What gives the parameters back.

    Raises:
        PlanError: naming a weight that cannot be stored; then nothing is.
        NumericsError: naming one that holds NaN or infinity; likewise.
    """
    wanted = list(_wanted(model, addressed))
    done: list[tuple[nn.Module, HeldWeight]] = []

    hooks: list[RemovableHandle] = []

    def hold(module: nn.Module, held: HeldWeight) -> None:
        module._parameters["weight"] = None
        module.__dict__[STORED] = held
        done.append((module, held))
        hooks.append(module.register_state_dict_post_hook(save_to))
        hooks.append(module.register_load_state_dict_pre_hook(load_from))

    def restore() -> None:
        for module, held in done:
            module.__dict__.pop(STORED)
            module._parameters["weight"] = held.restored()
        lost = [held.fqn for _, held in done if held.original is None and held.device.type != "meta"]
        done.clear()
        while hooks:
            hooks.pop().remove()
        if lost:
            warnings.warn(
                f"the {len(lost)} weights that the plan stored ({lost[0]} first) are given back dequantized, as they were rounded "
                "to be stored: load the checkpoint again for those that it has",
                stacklevel=4,
            )

    for place, _ in wanted:
        assert place.weight is not None
        if place.weight.device.type != "meta" and not bool(place.weight.detach().isfinite().all()):
            raise NumericsError(f"{weight_name(model, place.fqn)} holds NaN or infinity, which no stored format has")
    try:
        for place, storage in wanted:
            parameter = place.weight
            assert isinstance(parameter, nn.Parameter)
            kind = kind_of_module(place.module) or OF_ROWS
            hold(place.module, HeldWeight(weight_name(model, place.fqn), parameter, storage, kind, keep))
        for name in names:
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(parameter := module._parameters.get("weight"), nn.Parameter) and not parameter.requires_grad:
                hold(module, KeptWeight(name, parameter, kind_of_module(module) or OF_ROWS))
    except BaseException:
        restore()
        raise
    return restore


def _wanted(model: nn.Module, addressed: Addressed) -> Iterable[tuple[WeightPlace, Storage]]:
    storages = {op_id: entry.variant.storage for op_id, entry in addressed.entries.items() if entry.variant.storage.is_quantized}
    if not storages:
        return
    modules, places = dict(addressed.modules), dict(addressed.weights)
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for op_id in addressed.planned:
        if op_id not in storages:
            continue
        storage, place, module = storages[op_id], places.get(op_id), modules.get(op_id)
        kind = None if module is None else kind_of_module(module)
        why = ""
        if place is None or place.weight is None:
            tied = module is not None and module._parameters.get("weight") is not None  # under the other module's name
            why = "another module has it too (tied weights)" if tied else "it is computed in each step"
        elif place.weight.requires_grad:
            why = "it is trained, and only weights that are not trained are stored in another format"
        elif kind is None and (place.weight.dim() != 2 or not reads_own_weight(place.module, place.name)):
            why = FUNCTIONAL
        elif holders[id(place.weight)] > 1:
            why = "another module has it too (tied weights)"
        elif kind is not None and kind.row.transposed:
            why = "the weight of a transposed convolution has its input channels first"
        if why:
            raise PlanError(f"the weight of {op_id.fqn} cannot be stored as {storage}: {why}; plan it as the script has it")
        assert place is not None
        yield place, storage


def stored_names(model: nn.Module, plan: PrecisionPlan | None, entries: Mapping[OpId, Any]) -> tuple[str, ...]:
    """The weights of a model that some group of a plan stores, or variants by operator."""
    groups = [entries] if plan is None else [group.assignments for group in plan.groups]
    found = (op_id.fqn for group in groups for op_id, entry in group.items() if entry.variant.storage.is_quantized)
    return tuple(dict.fromkeys(weight_name(model, fqn) for fqn in found))


Sum = tuple[str, torch.Tensor]
"""A weight's format, and the checksum of its bits."""


def sum_of(weight: torch.Tensor) -> Sum:
    """What tells a weight from others."""
    return str(weight.dtype).removeprefix("torch."), checksum(weight.detach().contiguous())


def checksums(model: nn.Module, names: Iterable[str]) -> dict[str, Sum]:
    """Checksums of weights, by name; none of those on the meta device."""
    weights = {name: model.get_parameter(name) for name in names}
    return {name: sum_of(weight) for name, weight in weights.items() if weight.device.type != "meta"}


def fingerprints(sums: Mapping[str, Sum]) -> dict[str, str]:
    """What tells whether ranks hold the same frozen weights, by the format in which they hold them."""
    by_format: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, (dtype, found) in sorted(sums.items()):
        by_format.setdefault(dtype, []).append((name, found))
    return {
        dtype: hashlib.sha256(f"{[name for name, _ in found]}{[int(one) for _, one in found]}".encode()).hexdigest()[:16]
        for dtype, found in by_format.items()
    }


def stored_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All that a model's stored weights consist of."""
    held = (module.__dict__[STORED] for module in model.modules() if STORED in module.__dict__)
    return [tensor for weight in held for tensor in weight.lying if tensor is not None]


# What a planned module's class does otherwise where a weight is stored


def apply_to(
    module: Any, apply: Callable[..., Any], function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any
) -> Any:
    """``module._apply``: what is stored follows its module to another device, and keeps its format."""
    held: HeldWeight = module.__dict__[STORED]
    held.moved(function)
    return apply(module, function, *args, **options)


def methods_of_storing(unplanned: Any) -> dict[str, Any]:
    """Methods of the class of a module whose weight is stored: what would put another one in its place does not go unseen.

    Args:
        unplanned: the class without a plan.
    """

    def refuse(module: Any, what: str) -> None:
        if (held := module.__dict__.get(STORED)) is not None:
            raise PlanError(
                f"{what} in the place of {held.fqn}, which a plan stores and runs: assign to weight.data, or call remove() first "
                "(what computes a weight, such as a parametrization or pruning, goes into the model before the plan)"
            )

    def set_attribute(self: Any, name: str, value: Any) -> None:
        held = self.__dict__.get(STORED)
        if name == "weight" and held is not None:
            is_read = isinstance(value, ReadWeight) and value.held is held and not value.is_view
            if is_read or getattr(value, "value", None) is held.parameter:
                return  # its own, as when adapters are taken off
            refuse(self, "another parameter is put")
        unplanned.__setattr__(self, name, value)

    def delete_attribute(self: Any, name: str) -> None:
        if name == "weight":
            refuse(self, "something else is put")
        unplanned.__delattr__(self, name)

    def register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
        if name == "weight" or isinstance(param, ReadWeight):
            refuse(self, "another parameter is put")
        unplanned.register_parameter(self, name, param)

    return {
        "_apply": lambda self, function, *args, **options: apply_to(self, unplanned._apply, function, *args, **options),
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "register_parameter": register_parameter,
    }


def refuse_training(module: nn.Module) -> None:
    """Refuse that what is stored in a module or below it is to be trained.

    Raises:
        PlanError: naming the first weight.
    """
    for part in module.modules():
        if (held := part.__dict__.get(STORED)) is not None:
            raise PlanError(untrainable(held))


def save_to(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Add the weight to what ``module.state_dict()`` has found, as the script has it and before the bias."""
    held: HeldWeight | None = module.__dict__.get(STORED)
    if held is None:
        return
    if module._parameters.get("weight") is not None:
        raise PlanError(
            f"another parameter was put in the place of {held.fqn}, which a plan stores and runs: assign to weight.data, or call "
            "remove() first"
        )
    weight = held.known()
    if held.original is None:
        warnings.warn(
            "the state_dict() of a model whose plan stores weights holds them dequantized, on the CPU: they are not the bits of "
            "the checkpoint that they came from",
            stacklevel=2,
        )
    others = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({f"{prefix}weight": weight, **others})


def load_from(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    _: Any,
    errors: list[str],
) -> None:
    """Store the weight that ``module.load_state_dict()`` is to load, and take it out of what it looks at."""
    held: HeldWeight | None = module.__dict__.get(STORED)
    if held is None:
        return
    weight = state.pop(key := f"{prefix}weight", None)
    if weight is None:
        if strict:
            missing.append(key)
    elif tuple(weight.shape) != held.shape:
        errors.append(
            f"size mismatch for {key}: copying a param with shape {weight.shape} from checkpoint, the shape in current model is "
            f"{torch.Size(held.shape)}."
        )
    else:
        held.load(weight.detach())


def without_storage(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a copy of a module, with a parameter in the place of what is stored."""
    held: HeldWeight = state[STORED]
    parameter = nn.Parameter(held.known().to(held.device), requires_grad=False)
    kept = {name: _without_hooks(value) for name, value in state.items() if name != STORED}
    return {**kept, "_parameters": {**state["_parameters"], "weight": parameter}}


def _without_hooks(value: Any) -> Any:
    """A module's hooks but those that are ours."""
    if not isinstance(value, OrderedDict):
        return value
    return OrderedDict((key, hook) for key, hook in value.items() if getattr(hook, "hook", hook) not in (save_to, load_from))

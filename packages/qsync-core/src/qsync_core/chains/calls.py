"""What the recorded call of an operator computes, as far as chains are made of it."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs

from qsync_core.ir.chain import Activation
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision

_IN_THE_LOSS = "$loss"


def call_of(operator: Operator) -> dict[str, Any] | None:
    """The operator's recorded call; None where it has none, or where it runs in float32 whatever it reads."""
    return None if operator.op_class is OpClass.FIXED else _recorded(operator)


def _recorded(operator: Operator) -> dict[str, Any] | None:
    text = operator.attributes.get("call", "")
    if not text.startswith("{"):
        return None
    call: dict[str, Any] = json.loads(text)
    return call


def is_plain(argument: object) -> bool:
    """Whether a norm's weight or bias is a parameter, or missing."""
    return argument is None or (isinstance(argument, dict) and "parameter" in argument)


def is_dense(operator: Operator, position: int) -> bool:
    """Whether the rows of an input lie in memory one after the other, as its call was recorded."""
    call = _recorded(operator) or {"args": []}
    return not any(isinstance(a, dict) and a.get("input") == position and "stride" in a for a in call["args"])


def is_batch_norm(operator: Operator) -> bool:
    """Whether it is a batch norm of (B, C, H, W) that normalizes by the statistics of the batch."""
    call = call_of(operator) if operator.kind == "batch_norm" and len(operator.output_shape) == 4 else None
    return call is not None and call["args"][5] is True and all(map(is_plain, call["args"][1:3]))


def is_layer_norm(operator: Operator) -> bool:
    """Whether it is a layer norm over the last dimension."""
    call = call_of(operator) if operator.kind == "layer_norm" else None
    if call is None or len(operator.inputs) != 1 or len(call["args"][1]) != 1:
        return False
    return all(map(is_plain, call["args"][2:4]))


def reason_against_rms_norm(operator: Operator, base: Precision) -> str:
    """Why no producer computes a ``rms_norm``; empty where one does.  ``base``: of the job's autocast."""
    call = call_of(operator)
    if call is None or len(operator.inputs) != 1:
        return "its call was not recorded, or its weight is computed"
    _, shape, weight, eps = (*call["args"], None, None)[:4]
    if len(shape) != 1 or not is_plain(weight):
        return "it normalizes several dimensions, or its weight is no parameter"
    if eps is None and base is not Precision.FLOAT32:
        return "without eps, what is added to 16-bit numbers is up to PyTorch's version: give eps"
    return ""


def activation_of(operator: Operator) -> Activation:
    """The function that an operator is; NONE for what no kernel computes."""
    call = call_of(operator) if operator.kind in ("relu", "gelu", "silu") and len(operator.inputs) == 1 else None
    if call is None:
        return Activation.NONE
    if operator.kind == "gelu":
        approximate = call["kwargs"].get("approximate", "none")
        return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(approximate, Activation.NONE)
    return Activation(operator.kind)


def summands_of(operator: Operator) -> tuple[OpId, OpId] | None:
    """The two that an addition adds, which neither scales nor broadcasts; None for anything else."""
    call = call_of(operator) if operator.kind == "add" else None
    if call is None or len(operator.inputs) != 2 or len(set(operator.inputs)) != 2:
        return None
    if call["args"][2:] not in ([], [1]) or call["kwargs"].get("alpha", 1) != 1:
        return None
    if any(shape != operator.output_shape for shape in operator.input_shapes):
        return None
    first, second = operator.inputs
    return first, second


@attrs.frozen
class Factor:
    """What a product multiplies: an activation at a position of its inputs, else a parameter or another tensor (None)."""

    position: int | None
    argument: dict[str, Any]


def factors_of(operator: Operator) -> tuple[Factor, Factor] | None:
    """The two tensors that a product multiplies into a third; None for anything else, and for one that is part of a loss."""
    if operator.kind != "mul" or operator.in_place or operator.op_id.fqn.startswith(_IN_THE_LOSS):
        return None
    call = _recorded(operator)
    if call is None or call["kwargs"] or len(call["args"]) != 2 or not all(isinstance(a, dict) for a in call["args"]):
        return None
    first, second = (Factor(argument.get("input"), argument) for argument in call["args"])
    return first, second


def squared_by(operator: Operator) -> int | None:
    """The position of the input that an operator squares."""
    call = None if operator.in_place else call_of(operator)
    if (
        call is None
        or call["kwargs"]
        or not call["args"]
        or not isinstance(call["args"][0], dict)
        or "input" not in call["args"][0]
    ):
        return None
    first, *others = call["args"]
    is_power = operator.kind == "pow" and others == [2]
    is_product = operator.kind == "mul" and others == [first]
    return int(first["input"]) if is_power or is_product or (operator.kind == "square" and not others) else None


def is_mean_of_rows(operator: Operator) -> bool:
    """Whether it is the mean over the last dimension, which is kept."""
    call = call_of(operator) if operator.kind == "mean" else None
    if call is None or call["kwargs"] or len(call["args"]) != 3 or not operator.input_shapes:
        return False
    return call["args"][1:] in ([[-1], True], [[len(operator.input_shapes[0]) - 1], True])


def number_added_by(operator: Operator) -> float | None:
    """The number that an operator adds to a tensor."""
    call = call_of(operator) if operator.kind == "add" and not operator.in_place else None
    if call is None or len(operator.inputs) != 1 or len(call["args"]) != 2 or call["kwargs"].get("alpha", 1) != 1:
        return None
    numbers = [argument for argument in call["args"] if isinstance(argument, (int, float))]
    return float(numbers[0]) if len(numbers) == 1 and math.isfinite(numbers[0]) else None


def eps_of(dag: PrecisionDag, name: OpId) -> float:
    """What the RMS norm of that name adds to the mean square: what its call says, else what PyTorch takes of float32."""
    operator = dag[name]
    if operator.kind == "rsqrt":
        return number_added_by(dag[operator.inputs[0]]) or 0.0
    call = call_of(operator)
    given = None if call is None else (*call["args"], None, None)[3]
    return 2.0**-23 if given is None else float(given)

"""Peak memory of one rank by keeping house: forward and backward are walked, every tensor allocated and freed in its moment.

Shares no code with the product: no intervals, no running sums, only tensors and who still needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from brute_force_formats import BYTES, INPUT, WantedCast, gradient_reads, size
from brute_force_walk import Walked, Walker

FORWARD, BACKWARD = "forward", "backward"
FOR_EVER = ("for ever", 0)
ELEMENT_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


class House:
    """Tensors that are alive, each with the visits of operators that still need it."""

    def __init__(self) -> None:
        self.alive: dict[object, tuple[int, set[tuple[str, int]]]] = {}
        self.awaiting: dict[tuple[str, int], list[object]] = {}
        self.present = 0
        self.levels: list[int] = []

    def allocate(self, name: object, nbytes: int, needed_by: set[tuple[str, int]]) -> None:
        assert name not in self.alive, f"{name} is allocated twice"
        assert needed_by, f"nobody needs {name}"
        self.alive[name] = (nbytes, needed_by)
        self.present += nbytes
        for visit in needed_by:
            self.awaiting.setdefault(visit, []).append(name)

    def finish(self, visit: tuple[str, int], workspace: int) -> None:
        """An operator has run: note what is alive, then free what is needed no more."""
        self.levels.append(self.present + workspace)
        for name in self.awaiting.pop(visit, []):
            nbytes, needed_by = self.alive[name]
            needed_by.remove(visit)
            if not needed_by:
                del self.alive[name]
                self.present -= nbytes


def peak_bytes(walker: Walker, walked: Sequence[Walked], *, several_ranks: bool, micro_batches: int = 1) -> int:
    """The peak of one rank's step, in bytes; of one of several micro-batches where there are two."""
    static, levels = levels_bytes(walker, walked, several_ranks=several_ranks, micro_batches=micro_batches)
    return static + max(levels)


def bucket_bytes(walker: Walker, *, several_ranks: bool) -> int:
    """DDP's buckets; a GPU still has those of the first step in the second."""
    sets = 0 if not several_ranks else 1 if walker.profile.device.kind == "cpu" else 2
    return sets * sum(bucket.nbytes for bucket in walker.dag.buckets)


def levels_bytes(walker: Walker, walked: Sequence[Walked], *, several_ranks: bool, micro_batches: int = 1) -> tuple[int, list[int]]:
    """What is there during the whole step, and what is alive beside it while each operator runs, forward and backward.

    All micro-batches after the first are alike.
    """
    dag, profile = walker.dag, walker.profile
    static = sum(size(parameter.shape) * ELEMENT_BYTES[parameter.dtype] for parameter in dag.parameters)
    static += profile.optimizer_state_bytes + profile.input_bytes
    static += bucket_bytes(walker, several_ranks=several_ranks)
    house = House()
    for _ in range(micro_batches):
        _run(walker, walked, house)
    return static, house.levels


def _run(walker: Walker, walked: Sequence[Walked], house: House) -> None:
    dag, sums = walker.dag, set(house.alive)
    outputs, copies = _needs(walker, walked)
    for place, operator in enumerate(dag.operators):
        one = walked[place]
        if one.runs_at != place:
            house.finish((FORWARD, place), 0)
            continue
        if one.copy is not None:
            name = ("copy", place, one.copy[0])
            house.allocate(name, size(operator.output_shape) * BYTES[one.copy[0].target], {(FORWARD, place), *copies.get(name, ())})
        if operator.kind != "input" and one.has_result and _tensor_of(walker, place) == place:
            house.allocate(("output", place), size(operator.output_shape) * BYTES[one.leaving], outputs[place])
        for cast in one.wanted:
            if cast.where == INPUT:
                name = _copy_name(walker, place, cast)
                if name not in house.alive:
                    house.allocate(name, cast.elements * BYTES[cast.key.target], copies[name])
        if one.cost.saved_own_bytes:
            house.allocate(("own", place), one.cost.saved_own_bytes, {(BACKWARD, place)})
        house.finish((FORWARD, place), one.cost.workspace_bytes)
    for place in reversed(range(len(walked))):
        _go_backward(walker, walked, house, place, sums)


def _go_backward(walker: Walker, walked: Sequence[Walked], house: House, place: int, sums: set[object]) -> None:
    operator, one = walker.dag.operators[place], walked[place]
    if one.runs_at != place:
        for fqn in operator.parameters:
            _parameter_gradient(walker, house, fqn, sums)
        house.finish((BACKWARD, place), 0)
        return

    if _tensor_of(walker, place) != place and walker.is_read[place]:
        house.finish((BACKWARD, place), _passing(walker, one, place))  # the gradient is that of what it hands on
        return

    def gradient_of(tensor: int) -> None:
        tensor = _tensor_of(walker, tensor)
        producer = walker.dag.operators[tensor]
        if producer.kind != "input" and ("gradient", tensor) not in house.alive:
            nbytes = size(producer.output_shape) * BYTES[walked[tensor].leaving]
            house.allocate(("gradient", tensor), nbytes, {(BACKWARD, tensor)})

    if not walker.is_read[place]:
        gradient_of(place)
    for member in one.members or (place,):
        for argument, source in enumerate(walker.sources[member]):
            if argument not in walker.dag.operators[member].no_grad_inputs and source not in one.members:
                gradient_of(source)
    for fqn in operator.parameters:
        _parameter_gradient(walker, house, fqn, sums)
    house.finish((BACKWARD, place), _passing(walker, one, place))


def _tensor_of(walker: Walker, place: int) -> int:
    """The operator in whose tensor this one's output lies: its own, unless it hands on what it reads."""
    operator, sources = walker.dag.operators[place], walker.sources[place]
    if (
        operator.op_id not in walker.profile.handed_on
        or operator.op_class != "dependent"
        or len(sources) != 1
        or operator.parameters
    ):
        return place
    if size(walker.dag.operators[sources[0]].output_shape) != size(operator.output_shape):
        return place
    return _tensor_of(walker, sources[0])


def _passing(walker: Walker, one: Walked, place: int) -> int:
    operator, workspace = walker.dag.operators[place], one.cost.backward_workspace_bytes
    passing = one.cost.workspace_bytes if workspace is None else workspace
    if one.variant is not None:
        for read in gradient_reads(operator, one.variant):
            if read != one.leaving:
                passing += size(operator.output_shape) * BYTES[read]
    return passing


def _parameter_gradient(walker: Walker, house: House, fqn: str, sums: set[object]) -> None:
    """The first micro-batch's stays, as the sum; a later one's is added to it when its first user has run backward."""
    parameter, name = walker.parameters[fqn], ("parameter", fqn)
    if parameter.requires_grad and name in sums:
        first = next(place for place, operator in enumerate(walker.dag.operators) if fqn in operator.parameters)
        if ("added", fqn) not in house.alive:
            house.allocate(("added", fqn), size(parameter.shape) * 4, {(BACKWARD, first)})
        return
    if parameter.requires_grad and name not in house.alive:
        house.allocate(name, size(parameter.shape) * 4, {FOR_EVER})


def _copy_name(walker: Walker, place: int, cast: WantedCast) -> tuple[object, ...]:
    return ("copy", walker.sources[place][cast.argument], cast.key)


def _needs(
    walker: Walker, walked: Sequence[Walked]
) -> tuple[list[set[tuple[str, int]]], dict[tuple[object, ...], set[tuple[str, int]]]]:
    """Who needs each operator's output, and each cast copy of it: those that read it, and in backward those that saved it."""
    outputs: list[set[tuple[str, int]]] = [{(FORWARD, place)} for place in range(len(walked))]
    copies: dict[tuple[object, ...], set[tuple[str, int]]] = {}
    for place, one in enumerate(walked):
        if one.cost.saves_output:
            outputs[_tensor_of(walker, place)].add((BACKWARD, place))
        for source in one.keeps:
            outputs[_tensor_of(walker, source)].add((BACKWARD, place))
        for source in walker.sources[place]:
            copy = walked[source].copy
            if copy is None or place not in copy[1]:
                outputs[_tensor_of(walker, source)].add((FORWARD, one.runs_at))
        received: dict[int, tuple[object, ...]] = {}
        for cast in one.wanted:
            if cast.where == INPUT:
                received[cast.argument] = _copy_name(walker, place, cast)
                copies.setdefault(received[cast.argument], set()).add((FORWARD, place))
        for argument in one.cost.saves_inputs:
            holders = (
                copies[received[argument]] if argument in received else outputs[_tensor_of(walker, walker.sources[place][argument])]
            )
            holders.add((BACKWARD, place))
    return outputs, copies

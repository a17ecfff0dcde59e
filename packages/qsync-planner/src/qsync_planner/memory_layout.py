"""What no plan changes about memory: static bytes, when parameters' gradients are made, when tensors' gradients begin to live."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import attrs

from qsync_core.dag import PrecisionDag
from qsync_core.precision import Precision
from qsync_core.profile import Profile

GRADIENT_NBYTES = Precision.FLOAT32.nbytes
_DTYPE_NBYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@attrs.frozen
class MemoryLayout:
    """The fixed part of one rank's memory.

    A step has 2V moments: operator i runs forward at moment i and backward at moment 2V-1-i.

    Args:
        dag: the model.
        profile: its measurements.
        distributed: whether DDP keeps its bucket copies of the gradients.
    """

    dag: PrecisionDag
    profile: Profile
    distributed: bool

    @property
    def count(self) -> int:
        """V, the number of operators."""
        return len(self.dag.operators)

    def backward_of(self, position: int) -> int:
        """The moment of an operator's backward."""
        return 2 * self.count - 1 - position

    @cached_property
    def bucket_bytes(self) -> int:
        """DDP's copies of all gradients."""
        return sum(bucket.nbytes for bucket in self.dag.buckets) if self.distributed else 0

    @cached_property
    def static_bytes(self) -> int:
        """There during the whole step: weights, optimizer state, the batch, bucket copies."""
        weights = sum(p.numel * _DTYPE_NBYTES.get(p.dtype, GRADIENT_NBYTES) for p in self.dag.parameters)
        return weights + self.profile.optimizer_state_bytes + self.profile.input_bytes + self.bucket_bytes

    @cached_property
    def parameter_gradients(self) -> tuple[int, ...]:
        """Bytes of parameters' gradients that begin to live at each moment: at their last user's backward."""
        numel = {p.fqn: p.numel for p in self.dag.parameters if p.requires_grad}
        last_user: dict[str, int] = {}
        for position, operator in enumerate(self.dag.operators):
            last_user.update(dict.fromkeys(operator.parameters, position))
        begin = [0] * (2 * self.count)
        for name, size in numel.items():
            if name in last_user:
                begin[self.backward_of(last_user[name])] += size * GRADIENT_NBYTES
        return tuple(begin)

    @cached_property
    def parameter_gradients_until(self) -> tuple[int, ...]:
        """Their running sum."""
        return tuple(accumulate(self.parameter_gradients))

    @cached_property
    def first_gradient(self) -> tuple[int | None, ...]:
        """Per operator the moment at which its output's gradient is first made: the backward of its last reader that makes one.

        The last operator (the loss) starts from its own; None where no reader makes any, and for inputs.
        """
        index = self.dag.index
        inputs: list[tuple[int, ...]] = [tuple(index[producer] for producer in operator.inputs) for operator in self.dag.operators]
        return tuple(
            None if operator.kind == "input" else self._first_gradient(position, inputs)
            for position, operator in enumerate(self.dag.operators)
        )

    def _first_gradient(self, producer: int, inputs: Sequence[tuple[int, ...]]) -> int | None:
        readers = self.dag.consumers[producer]
        for reader in reversed(readers):
            skipped = self.dag.operators[reader].no_grad_inputs
            if any(source == producer and i not in skipped for i, source in enumerate(inputs[reader])):
                return self.backward_of(reader)
        return None if readers else self.backward_of(producer)

"""One call of a kernel, whatever its operator: what is asked for, the operands by name, and a check of what was written."""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch

from qsync_core.geometry import NEUTRAL
from qsync_core.ir.variant import Variant
from qsync_torch.aten.random_bits import Offset
from qsync_torch.conformance.operands import Outputs, described, is_untouched
from qsync_torch.kernels.operands import REPLACED, memory_of

if TYPE_CHECKING:
    from qsync_torch.conformance.subject import Kernel, Subject

__tracebackhide__ = True  # a failure shows the test and the kernel


class Written(dict[str, torch.Tensor]):
    """What a kernel wrote, by name.  As an attribute, what was not wanted is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


@attrs.frozen
class Asked:
    """What a call is, beside its operands.

    Attributes:
        op: the operator that is asked for.
        signature: names of its arguments in order; ``name>`` is an output, and ``name=`` is given by its name.
        shapes, fields: of the request.
        draws: the outputs that each number of the random numbers counts for.
        any_strides: names of the matrices and vectors that may have any strides.
        configurations_agree: all write the same bits, and pairs of seed and offset that differ in a bit or two give others.
    """

    op: str
    signature: str
    shapes: tuple[tuple[int, ...], ...]
    fields: dict[str, Any] = attrs.Factory(dict)
    draws: dict[str, tuple[str, ...]] = attrs.Factory(dict)
    any_strides: tuple[str, ...] = ()
    configurations_agree: bool = False


@attrs.frozen(eq=False, kw_only=True)
class Call(abc.ABC):
    """One call of a kernel.  Its fields are the operands, called as in the signature.

    Attributes:
        variant: of the request.
        seed, offset: of random numbers, where the operator draws any.
    """

    variant: Variant
    seed: int = 11
    offset: Offset = 12

    @property
    @abc.abstractmethod
    def asked(self) -> Asked:
        """What is asked for."""

    @abc.abstractmethod
    def allocate(self, outputs: Outputs) -> Written:
        """Make all outputs that are wanted."""

    @abc.abstractmethod
    def compare(self, written: Written) -> None:
        """Compare everything that was written with float64.

        Raises:
            AssertionError: where something is off by more than the operator's arithmetic explains.
        """

    def check(self, written: Written) -> None:
        """The same, and a failure says of which call it is.

        Raises:
            AssertionError: where something is off by more than the operator's arithmetic explains.
        """
        with when(lambda: str(self)):
            try:
                self.compare(written)
            except AssertionError:
                if empty := [name for name, x in written.items() if is_untouched(x)]:
                    raise AssertionError(f"nothing was written into {' and '.join(empty)}") from None
                raise

    def __str__(self) -> str:
        """Operator, variant, further fields of the request and each operand's format, shape and strides: to make the call again."""
        asked = self.asked
        fields = (f"{name} {value}" for name, value in asked.fields.items() if value and value != NEUTRAL)
        operands = (f"{name} {described(self.argument(x))}" for name, x in self.operands.items())
        return "; ".join((f"{asked.op} in {self.variant}", *fields, *operands))

    def argument(self, x: torch.Tensor) -> torch.Tensor:
        """An operand or an output as the kernel takes it."""
        return x

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """All tensors that the kernel reads, by name."""
        found = {token: getattr(self, token.rstrip("=")) for token in self.asked.signature.split() if ">" not in token}
        fields = attrs.fields_dict(type(self))
        return {name.rstrip("="): x for name, x in found.items() if isinstance(x, torch.Tensor) and name.rstrip("=") in fields}

    def changed(self, **fields: Any) -> Self:
        """The same call with other operands or numbers."""
        return attrs.evolve(self, **fields)

    def kernels(self, subject: Subject) -> list[Kernel]:
        """Build kernels of all configurations; where the backend refuses, the test is skipped."""
        asked = self.asked
        return subject.kernels(asked.op, self.variant, asked.shapes, **asked.fields)

    def launch(self, kernel: Kernel, written: Written, *, watched: bool = True) -> None:
        """Call the kernel, and unless a graph captures it, check that its inputs stay what they are."""
        positional, named, inputs = [], {}, {}
        for token in self.asked.signature.split():
            name = token.rstrip(">=")
            value = written.get(name) if ">" in token else getattr(self, name)
            if isinstance(value, torch.Tensor):
                if ">" not in token:
                    inputs[name] = value
                value = self.argument(value)
            if token.endswith("="):
                named[f"{name}_out" if ">" in token else name] = value
            else:
                positional.append(value)
        before = {name: x.clone() for name, x in inputs.items()} if watched else {}
        memory = memory_of((*positional, *named.values()))
        try:
            kernel(*positional, **named)
        except Exception as error:
            error.add_note(f"raised by the kernel of {self}")
            raise
        if memory_of((*positional, *named.values())) != memory:
            raise AssertionError(f"{self}: {REPLACED}")
        for name, kept in before.items():
            assert is_same(inputs[name], kept), f"{self}: the kernel changed its input {name}"

    def run(self, kernel: Kernel, outputs: Outputs, **numbers: Any) -> Written:
        """Call the kernel on fresh outputs; ``numbers`` are others than the call's own seed and offset."""
        written = self.allocate(outputs)
        self.changed(**numbers).launch(kernel, written)
        return written

    def put_to(self, subject: Subject, outputs: Outputs) -> list[Written]:
        """Run every configuration's kernel and check all that it writes."""
        found = [self.run(kernel, outputs) for kernel in self.kernels(subject)]
        for written in found:
            self.check(written)
        return found


@attrs.frozen(eq=False)
class Case:
    """A call by its name, which begins with its operator's: ``draw`` makes it on a device."""

    name: str
    draw: Callable[[torch.device], Call]

    def call(self, subject: Subject) -> Call:
        """Make the call, unless its operator is not offered: then the test is skipped."""
        subject.skip_unless_offered(self.name.partition(",")[0])
        return self.draw(subject.device)


Impossible = tuple[Variant, tuple[tuple[int, ...], ...]]
"""Variant and shapes."""


@attrs.frozen(eq=False, kw_only=True)
class Entry:
    """An operator of the table: the calls that each check is put to.

    Attributes:
        values: compared with float64.
        ones: of which operands have dimensions of size 1, in memory of any strides.
        typical: a few, also run after each operand was changed in place, with other strides, and on CUDA under graphs and streams;
            the first one stands for the requests that a backend has no reason to refuse.
        edges: with the operand whose largest value a scale must see, and that value; it is put to every edge.
        drawn: rounded stochastically, by numbers of which every bit counts.
        impossible: requests that every backend has to refuse: what they ask for, and their variant, shapes and further fields.
    """

    values: list[Case]
    typical: list[Case]
    ones: list[Case]
    edges: list[tuple[Case, str, float]] = attrs.Factory(list)
    drawn: list[Case] = attrs.Factory(list)
    impossible: dict[str, Impossible] = attrs.Factory(dict)


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    if x.dtype.is_floating_point:
        x, y = (tensor.double().nan_to_num(7.0) for tensor in (x, y))
    return torch.equal(x, y)


class when:
    """Says in which circumstance a check in its body failed; a function is asked only then."""

    def __init__(self, circumstance: str | Callable[[], str]) -> None:
        self._circumstance = circumstance

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, AssertionError):
            said = self._circumstance if isinstance(self._circumstance, str) else self._circumstance()
            # Behind the sentence pytest has put how its values came about: tensors.
            raise AssertionError(f"{said}: {str(error).partition(chr(10) + 'assert ')[0]}") from None

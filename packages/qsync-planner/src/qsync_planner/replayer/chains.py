"""Fused chains in the cost model: which operators run with which others, and what the last of them stands for.

A fused chain runs at the place of its last operator, forward and backward; its other operators take nothing
(docs/design/fused-chains.md).  What it writes depends on the variants of its readers, which stand behind it in the graph, and on
nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs

from qsync_core.chains.finding import chains_of
from qsync_core.errors import PlanError
from qsync_core.ir.chain import Chain, ChainVariant
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import OpCost, Profile
from qsync_core.ir.semantics import ChainResult, ChainRun, chain_result, chain_run, operands_kept, possible_results
from qsync_core.ir.variant import Variant

Chosen = Variant | ChainVariant
"""What a plan says of an operator, or of a chain by its name."""
Variants = Mapping[OpId, Chosen]


@attrs.frozen(cache_hash=True)
class Absorbed:
    """How an operator of a fused chain runs that is not the last: with the last, ``delay`` operators later.

    ``keeps``: positions of its inputs that the chain keeps for backward as they are.
    """

    delay: int
    keeps: tuple[int, ...]


@attrs.frozen(cache_hash=True)
class ChainEnd:
    """How the last operator of a fused chain runs: as all of it.

    Attributes:
        chain: its number in :attr:`Chains.all`.
        chosen: what the plan says of it.
        result: what it writes for its readers.
        keeps: positions of this operator's inputs that the chain keeps for backward as they are.
    """

    chain: int
    chosen: ChainVariant
    result: ChainResult
    keeps: tuple[int, ...]


@attrs.frozen
class Chains:
    """The chains of a model, by position."""

    dag: PrecisionDag
    all: tuple[Chain, ...]

    @classmethod
    def of(cls, dag: PrecisionDag) -> Chains:
        """The chains of a model."""
        return dag.once(_chains_of)

    @cached_property
    def by_name(self) -> dict[OpId, int]:
        """The number of every chain by its name."""
        return {chain.name: number for number, chain in enumerate(self.all)}

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The positions of every chain's operators."""
        return tuple(tuple(self.dag.index[member] for member in chain.members) for chain in self.all)

    @cached_property
    def product_readers(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the operators that every chain's copy may serve."""
        return tuple(tuple(self.dag.index[reader] for reader in chain.product_readers) for chain in self.all)

    @cached_property
    def read_by(self) -> dict[int, int]:
        """The number of the chain whose copy may serve an operator, by that operator's position."""
        return {reader: number for number, readers in enumerate(self.product_readers) for reader in readers}

    def number(self, name: OpId, profile: Profile) -> int:
        """The number of a chain.

        Raises:
            PlanError: when the model has no chain of that name.
        """
        found = self.by_name.get(name)
        if found is None:
            raise PlanError(
                f"model {self.dag.model!r} has no chain {name}; is the plan for another model? (profile of {profile.device.name})"
            )
        return found

    def end(self, number: int, chosen: ChainVariant, variant_of: Callable[[int], Variant]) -> ChainEnd:
        """How the last operator of a fused chain runs, given the variants of operators by their position."""
        chain = self.all[number]
        variants = zip(chain.product_readers, map(variant_of, self.product_readers[number]), strict=True)
        return self.end_with(number, chosen, chain_result(chain, dict(variants)))

    def end_with(self, number: int, chosen: ChainVariant, result: ChainResult) -> ChainEnd:
        """The same, given what it writes."""
        return ChainEnd(number, chosen, result, self._keeps(number, chosen, self.members[number][-1]))

    def absorbed(self, number: int, chosen: ChainVariant) -> Iterator[tuple[int, Absorbed]]:
        """Position of each operator of a fused chain but the last, and how it runs."""
        *others, last = self.members[number]
        for position in others:
            yield position, Absorbed(last - position, self._keeps(number, chosen, position))

    def _keeps(self, number: int, chosen: ChainVariant, position: int) -> tuple[int, ...]:
        chain, operator = self.all[number], self.dag.operators[position]
        kept = operands_kept(chain, chosen)
        return tuple(index for index, source in enumerate(operator.inputs) if source in kept)

    def run(self, end: ChainEnd, precision: Precision) -> ChainRun:
        """What a profile measures of a fused chain whose result has that format."""
        return chain_run(self.all[end.chain], end.chosen, end.result, precision)

    def cost(self, end: ChainEnd, run: ChainRun, profile: Profile) -> OpCost:
        """The measured cost of a fused chain.

        Raises:
            PlanError: when the profile lacks it.
        """
        name = self.all[end.chain].name
        found = profile.chain_index.get((name, run.form, run.variant))
        if found is None:
            what = "float result" if run.form.float_result else "no float result"
            raise PlanError(
                f"the profile of device {profile.device.name} has no cost of chain {name}, {end.chosen.label}, with {what} in "
                f"{run.variant}; profile again with a kernel backend that offers producers, or leave the chain unfused"
            )
        return found

    def measured(self, number: int, profile: Profile, rungs: Mapping[OpId, Sequence[Variant]]) -> tuple[ChainVariant, ...]:
        """What a plan may say of a chain beside that it is not fused: what was measured for all that its neighbours may be.

        Args:
            rungs: what a plan may pick for each operator.
        """
        chain = self.all[number]
        ways = {(form, variant) for name, form, variant in profile.chain_index if name == chain.name}
        formats = {variant.output for _, variant in ways}
        chosen = {ChainVariant(saved=variant.saved if variant.saved.needs_scale else None) for _, variant in ways}
        results = possible_results(chain, [rungs[reader] for reader in chain.product_readers])
        arriving = {variant.output for options in rungs.values() for variant in options} | {self.dag.base, Precision.FLOAT32}
        if not arriving <= formats:
            return ()

        def is_whole(candidate: ChainVariant) -> bool:
            runs = (chain_run(chain, candidate, result, precision) for result in results for precision in formats)
            return all((run.form, run.variant) in ways for run in runs)

        return tuple(sorted(filter(is_whole, chosen), key=lambda candidate: candidate.saved or ""))


def _chains_of(dag: PrecisionDag) -> Chains:
    return Chains(dag, chains_of(dag))

"""One rank's operators under an assignment, walked once in the order of execution: formats, measured costs, casts performed.

Shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from brute_force_formats import BYTES, EIGHT_BIT, INPUT, RESULT, WantedCast, delivered, follows, size, wanted_casts

from qsync_core.ir.chain import Chain, ChainForm, ChainVariant
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, OpCost, Profile
from qsync_core.ir.variant import Variant

NOTHING = OpCost(0, 0, 0, 0)


@attrs.frozen
class Walked:
    """One operator as it runs.

    Attributes:
        variant: of an adjustable operator (of those that a plan cannot address, too), else None.
        arriving: formats of its inputs; ``leaving``: of its output.
        cost: as measured in the format or variant in which it runs.
        wanted: every cast it needs.
        performed: those of them that it is the first to need; the rest was done by an earlier reader of the same tensor, or by the
            fused chain that wrote it.
        runs_at: the place where it really runs: that of the last operator of a fused chain.
        has_result: whether its output is a tensor: not inside a fused chain, nor where nothing reads a chain's floats.
        copy: the 8-bit copy of its output that it writes, and the operators that read it.
        keeps: of a fused chain, by its last operator: the sources that it keeps for backward as they are.
        members: of a fused chain, by its last operator: all of them.
    """

    variant: Variant | None
    arriving: tuple[Precision, ...]
    leaving: Precision
    cost: OpCost
    wanted: tuple[WantedCast, ...]
    performed: tuple[WantedCast, ...]
    runs_at: int = -1
    has_result: bool = True
    copy: tuple[CastKey, tuple[int, ...]] | None = None
    keeps: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


class Walker:
    """Walks one group's rank through its operators, remembering what an operator costs in the formats it was seen with."""

    def __init__(self, dag: PrecisionDag, profile: Profile, chains: Iterable[Chain] = ()) -> None:
        self.dag, self.profile = dag, profile
        self.place = {operator.op_id: place for place, operator in enumerate(dag.operators)}
        self.sources = [tuple(self.place[name] for name in operator.inputs) for operator in dag.operators]
        self.is_read = [any(place in sources for sources in self.sources) for place in range(len(dag.operators))]
        self.parameters = {parameter.fqn: parameter for parameter in dag.parameters}
        self.cast_models: dict[CastKey, CastModel] = {model.key: model for model in profile.casts}
        self._seen: dict[object, Walked] = {}
        self.chains = tuple(chains)

    def walk(self, said: Mapping[OpId, Variant | ChainVariant]) -> list[Walked]:
        """Every operator in the order of execution."""
        variants = delivered(self.dag, {name: variant for name, variant in said.items() if isinstance(variant, Variant)})
        fused: dict[int, tuple[Chain, ChainVariant]] = {}
        for chain in self.chains:
            how = said.get(chain.name)
            if isinstance(how, ChainVariant) and how.fused:
                fused |= dict.fromkeys((self.place[member] for member in chain.members), (chain, how))
        done: set[tuple[int, str, CastKey]] = set()
        walked: list[Walked] = []
        for place, operator in enumerate(self.dag.operators):
            arriving = tuple(walked[source].leaving for source in self.sources[place])
            variant = None
            if operator.op_class is OpClass.ADJUSTABLE:
                variant = operator.variant if operator.not_applicable else variants[operator.op_id]
            alone = self._alone(place, variant, arriving)
            if place in fused:
                walked.append(self._fused(place, alone, *fused[place], variants))
                continue
            performed = []
            for cast in alone.wanted:
                if cast.for_all:
                    source = self.sources[place][cast.argument]
                    name = (source, cast.where, cast.key)
                    copy = walked[source].copy
                    if name in done or (cast.where == INPUT and copy is not None and copy[0] == cast.key and place in copy[1]):
                        continue
                    done.add(name)
                performed.append(cast)
            walked.append(Walked(variant, arriving, alone.leaving, alone.cost, alone.wanted, tuple(performed), place))
        return walked

    def _fused(self, place: int, alone: Walked, chain: Chain, how: ChainVariant, variants: Mapping[OpId, Variant]) -> Walked:
        """An operator of a fused chain: the last one takes what the chain takes, all others nothing."""
        members = tuple(self.place[member] for member in chain.members)
        if place != members[-1]:
            return Walked(None, alone.arriving, alone.leaving, NOTHING, (), (), members[-1], has_result=False)
        result = self.dag.operators[place]
        readers = [other for other, sources in enumerate(self.sources) if place in sources]
        takers: dict[int, tuple[Precision, Granularity, Rounding]] = {}
        for reader in readers:
            operator = self.dag.operators[reader]
            variant = None if operator.not_applicable else variants.get(operator.op_id)
            if variant is None or variant.compute not in EIGHT_BIT or variant.grad_weight in EIGHT_BIT:
                continue
            if chain.producer == "glu" and operator.kind == "conv2d":  # its copies are of rows, not of images
                continue
            if operator.input_shapes[0] == result.output_shape and (
                chain.producer != "batch_norm" or variant.x_granularity == "tensor"
            ):
                takers[reader] = (variant.compute, variant.x_granularity, variant.rounding)
        copy = next(iter(takers.values()), None)
        served = tuple(reader for reader, taken in takers.items() if taken == copy)
        has_result = len(served) < len(readers) or not readers
        rounding = Rounding.NEAREST if copy is None else copy[2]
        if copy is None and how.saved:
            rounding = Rounding.STOCHASTIC
        floats = alone.leaving
        runs_as = Variant(
            floats if copy is None else copy[0],
            floats,
            how.saved or floats,
            floats,
            Precision.FLOAT32,
            Granularity.PER_TENSOR if copy is None else copy[1],
            Granularity.PER_TENSOR,
            rounding,
        )
        form = ChainForm(chain.activation, chain.residual is not None, has_result)
        (cost,) = [
            row.cost for row in self.profile.chains if chain.name in row.chains and (row.form, row.variant) == (form, runs_as)
        ]
        keeps: tuple[int, ...] = ()
        if how.saved is None and not (chain.producer in ("layer_norm", "rms_norm") and chain.residual is not None):
            keeps = tuple(self.place[name] for name in (chain.x, chain.factor) if name is not None)
        written = None if copy is None else (CastKey(floats, *copy), served)
        return Walked(None, alone.arriving, floats, cost, (), (), place, has_result, written, keeps, members)

    def _alone(self, place: int, variant: Variant | None, arriving: tuple[Precision, ...]) -> Walked:
        key = (place, variant, arriving)
        if key not in self._seen:
            operator = self.dag.operators[place]
            leaving = follows(operator, arriving) if variant is None else variant.output
            runs_as = Variant(leaving, leaving, leaving, leaving, leaving) if variant is None else variant
            cost, wanted = NOTHING, wanted_casts(operator, variant, arriving)
            if operator.kind != "input":
                measured = self.profile.cost_index[operator.op_id]
                if runs_as not in measured and runs_as.output == Precision.FLOAT32:
                    both = (attrs.evolve(runs_as, output=output) for output in (Precision.BFLOAT16, Precision.FLOAT16))
                    runs_as = next(twin for twin in both if twin in measured)
                cost = self.profile.costs[measured[runs_as]]
                if runs_as.output != leaving:
                    elements = size(operator.output_shape)
                    wanted.append(WantedCast(RESULT, CastKey(runs_as.output, leaving), elements))
                    forward, backward = cost.workspaces
                    forward += elements * BYTES[runs_as.output]
                    cost = attrs.evolve(cost, workspace_bytes=forward, backward_workspace_bytes=backward)
            wanted = tuple(wanted)
            self._seen[key] = Walked(variant, arriving, leaving, cost, wanted, wanted)
        return self._seen[key]

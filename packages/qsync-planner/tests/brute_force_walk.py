"""One rank's operators under an assignment, walked once in the order of execution: formats, measured costs, casts performed.

Shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from brute_force_formats import WantedCast, follows, wanted_casts

from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
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
        performed: those of them that it is the first to need; the rest was done by an earlier reader of the same tensor.
    """

    variant: Variant | None
    arriving: tuple[Precision, ...]
    leaving: Precision
    cost: OpCost
    wanted: tuple[WantedCast, ...]
    performed: tuple[WantedCast, ...]


class Walker:
    """Walks one group's rank through its operators, remembering what an operator costs in the formats it was seen with."""

    def __init__(self, dag: PrecisionDag, profile: Profile) -> None:
        self.dag, self.profile = dag, profile
        self.place = {operator.op_id: place for place, operator in enumerate(dag.operators)}
        self.sources = [tuple(self.place[name] for name in operator.inputs) for operator in dag.operators]
        self.is_read = [any(place in sources for sources in self.sources) for place in range(len(dag.operators))]
        self.parameters = {parameter.fqn: parameter for parameter in dag.parameters}
        self.cast_models: dict[CastKey, CastModel] = {model.key: model for model in profile.casts}
        self._seen: dict[object, Walked] = {}

    def walk(self, variants: Mapping[OpId, Variant]) -> list[Walked]:
        """Every operator in the order of execution."""
        done: set[tuple[int, str, CastKey]] = set()
        walked: list[Walked] = []
        for place, operator in enumerate(self.dag.operators):
            arriving = tuple(walked[source].leaving for source in self.sources[place])
            variant = None
            if operator.op_class is OpClass.ADJUSTABLE:
                variant = operator.variant if operator.not_applicable else variants[operator.op_id]
            alone = self._alone(place, variant, arriving)
            performed = []
            for cast in alone.wanted:
                if cast.for_all:
                    name = (self.sources[place][cast.argument], cast.where, cast.key)
                    if name in done:
                        continue
                    done.add(name)
                performed.append(cast)
            walked.append(Walked(variant, arriving, alone.leaving, alone.cost, alone.wanted, tuple(performed)))
        return walked

    def _alone(self, place: int, variant: Variant | None, arriving: tuple[Precision, ...]) -> Walked:
        key = (place, variant, arriving)
        if key not in self._seen:
            operator = self.dag.operators[place]
            leaving = follows(operator, arriving) if variant is None else variant.output
            runs_as = Variant(leaving, leaving, leaving, leaving, leaving) if variant is None else variant
            cost = NOTHING
            if operator.kind != "input":
                cost = self.profile.costs[self.profile.cost_index[operator.op_id][runs_as]]
            wanted = tuple(wanted_casts(operator, variant, arriving))
            self._seen[key] = Walked(variant, arriving, leaving, cost, wanted, wanted)
        return self._seen[key]

"""What rank 0 has seen of a job: facts and times of every rank, and where it went no further."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from qsync_torch.doctor.rank_facts import RankFacts


@attrs.frozen
class Trouble:
    """Why not all steps were taken.

    Attributes:
        step: the one that not all ranks have taken: ``here``, ``facts``, ``speed``, ``connected``, ``all-reduce N`` (the N-th
            size), ``rounds`` or ``ended``.
        after_s: how long they had; 0 where a rank failed before that.
        told: this process was told to end, as torchrun does where another rank has failed.
        missing: ranks that have not taken it.
        not_entered: those that have not even begun the collective of the step.
        gone: those of them whose ``qsync doctor`` gives no sign of life.
        stopped: those whose probe gives none, but whose ``qsync doctor`` does: it is stopped, or hangs outside of any collective.
        died: how probes ended, by rank.
        warnings: what probes printed that may matter, by rank.
    """

    step: str
    after_s: float
    told: bool
    missing: Sequence[int]
    not_entered: Sequence[int]
    gone: Sequence[int]
    stopped: Sequence[int]
    died: Mapping[int, str]
    warnings: Mapping[int, Sequence[str]]


@attrs.frozen
class Seen:
    """What there is, by rank.

    Attributes:
        world: how many ranks there should be.
        hosts, qsync: machines and versions of QSync of those that came; where the versions differ, nothing else is asked.
        backend: of the collectives; empty before it was known.
        speeds: nanoseconds of a product and of a copy.
        all_reduces: by size in bytes the nanoseconds of each all-reduce; an empty list where a size was left out as too slow.
        rounds: nanoseconds of all-reduces that follow equal work.
        trouble: why there is no more; None where all is there.
        master: where the ranks meet.
    """

    world: int
    hosts: Mapping[int, str]
    qsync: Mapping[int, str]
    facts: Mapping[int, RankFacts]
    backend: str
    speeds: Mapping[int, Sequence[float]]
    all_reduces: Mapping[int, Mapping[int, Sequence[int]]]
    rounds: Mapping[int, Sequence[int]]
    trouble: Trouble | None
    master: str = ""

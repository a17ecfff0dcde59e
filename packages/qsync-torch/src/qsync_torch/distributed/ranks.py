"""A job's ranks: their process group, the device group of each, and what they do together or not at all."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version

import torch
import torch.distributed as dist

from qsync_core import errors
from qsync_core.artifacts.files import digest
from qsync_core.devices import same_device
from qsync_core.errors import ClusterError, CompatibilityError, PlanError, QSyncError, RankError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import DeviceKind
from qsync_torch.distributed.bounded_store import StoreSilent, collective_timeout, rank_timeout_s
from qsync_torch.distributed.exchange import Exchange, Report, by_value, end_process, grace_s, rank_list, store_has_gone
from qsync_torch.distributed.mailbox import Mailbox, beside
from qsync_torch.distributed.meeting import store_of_environment
from qsync_torch.distributed.process_group import in_process_group

GROUP_VARIABLE = "QSYNC_GROUP"
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
VERSIONS, PLAN = "versions", "plan"
"""Names of the facts that have a sentence of their own where ranks differ."""
KIND_OF_DEVICE = "kind of device"
"""A fact of ranks that are to make a process group: of a CUDA device and a CPU each would wait in another backend."""


@contextmanager
def process_group_from_environment(device: torch.device, backend: str = "") -> Iterator[int]:
    """This process's rank; under torchrun inside a process group (``backend``, by default nccl for CUDA devices, else gloo), alone
    as rank 0.

    A process group that exists already is used and left as it is.  A new one has keys of its own in torchrun's store: those of an
    earlier one of this process, whose ranks listen there no longer, are still in it.

    Raises:
        RankError: when the ranks do not meet: the port of the first one is in use, or one does not come.
    """
    if in_process_group():
        yield dist.get_rank()
        return
    found = store_of_environment()
    if found is None:
        yield 0
        return
    place, store = found
    if device.type == "cuda":
        torch.cuda.set_device(device)
    keys = store.under(f"qsync/group{next(_NUMBERS)}").store
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    with naming_lost_ranks("init_process_group"):
        dist.init_process_group(backend, store=keys, rank=place.rank, world_size=place.world, timeout=collective_timeout())
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


_NUMBERS = itertools.count()
"""Numbers of the process groups that this process makes, which are the same on all ranks."""


def members_to_be(round_name: str, patience_s: float | None = None) -> Mailbox | None:
    """The ranks that :func:`process_group_from_environment` will put into a process group, for :func:`together` before that.

    A rank that cannot join them (no MPS daemon, no such device) then says so: without, the others would wait for it in
    ``init_process_group``.

    Args:
        round_name: what they do together, equal on all ranks.
        patience_s: as :class:`Mailbox` has it; by default what a process group has.

    Returns:
        None in a process that is alone; in a process group, whose ranks take part then by default.

    Raises:
        RankError: as :func:`~qsync_torch.distributed.meeting.store_of_environment`.
    """
    if in_process_group() or (found := store_of_environment()) is None:
        return None
    place, store = found
    patience_s = dist.constants.default_pg_timeout.total_seconds() if patience_s is None else patience_s
    return Mailbox(place.rank, range(place.world), store.under(f"qsync/{round_name}"), patience_s)


FindDevice = Callable[[], tuple[str, DeviceKind]]
"""Name and kind of this process's device, as :func:`device_name` finds them; asked where nothing else decides."""


def which_group(plan: PrecisionPlan, environment: Mapping[str, str] | None = None, find_device: FindDevice | None = None) -> str:
    """The plan's device group that this process belongs to (docs/training.md#which-group-am-i).

    It is the one that ``QSYNC_GROUP`` names, else the only one whose device matches: name, kind and the share that
    ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` leaves this process.

    Args:
        environment: environment variables, ``os.environ`` by default.
        find_device: :func:`device_name` by default, which starts CUDA.

    Raises:
        PlanError: when ``QSYNC_GROUP`` names a group the plan does not have, or it is not set and not exactly one group matches.
    """
    groups = [(group.group, group.device.name, group.device.kind, group.device.share) for group in plan.groups]
    return _own_group(groups, "plan", PlanError, os.environ if environment is None else environment, find_device)


def which_group_of_cluster(
    cluster: Cluster, environment: Mapping[str, str] | None = None, find_device: FindDevice | None = None
) -> str:
    """:func:`which_group`, before there is a plan, by a cluster file.

    Raises:
        ClusterError: as :func:`which_group` raises a PlanError.
    """
    groups = [(group.name, group.device, None, group.share) for group in cluster.groups]
    return _own_group(groups, "cluster file", ClusterError, os.environ if environment is None else environment, find_device)


def _own_group(
    groups: Sequence[tuple[str, str, DeviceKind | None, float]],
    owner: str,
    error: type[QSyncError],
    environment: Mapping[str, str],
    find_device: FindDevice | None,
) -> str:
    """This process's group among (name, device, its kind where that is known, share)."""
    names = [name for name, *_ in groups]
    if wanted := environment.get(GROUP_VARIABLE, ""):
        if wanted in names:
            return wanted
        raise error(f"{GROUP_VARIABLE} is {wanted!r}, but the {owner}'s groups are {', '.join(names)}; set it to one of them")
    if len(names) == 1:
        return names[0]
    here, kind = (find_device or device_name)()
    asked = asked_share(environment)
    matching = [
        name
        for name, device, its_kind, share in groups
        if its_kind in (None, kind) and same_device(device, here) and (asked is None or same_share(share, asked))
    ]
    if len(matching) == 1:
        return matching[0]
    found = f"groups {', '.join(matching)} all match" if matching else "no group matches"
    raise error(
        f"{found} this device ({here}, {kind}); the {owner}'s groups are {', '.join(names)}: "
        f"set {GROUP_VARIABLE} to the one of this process"
    )


def asked_share(environment: Mapping[str, str]) -> float | None:
    """The share of a GPU that ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` asks for; None where it is not set.

    Raises:
        PlanError: for a value that is no percentage.
    """
    text = environment.get(SHARE_VARIABLE, "")
    if not text:
        return None
    try:
        percentage = float(text)
    except ValueError:
        percentage = 0.0
    if not 0 < percentage <= 100:
        raise PlanError(f"{SHARE_VARIABLE} is {text!r}; set it to a percentage above 0 and at most 100, or unset it")
    return percentage / 100


def same_share(one: float, other: float) -> bool:
    """Whether two shares are the same half percent."""
    return abs(one - other) < 0.005


def device_name() -> tuple[str, DeviceKind]:
    """Name and kind of the device this process computes on, as profiles have it: the current CUDA device, else ``cpu``."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), DeviceKind.CUDA
    return "cpu", DeviceKind.CPU


@contextmanager
def together(
    what: str,
    facts: Mapping[str, str] = {},
    timeout_s: float | None = None,
    *,
    slow: bool = False,
    group: dist.ProcessGroup | Mailbox | None = None,
    may_hang: bool = False,
) -> Iterator[dict[str, str]]:
    """Run a block on every rank so that a refusal on one is a refusal on all (docs/training.md#when-a-rank-refuses).

    Ranks speak through the process group's store, so nothing pairs with a collective that another rank is in, and nothing needs a
    device.  Outside a process group, alone in one, or on a rank outside ``group``, only the block runs.

    Args:
        what: the call, as its user knows it, such as ``apply_``; equal on all ranks.
        facts: what must be equal on all ranks, by name; the block may add to them, in what ``with`` gives it.
        timeout_s: how long this rank waits for the others; by default what ``QSYNC_RANK_TIMEOUT_S`` says, else 30 seconds.
        slow: the block may take minutes on some ranks, as building kernels does: then the others wait for as long as its process
            lives, at most for the group's own timeout, and ``timeout_s`` is how long a process may give no sign of life.
        group: the ranks that take part, all by default; before there is a process group, those that will be its members.
        may_hang: the block may wait without end for a rank that has left it, as in a collective: then this process ends, with the
            sentence, once the others have given up.

    Yields:
        The facts.

    Raises:
        QSyncError: on every rank.  The rank's own error where it has one, with what other ranks refuse; else an error of the class
            that another rank refuses with, which names that rank.
        CompatibilityError: the ranks run different versions of QSync.
        PlanError: the ranks differ in another fact.
        RankError: a rank has not come in time, its process has ended, or it failed with an error that is not QSync's.
    """
    agreed = dict(facts)
    if (members := _members(group)) is None:
        yield agreed
        return
    timeout_s = rank_timeout_s() if timeout_s is None else timeout_s
    mine: Exception | None = None
    wrong: Exception | None = None
    try:
        exchange = Exchange(members, what, timeout_s, slow=slow)
        with exchange.alive(), _ended_where_it_hangs(exchange, members, what) if may_hang else nullcontext():
            try:
                yield agreed
            except Exception as error:
                mine = error
            except BaseException as error:
                exchange.leave(_report(what, agreed, error))
                raise
        exchange.say(_report(what, agreed, mine))
        wrong = _disagreement(_heard(exchange, what), members.rank, as_well=mine is not None)
    except RankError as error:
        wrong = error
    except dist.DistError as error:
        wrong = RankError(store_has_gone(what, error))
    if mine is not None:
        raise _with_more(mine, str(wrong)) if wrong else mine
    if wrong is not None:
        raise wrong


@contextmanager
def _ended_where_it_hangs(exchange: Exchange, members: Mailbox, what: str) -> Iterator[None]:
    """A block whose process ends some seconds after the other ranks have ended the round without it.

    Nothing in Python interrupts a collective that the main thread is in, so that another thread ends the process.
    """

    def watch(done: threading.Event) -> None:
        try:
            found = exchange.given_up(done)
        except dist.DistError as error:
            found = None if done.wait(grace_s(rank_timeout_s())) else (store_has_gone(what, error), {})
        if found is not None:
            missing, reports = found
            end_process(missing or str(_disagreement(reports, members.rank, as_well=False)))

    with beside("qsync-watch", watch):
        yield


def told_by_all(
    what: str, mine: Mapping[str, str], group: dist.ProcessGroup | Mailbox | None = None, *, slow: bool = False
) -> dict[int, Mapping[str, str]]:
    """What every rank of the job says of itself, by rank; through the store, as :func:`together`.

    Outside a process group, and alone in one, this is rank 0.  ``group`` and ``slow`` are as in :func:`together`: a rank that was
    in an earlier round of a slow call, and does not come to this one, has ended or hangs.

    Raises:
        RankError: a rank has not come in time, is in another call, or its process has ended; on every rank that came.
    """
    if (members := _members(group)) is None:
        return {0: mine}
    try:
        exchange = Exchange(members, what, rank_timeout_s(), slow=slow)
        exchange.say(Report(what, mine))
        reports = _heard(exchange, what)
    except dist.DistError as error:
        raise RankError(store_has_gone(what, error)) from None
    if elsewhere := _different_calls(reports):
        raise elsewhere
    return {rank: report.facts for rank, report in reports.items()}


def _heard(exchange: Exchange, what: str) -> dict[int, Report]:
    """What all say; who is interrupted while it waits for them says so, because it will not come to the next call either."""
    try:
        return exchange.hear()
    except KeyboardInterrupt as error:
        exchange.leave(_report(what, {}, error))
        raise


def _members(group: dist.ProcessGroup | Mailbox | None) -> Mailbox | None:
    return group if isinstance(group, Mailbox) else Mailbox.of_group(group)


@contextmanager
def naming_lost_ranks(what: str, gone: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
    """Surround collectives: one that fails because of another rank says so.

    Args:
        what: the call, as its user knows it.
        gone: finds the ranks that live no longer, as :func:`~qsync_torch.distributed.watch.watched` gives it.

    Raises:
        RankError: in the place of PyTorch's error, which gives a line of its own source.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_lost_rank(error):
            raise
        if isinstance(error, StoreSilent):
            raise RankError(store_has_gone(what, error)) from error
        lost = ", ".join(map(str, gone()))
        who = f"rank {lost}" if lost else "another rank"
        raise RankError(
            f"{who} of this job has failed, or cannot be reached any more, while this one was in {what}: see what was "
            f"printed there last ({_first_line(error).partition('. ')[0]})"
        ) from error


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether a collective, or the store, failed because another rank has gone."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def check_ranks_agree(plan: PrecisionPlan, group: dist.ProcessGroup | None = None) -> None:
    """Compare plan and versions across ranks; call it on every rank after ``init_process_group`` and before the first step.

    Args:
        group: the ranks to compare, all by default.

    Raises:
        CompatibilityError: on every rank, when versions differ.
        PlanError: on every rank, when plans differ.
        RankError: on every rank that calls this, when another does not.
    """
    with together("check_ranks_agree", plan_facts(plan), group=group):
        pass


def plan_facts(plan: PrecisionPlan) -> dict[str, str]:
    """What ranks under one plan must share: the plan, and the versions of QSync."""
    return {VERSIONS: versions_text(), PLAN: digest(plan)[:16]}


def versions_text() -> str:
    """The versions that ranks must share."""
    return ", ".join(f"{name} {version(name)}" for name in ("qsync-core", "qsync-torch"))


def _report(what: str, facts: Mapping[str, str], error: BaseException | None) -> Report:
    if error is None:
        return Report(what, facts)
    if isinstance(error, KeyboardInterrupt):
        return Report(what, facts, f"an interruption (Ctrl-C) in {what}")
    if not isinstance(error, QSyncError):
        said = _first_line(error)
        return Report(what, facts, f"{type(error).__name__} in {what}{f': {said}' if said else ''}")
    kind = next(base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base)
    return Report(what, facts, str(error) or type(error).__name__, kind)


def _disagreement(reports: Mapping[int, Report], rank: int, *, as_well: bool) -> QSyncError | None:
    """What is wrong on other ranks; else, in the same words on every rank, in what the ranks differ."""
    refused: dict[tuple[str, str], list[int]] = {}
    for other, report in reports.items():
        if report.refusal and other != rank:
            refused.setdefault((report.kind, report.refusal), []).append(other)
    if not refused:
        return None if as_well else _difference(reports)
    own = reports[rank].refusal if as_well and rank in reports else ""
    more = " as well" if as_well else ""
    sentences = [
        f"{rank_list(who)} {'refuse' if kind else 'fail'}{'s' if len(who) == 1 else ''}{more}"
        + ("" if sentence == own else f"{':' if kind else ' with'} {sentence}")
        for (kind, sentence), who in refused.items()
    ]
    kind, _ = next(iter(refused))
    found: type[QSyncError] = getattr(errors, kind, RankError) if kind else RankError
    return found("; ".join(sentences))


def _with_more(error: Exception, more: str) -> Exception:
    """The same error, which says more: in its sentence where it is QSync's, else in a note below its traceback."""
    if isinstance(error, QSyncError):
        error.args = (f"{error} ({more})",)
    else:
        error.add_note(more)
    return error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _different_calls(reports: Mapping[int, Report]) -> RankError | None:
    calls = {rank: report.what for rank, report in reports.items()}
    if len(set(calls.values())) == 1:
        return None
    return RankError(f"the ranks of this job are in different calls ({by_value(calls)}); make the same calls on every rank")


def _difference(reports: Mapping[int, Report]) -> QSyncError | None:
    if elsewhere := _different_calls(reports):
        return elsewhere
    names = dict.fromkeys([VERSIONS, *(name for report in reports.values() for name in report.facts)])
    for name in names:
        values = {rank: report.facts.get(name, "nothing") for rank, report in reports.items()}
        if len(set(values.values())) == 1:
            continue
        if name == VERSIONS:
            return CompatibilityError(
                f"the ranks of this job run different versions of QSync ({by_value(values)}); install the same on all"
            )
        if name == PLAN:
            return PlanError(
                f"the ranks of this job hold different plans (digests {by_value(values)}); give every rank the same plan file"
            )
        return PlanError(f"the ranks of this job differ in {name} ({by_value(values)}); give every rank the same")
    return None

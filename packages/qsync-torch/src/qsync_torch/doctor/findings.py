"""Tables and sentences made of what was seen of a job's ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from qsync_core.plugins.doctor import DoctorLine, FindingsTable, JobFindings, Status
from qsync_core.units import format_bytes, format_ns
from qsync_torch.distributed.exchange import by_value, rank_list
from qsync_torch.doctor.advice import what_to_try
from qsync_torch.doctor.machine import has_kernels, wheel_advice
from qsync_torch.doctor.probe import SIZES, speeds
from qsync_torch.doctor.rank_facts import RankFacts
from qsync_torch.doctor.seen import Seen, Trouble

_SLOW = 1.25
"""How many times as long as others of its kind a rank's work takes before it is named."""
_LATE = 0.25
"""Which part of the work before an all-reduce a rank comes late by before it is named."""


def job_findings(seen: Seen) -> JobFindings:
    """What rank 0 prints."""
    lines = [*_trouble_lines(seen), *version_lines(seen), *_kernel_lines(seen.facts), *_shared_gpu_lines(seen.facts)]
    lines += [*slow_lines(seen), *late_lines(seen), *_problem_lines(seen.facts)]
    if not lines:
        lines = [DoctorLine("ranks", f"all {seen.world} ranks have the same versions, reach each other, and keep step")]
    failed = any(line.status is Status.ERROR for line in lines)
    tables = [_rank_table(seen)] + ([_all_reduce_table(seen)] if any(seen.all_reduces.values()) else [])
    return JobFindings(0, failed, lines, tables, _data(seen))


# Tables


def _rank_table(seen: Seen) -> FindingsTable:
    has_gpu = any(found.on_gpu for found in seen.facts.values())
    late = lags_ns(seen.rounds)

    def of(rank: int, text: Callable[[RankFacts], str]) -> str:
        return text(seen.facts[rank]) if rank in seen.facts else "?"

    columns: dict[str, Callable[[int], str]] = {
        "rank": str,
        "host": lambda rank: seen.hosts.get(rank, "has not come"),
        "group": lambda rank: of(rank, lambda found: found.group or "-"),
        "device": lambda rank: of(rank, lambda found: found.device + (f", {found.share}%" if found.share else "")),
        "free": lambda rank: of(rank, _free_memory),
        "torch": lambda rank: of(rank, lambda found: found.versions["torch"]),
    }
    if has_gpu:
        for head in ("cuda", "nccl", "driver"):
            columns[head] = lambda rank, head=head: of(rank, lambda found: found.versions.get(head, "-"))  # type: ignore[misc]
    else:
        columns["cores"] = lambda rank: of(rank, lambda found: str(found.cores))
    columns["TFLOP/s"] = lambda rank: f"{_speeds(seen, rank)[0]:.3g}" if rank in seen.speeds else "?"
    columns["GB/s"] = lambda rank: f"{_speeds(seen, rank)[1]:.3g}" if rank in seen.speeds else "?"
    columns["late by"] = lambda rank: format_ns(late[rank]) if rank in late else "?"
    rows = [[text(rank) for text in columns.values()] for rank in range(seen.world)]
    return FindingsTable(
        "Ranks, with float32 products, copies, and how late each comes to all-reduces after equal work", list(columns), rows
    )


def _free_memory(found: RankFacts) -> str:
    return f"{format_bytes(found.memory_free_bytes)} of {format_bytes(found.memory_bytes)}"


def _speeds(seen: Seen, rank: int) -> tuple[float, float]:
    product_ns, copy_ns = seen.speeds[rank]
    return speeds("cuda" if seen.facts[rank].on_gpu else "cpu", product_ns, copy_ns)


def _all_reduce_table(seen: Seen) -> FindingsTable:
    rows = []
    for nbytes, by_rank in seen.all_reduces.items():
        if len(by_rank) < seen.world:
            continue
        time_ns = transfer_ns(by_rank)
        moved = 2 * (seen.world - 1) / seen.world * nbytes
        rows.append(
            [format_bytes(nbytes), format_ns(time_ns), f"{moved / time_ns:.3g}", str(len(by_rank[0]))]
            if time_ns
            else [format_bytes(nbytes), "left out: smaller ones are too slow", "", ""]
        )
    return FindingsTable(f"All-reduce over {seen.backend}", ["size", "time", "GB/s of each rank", "times"], rows)


def transfer_ns(by_rank: Mapping[int, Sequence[int]]) -> float:
    """What an all-reduce takes once all ranks are there: on the rank that came last.  0 where none was timed."""
    rounds = list(zip(*by_rank.values(), strict=True))
    return statistics.median(min(times) for times in rounds) if rounds else 0.0


def lags_ns(rounds: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """How much later than the first each rank comes to all-reduces, by durations alone: it waits that much less."""
    if not rounds:
        return {}
    longest = [max(times) for times in zip(*rounds.values(), strict=True)]
    return {rank: statistics.median(most - own for most, own in zip(longest, times, strict=True)) for rank, times in rounds.items()}


def _data(seen: Seen) -> dict[str, object]:
    late = lags_ns(seen.rounds)
    ranks = []
    for rank in range(seen.world):
        facts = seen.facts[rank].data() if rank in seen.facts else {"rank": rank, "host": seen.hosts.get(rank)}
        facts.pop("problems", None)
        if rank in seen.speeds:
            facts |= dict(zip(("product_ns", "copy_ns"), seen.speeds[rank], strict=True))
        ranks.append(facts | ({"late_by_ns": late[rank]} if rank in late else {}))
    complete = {size: found for size, found in seen.all_reduces.items() if len(found) == seen.world and transfer_ns(found)}
    return {
        "ranks": ranks,
        "backend": seen.backend,
        "all_reduce": [{"bytes": size, "ns": transfer_ns(found)} for size, found in complete.items()],
    }


# Lines


def version_lines(seen: Seen) -> Iterator[DoctorLine]:
    """Say of every version in which ranks differ whether that matters."""
    if len(set(seen.qsync.values())) > 1:
        yield DoctorLine("ranks: QSync", by_value(seen.qsync), Status.ERROR, "install the same versions everywhere; then ask again")
    facts = seen.facts
    names = dict.fromkeys(name for found in facts.values() for name in found.versions)
    for name in sorted(names):
        values = {rank: found.versions.get(name, "none") for rank, found in facts.items()}
        if name == "torch":
            values = {rank: value.partition("+")[0] for rank, value in values.items()}  # its build is cuda's
        if len(set(values.values())) > 1:
            status, advice = _DIFFERENCES.get(name, _SAME_EVERYWHERE)
            yield DoctorLine(f"ranks: {name}", by_value(values), status, advice)


_SAME_EVERYWHERE = (Status.ERROR, "install the same version everywhere")
_DIFFERENCES = {
    "cuda": (Status.WARNING, "does not matter to collectives as long as NCCL is the same; kernels and their speed may differ"),
    "nccl": (Status.ERROR, "NCCL of different versions may hang or fail: install the same build of torch everywhere"),
    "driver": (Status.INFO, "does not matter, as long as each serves its machine's CUDA"),
    "python": (Status.INFO, "does not matter to collectives; what ranks pickle for each other may not be read"),
}


def _kernel_lines(facts: Mapping[int, RankFacts]) -> Iterator[DoctorLine]:
    lacking = [
        rank
        for rank, found in facts.items()
        if found.on_gpu and not has_kernels((found.capability[0], found.capability[1]), found.arch_list)
    ]
    if lacking:
        chips = dict.fromkeys(f"{facts[rank].device} (sm_{''.join(map(str, facts[rank].capability))})" for rank in lacking)
        everyone = [(found.capability[0], found.capability[1]) for found in facts.values() if found.on_gpu]
        yield DoctorLine(
            "ranks: kernels",
            f"the torch on {rank_list(lacking)} has none for {', '.join(chips)}; it has {', '.join(facts[lacking[0]].arch_list)}",
            Status.ERROR,
            f"install one build that serves all GPUs of this job, everywhere; {wheel_advice(everyone)}",
        )


def _shared_gpu_lines(facts: Mapping[int, RankFacts]) -> Iterator[DoctorLine]:
    by_gpu: dict[str, list[int]] = {}
    for rank, found in facts.items():
        if found.on_gpu:
            by_gpu.setdefault(found.gpu, []).append(rank)
    for ranks in by_gpu.values():
        if len(ranks) > 1:
            yield DoctorLine(
                "ranks: one GPU",
                f"{rank_list(ranks)} are on one GPU of {facts[ranks[0]].host}, which NCCL refuses, so gloo was timed",
                Status.ERROR,
                "give each rank a GPU of its own: see CUDA_VISIBLE_DEVICES and --nproc-per-node; or train with gloo",
            )
    if by_gpu and len(facts) > (on_gpu := sum(map(len, by_gpu.values()))):
        without = [rank for rank, found in facts.items() if not found.on_gpu]
        yield DoctorLine(
            "ranks: devices",
            f"{on_gpu} ranks have GPUs, {rank_list(without)} none, so gloo was timed",
            Status.WARNING,
            "if that is not meant, run 'qsync doctor' on that machine alone",
        )


def _problem_lines(facts: Mapping[int, RankFacts]) -> Iterator[DoctorLine]:
    """Warnings and errors of single machines, each once with the ranks that have it."""
    ranks: dict[DoctorLine, list[int]] = {}
    for rank, found in facts.items():
        for line in found.problems:
            ranks.setdefault(line, []).append(rank)
    for line, who in ranks.items():
        where = "all ranks" if len(who) == len(facts) else rank_list(who)
        yield DoctorLine(f"{line.topic} ({where})", line.finding, line.status, line.advice)


def slow_lines(seen: Seen) -> Iterator[DoctorLine]:
    """Ranks whose products or copies take longer than those of others with the same device and share."""
    for rank, own in seen.speeds.items():
        facts = seen.facts[rank]
        peers = [other for other in seen.speeds if other != rank and seen.facts[other].kind == facts.kind]
        if not peers:
            continue
        ratios = [value / statistics.median(seen.speeds[peer][position] for peer in peers) for position, value in enumerate(own)]
        named = zip(("products", "copies"), ratios, strict=True)
        slow = [f"{what} take {ratio:.1f} times" for what, ratio in named if ratio > _SLOW]
        if slow:
            also = "which has" if len(peers) == 1 else "which have"
            yield DoctorLine(
                f"speed: rank {rank}",
                f"on {facts.host}, {' and '.join(slow)} as long as on {rank_list(peers)}, {also} the same device",
                Status.WARNING,
                _why_slow(facts, [seen.facts[peer] for peer in peers]),
            )


def _why_slow(facts: RankFacts, peers: Sequence[RankFacts]) -> str:
    if facts.on_gpu:
        return "see nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE there for throttling, and nvidia-smi for other processes on it"
    if facts.cores < (others := min(peer.cores for peer in peers)):
        return f"it may use {facts.cores} cores, others {others}: see taskset, cpusets and container limits"
    return "see top there for other processes, and the cgroup's cpu.max for a quota"


def late_lines(seen: Seen) -> Iterator[DoctorLine]:
    """The rank that the others wait for, and whether its device explains that."""
    late = lags_ns(seen.rounds)
    if not late or not seen.speeds:
        return
    rank = max(late, key=lambda other: late[other])
    shortest_ns = min(own[0] for own in seen.speeds.values())
    slower_ns = seen.speeds[rank][0] - shortest_ns
    if late[rank] < _LATE * shortest_ns:
        return
    found = f"the others wait for rank {rank} ({seen.facts[rank].host}): it comes {format_ns(late[rank])} after the first"
    work = f"work that takes {format_ns(shortest_ns)} on the fastest rank"
    if slower_ns > late[rank] / 2:
        yield DoctorLine(
            "last to all-reduces", f"{found}, after {work} and {format_ns(seen.speeds[rank][0])} on this one", Status.INFO
        )
    else:
        yield DoctorLine(
            "last to all-reduces",
            f"{found}, after {work} and no more than {format_ns(seen.speeds[rank][0])} on this one when it was timed by itself",
            Status.WARNING,
            "its device is not what is slow: see other processes on that machine, its clocks over time, and start the doctor again",
        )


def _trouble_lines(seen: Seen) -> Iterator[DoctorLine]:
    trouble = seen.trouble
    if trouble is None:
        return
    what, advice = _STEPS.get(trouble.step.partition(" ")[0], _STEPS["rounds"])
    if trouble.step.startswith("all-reduce"):
        what = f"an all-reduce of {format_bytes(SIZES[int(trouble.step.split()[1])])} over {seen.backend}"
    collective = trouble.step.startswith(("all-reduce", "rounds", "connected"))
    yield DoctorLine("ranks", _who_is_behind(seen, trouble, what), Status.ERROR, _advice(trouble, advice, seen.master))
    if collective and not _causes(trouble):
        for setting in what_to_try(seen.facts, seen.backend):
            yield DoctorLine("try", setting, Status.INFO)
    for rank, said in trouble.warnings.items():
        for text in said:
            yield DoctorLine(f"printed by rank {rank}", text, Status.WARNING)


_STEPS = {
    "here": (
        "the meeting of all ranks",
        "start it, or see what was printed there; all ranks need the same MASTER_ADDR and MASTER_PORT ({master}); where it only "
        "takes long, set QSYNC_RANK_TIMEOUT_S to more seconds",
    ),
    "facts": (
        "saying what it has (importing torch, starting CUDA)",
        "on that machine, try: python -c 'import torch; torch.cuda.init()', nvidia-smi, and 'qsync doctor' alone",
    ),
    "speed": ("a product of matrices", "on that machine, try 'qsync doctor' alone, and nvidia-smi"),
    "connected": (
        "connecting all ranks",
        "the ranks reach the store, but not each other: see firewalls, and try what is below",
    ),
    "all-reduce": ("", "start again with each of the settings below, one by one, before you start the job"),
    "rounds": ("all-reduces after equal work", "start again with each of the settings below, one by one"),
    "ended": ("saying that all was measured", "see what was printed there last, and that machine's log"),
}


def _causes(trouble: Trouble) -> dict[int, str]:
    """Who is to blame, with the end of a sentence; empty where no rank stands out."""
    if own := {rank: reason for rank, reason in trouble.died.items() if not _is_consequence(reason)}:
        return {rank: f"its probe {reason}" for rank, reason in own.items()}
    if trouble.gone:
        return dict.fromkeys(trouble.gone, "its process has ended or is stopped, and gives no sign of life")
    if trouble.stopped:
        return dict.fromkeys(trouble.stopped, "its probe is stopped, and gives no sign of life")
    if trouble.not_entered and len(trouble.not_entered) < len(trouble.missing):
        return dict.fromkeys(trouble.not_entered, "it lives, but did not begin it")
    return {}


def _is_consequence(reason: str) -> bool:
    """Whether a probe ended because another rank had ended."""
    return any(text in reason.lower() for text in _CONSEQUENCES)


_CONSEQUENCES = ("connection closed by peer", "connection reset by peer", "remote process exited", "broken pipe")


def _who_is_behind(seen: Seen, trouble: Trouble, what: str) -> str:
    if trouble.step == "here":
        when = "before torchrun ended the job" if trouble.told else f"within {trouble.after_s:g} s"
        return f"{rank_list(trouble.missing)} of {seen.world} did not come {when}"
    causes = _causes(trouble)
    if not causes and trouble.died:
        causes = {rank: f"its probe {reason}" for rank, reason in trouble.died.items()}
    if causes:
        sentences = [f"on {seen.hosts.get(rank, '?')}, {why}" for rank, why in causes.items()]
        return f"{what} failed because of {rank_list(list(causes))}: {'; '.join(dict.fromkeys(sentences))}"
    when = "when torchrun ended the job" if trouble.told else f"within {trouble.after_s:g} s"
    if len(trouble.missing) == seen.world:
        return f"{what} did not end {when} on any rank; all began it and live, so it hangs between them"
    return f"{what} did not end {when} on {rank_list(trouble.missing)}, which live"


def _advice(trouble: Trouble, advice: str, master: str) -> str:
    if trouble.step != "here" and _causes(trouble):
        return "see what was printed there last, and that machine's log (dmesg: out of memory, Xid errors of the GPU)"
    return advice.format(master=master)

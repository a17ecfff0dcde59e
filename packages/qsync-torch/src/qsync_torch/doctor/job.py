"""``qsync doctor`` in every process of a job: a probe that can be given up, and on rank 0 the waiting for all, each step bounded.

No collective runs in these processes, and nothing starts CUDA: whatever hangs does so in a probe, and is ended with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import attrs
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_core.plugins.doctor import JobFindings
from qsync_torch.distributed.bounded_store import rank_timeout_s
from qsync_torch.distributed.exchange import grace_s, store_has_gone
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.meeting import Place
from qsync_torch.distributed.ranks import versions_text
from qsync_torch.doctor.findings import job_findings
from qsync_torch.doctor.probe import BEAT_S, MAIL, PAUSE_S, SIZES
from qsync_torch.doctor.rank_facts import RankFacts
from qsync_torch.doctor.seen import Seen, Trouble

PROBE = (sys.executable, "-m", "qsync_torch.doctor.probe")
"""Command of the process that measures."""
START_S = 180.0
"""How long importing torch and starting CUDA may take, from a cold disk and on all ranks of a machine at once."""
_BEATS_S = 3.0
"""How long a process is watched for signs of life, of which it gives two a second."""
_LEAVE_S = 5.0
_STEPS = ("here", "facts", "speed", "connected", *(f"all-reduce {position}" for position in range(len(SIZES))), "rounds", "ended")
_TAIL_BYTES = 4096


class _ToldToEnd(Exception):
    pass


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM is raised where the process is, so that rank 0 still says what it has seen."""

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _ToldToEnd

    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Probe:
    """This rank's measuring process."""

    def __init__(self, box: Mailbox) -> None:
        self._box, self._said, self._tail_said = box, False, False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        environment = {"NCCL_DEBUG": "WARN", **os.environ}
        self._process = subprocess.Popen(
            PROBE,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=environment,
            start_new_session=True,  # torchrun signals whole process groups, and this process decides when its probe ends
        )

    def report(self) -> None:
        """Tell the others when it has died, and in trouble what it printed."""
        status = self._process.poll()
        if status and not self._said:
            self._said = True
            self._box.say("failed", self._reason(status))
        if not self._tail_said and self._box.posted("trouble"):
            self._tail_said = True
            self._box.say("warnings", [line for line in self._tail() if "NCCL WARN" in line or "[W" in line][-3:])

    def _reason(self, status: int) -> str:
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}: {next(reversed(self._tail()), 'it printed nothing')}"

    def _tail(self) -> list[str]:
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def end(self) -> None:
        """Wherever it is; one that even SIGKILL does not end, because a driver holds it, is left."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self._output.close()


def doctor_of_job(timeout_s: float) -> JobFindings | None:
    """What the ranks of this process's job find together; None where it is of no job of several.

    Args:
        timeout_s: how long one all-reduce may take.

    Raises:
        RankError: when the store or rank 0 cannot be reached; on the other ranks also when rank 0 says that something is broken.
    """
    place = Place.from_environment()
    if place is None:
        return None
    box = Mailbox.at_place(place, MAIL, holds=True)
    with _naming_the_store():
        end_beats = box.beat_until_exit("alive", BEAT_S)
        box.say("here", [socket.gethostname(), versions_text()])
        probe = _Probe(box)
        try:
            with _told_to_end():
                if place.rank != 0:
                    return _follow(box, probe, end_beats)
                seen = _Gathering(box, probe, timeout_s, f"{place.host}:{place.port}").run()
                findings = job_findings(seen)
                return attrs.evolve(findings, finish=lambda: _let_go(box, findings.failed, seen))
        finally:
            probe.end()


@contextmanager
def _naming_the_store() -> Iterator[None]:
    """A store that has gone or is silent, as a sentence.

    Raises:
        RankError: in the place of PyTorch's error.
    """
    try:
        yield
    except dist.DistError as error:
        raise RankError(store_has_gone("qsync doctor", error)) from None


def _let_go(box: Mailbox, failed: bool, seen: Seen) -> None:
    """Tell the others, and stay until they have heard, because this process may hold the store."""
    awaited = set(seen.hosts) - {0} - set(seen.trouble.gone if seen.trouble else ())
    until = time.monotonic() + _LEAVE_S
    with suppress(dist.DistError):
        box.post("over", failed)
        while awaited & set(box.missing("left")) and time.monotonic() < until:
            time.sleep(PAUSE_S)


def _follow(box: Mailbox, probe: _Probe, end_beats: Callable[[], None]) -> JobFindings:
    rank, silence_s = box.rank, rank_timeout_s()
    try:
        beats, since, ended = -1, time.monotonic(), False
        while not box.posted("over"):
            probe.report()
            if not ended and box.posted("measured"):
                ended = True
                box.say("ended")
            now = time.monotonic()
            if (found := box.beats("alive", [0])[0]) != beats:
                beats, since = found, now
            elif now - since > silence_s:
                raise RankError(f"rank 0 has given no sign of life for {silence_s:g} s while rank {rank} waited for what it found")
            time.sleep(PAUSE_S)
        failed = box.read("over")
        end_beats()  # once rank 0 has heard that this one leaves, it may take the store with it
        box.say("left")
    except _ToldToEnd:
        raise RankError(
            f"rank {rank} was told to end (SIGTERM) before rank 0 said what it found: another rank has failed"
        ) from None
    if failed:
        raise RankError("something is broken between the ranks of this job, or on one of them: see what rank 0 printed")
    return JobFindings(rank, failed=False)


class _Troubled(Exception):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble


class _Gathering:
    """Rank 0's part: one step after the other, until all have taken it or one has failed to."""

    def __init__(self, box: Mailbox, probe: _Probe, timeout_s: float, master: str) -> None:
        self._box, self._probe, self._timeout_s, self._master = box, probe, timeout_s, master
        self._step = _STEPS[0]
        self._backend = ""

    def run(self) -> Seen:
        """All steps, or as many as were taken."""
        trouble = None
        try:
            self._take_steps()
        except _Troubled as ended:
            trouble = ended.trouble
        except _ToldToEnd:
            trouble = self._trouble(told=True)
        return self._seen(trouble)

    def _take_steps(self) -> None:
        self._await("here", rank_timeout_s())
        if len({qsync for _, qsync in self._box.heard("here").values()}) > 1:
            return  # what another version says may not be understood
        self._await("facts", START_S)
        facts = self._facts()
        self._backend = common_backend(facts)
        self._box.post("plan", {"backend": self._backend, "sizes": SIZES, "timeout_s": self._timeout_s})
        self._await("speed", START_S)
        self._await("connected", max(self._timeout_s, rank_timeout_s()))
        for position in range(len(SIZES)):
            self._await(f"all-reduce {position}", self._timeout_s)
        self._await("rounds", self._timeout_s)
        self._box.post("measured")
        self._box.say("ended")
        self._await("ended", rank_timeout_s())  # probes measure, whatever their ranks do

    def _await(self, step: str, limit_s: float) -> None:
        self._step = step
        begin = looked = time.monotonic()
        heard: dict[tuple[str, int], tuple[int, float]] = {}
        while missing := self._box.missing(step):
            self._probe.report()
            if self._box.heard("failed", missing):
                raise _Troubled(self._trouble())
            now = time.monotonic()
            if now - begin > limit_s:
                raise _Troubled(self._trouble(after_s=limit_s))
            if now - looked > BEAT_S:
                looked = now
                for what in ("alive", "probe alive"):
                    for rank, beats in self._box.beats(what, missing).items():
                        known, since = heard.get((what, rank), (0, now))
                        heard[what, rank] = (beats, now if beats != known else since)
                        if beats and now - heard[what, rank][1] > rank_timeout_s():  # frozen: not even its other threads run
                            raise _Troubled(self._trouble(after_s=rank_timeout_s()))
            time.sleep(PAUSE_S)

    def _trouble(self, after_s: float = 0.0, *, told: bool = False) -> Trouble:
        """Who is behind, who lives, and what they say; while they are watched others may fail for the same reason."""
        while not self._box.missing(self._step) and self._step not in _STEPS[-2:]:  # others may have gone on meanwhile
            self._step = _STEPS[_STEPS.index(self._step) + 1]
        missing = self._box.missing(self._step)
        came = list(self._box.heard("here"))
        before = {what: self._box.beats(what, came) for what in ("alive", "probe alive")}
        self._box.post("trouble", self._step)
        self._probe.report()
        until = time.monotonic() + min(_BEATS_S, grace_s(rank_timeout_s()))
        while time.monotonic() < until:
            self._probe.report()
            time.sleep(PAUSE_S)
        after = {what: self._box.beats(what, came) for what in before}
        still = {what: [rank for rank in came if after[what][rank] == before[what][rank]] for what in before}
        died = self._box.heard("failed")
        return Trouble(
            step=self._step,
            after_s=after_s,
            told=told,
            missing=tuple(missing),
            not_entered=tuple(self._not_entered()),
            gone=tuple(still["alive"]),
            stopped=tuple(rank for rank in still["probe alive"] if rank not in still["alive"] and rank not in died),
            died=died,
            warnings=self._box.heard("warnings"),
        )

    def _not_entered(self) -> Sequence[int]:
        if self._step.startswith("all-reduce"):
            return self._box.missing(self._step.replace("all-reduce", "entered"))
        return self._box.missing("entered rounds") if self._step == "rounds" else ()

    def _facts(self) -> Mapping[int, RankFacts]:
        return {rank: RankFacts.from_data(message) for rank, message in self._box.heard("facts").items()}

    def _seen(self, trouble: Trouble | None) -> Seen:
        came = self._box.heard("here")
        return Seen(
            world=len(self._box.ranks),
            hosts={rank: host for rank, (host, _) in came.items()},
            qsync={rank: qsync for rank, (_, qsync) in came.items()},
            facts=self._facts(),
            backend=self._backend,
            speeds=self._box.heard("speed"),
            all_reduces={nbytes: self._box.heard(f"all-reduce {position}") for position, nbytes in enumerate(SIZES)},
            rounds=self._box.heard("rounds"),
            trouble=trouble,
            master=self._master,
        )


def common_backend(facts: Mapping[int, RankFacts]) -> str:
    """``nccl`` where all ranks have it and GPUs of their own, else ``gloo``."""
    gpus = [found.gpu for found in facts.values()]
    has_nccl = all("nccl" in found.versions for found in facts.values())
    return "nccl" if has_nccl and all(gpus) and len(set(gpus)) == len(gpus) else "gloo"

"""C6: how long the other ranks are silent where one is frozen, killed or missing, or a foreign program has the port.

    python bench/cluster/silences.py [--out FOLDER] [--timeout 8] [--at-once 3]

Sixty jobs of two ranks on this machine: 15 of each of ``prepare``, ``communicate``, ``doctor`` and a script with ``apply_``.  A
rank, or the process that keeps the store in torchrun's place, is stopped (SIGSTOP) or killed (SIGKILL) at a moment drawn at random,
or never comes, or what listens at the port says nothing.  The silence of a trial is the time from then until the last rank that is
left has ended, by its own sentence; one that has not ended after six times the limit counts as that long.

A process that has imported everything forks the ranks, because starting Python takes longer than most of what is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import attrs

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch.distributed as dist

import qsync_torch
import qsync_torch.doctor.job
import qsync_torch.prepare.flow
import qsync_torch.prepare.planning
from processes import free_port
from qsync_core.cli.root import cli
from qsync_core.plugins.registry import Registry
from qsync_torch.load_job import load_job
from results import parser_of, write_rows

JOB = f"{Path(__file__).parents[2] / 'tests' / 'distributed' / 'tiny_job.py'}:make_job"
COMMANDS = ("prepare", "apply_", "doctor", "communicate")
GROUPS = ("strong", "weak")
HOLDER = "the store's process"
_NEVER_ENDED = 6.0
_POLL_S = 0.02
_START_S = 120.0
_APPLIED = 60
_TRIES = 4
_SENTENCE = re.compile(r"^(?:error:|error  |qsync_core\.errors\.\w+:).*", re.MULTILINE | re.DOTALL)
"""What a command, a table of the doctor's or a script ends with."""


@attrs.frozen
class Trial:
    """What goes wrong in a job.

    Attributes:
        command: that its ranks run.
        fault: ``frozen``, ``killed``, ``missing`` or ``foreign``.
        who: the rank, or :data:`HOLDER`; of a foreign program, the port.
        agent: the store is kept by a process of its own, as torchrun does, and not by rank 0.
        moment: which share of the job's usual time goes well.
    """

    command: str
    fault: str
    who: str
    agent: bool
    moment: float = 0.0


@attrs.frozen
class Silence:
    """How a trial ended.

    Attributes:
        trial: which.
        seconds: from the fault to the end of the last rank that was left.
        said: each of them ended with a sentence of QSync's.
        named: each of these names the one at fault.
        outputs: of the ranks that were left.
    """

    trial: Trial
    seconds: float
    said: bool
    named: bool
    outputs: tuple[str, ...]


def trials(seed: int = 0) -> list[Trial]:
    """Sixty, fifteen of each command."""
    draw = random.Random(seed)
    found = []
    for command in COMMANDS:
        for index in range(3):
            found += [Trial(command, "frozen", str(rank), index == 1, draw.uniform(0.05, 0.8)) for rank in (0, 1)]
            found.append(Trial(command, "frozen", HOLDER, True, draw.uniform(0.05, 0.8)))
        found += [Trial(command, "killed", str(rank), bool(rank), draw.uniform(0.05, 0.8)) for rank in (0, 1)]
        found.append(Trial(command, "killed", HOLDER, True, draw.uniform(0.05, 0.8)))
        found += [Trial(command, "missing", str(rank), False) for rank in (0, 1)]
        found.append(Trial(command, "foreign", "port", command in ("prepare", "communicate")))
    return found


class Ranks:
    """The processes of one job: forks of this one, which has imported everything."""

    def __init__(self, command: str, folder: Path, run: Path, timeout_s: float, *, agent: bool, port: int) -> None:
        self.command, self.folder, self._run = command, folder, run
        folder.mkdir(parents=True)
        self._variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": str(agent),
            "QSYNC_RANK_TIMEOUT_S": f"{timeout_s:g}",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.alive: dict[str, int] = {}
        self.statuses: dict[str, int] = {}

    def start(self, who: str) -> None:
        """A rank, or the holder of the store."""
        work = self._keep_store if who == HOLDER else self._work
        own = {} if who == HOLDER else {"RANK": who, "LOCAL_RANK": who, "QSYNC_GROUP": GROUPS[int(who)]}
        self.alive[who] = _forked(work, {**self._variables, **own}, self.log(who))

    def log(self, who: str) -> Path:
        """What a process printed."""
        return self.folder / f"{who.split()[0]}.log"

    def _keep_store(self) -> None:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_S))
        (self.folder / "holds").touch()
        while store:
            time.sleep(1)

    def _work(self) -> None:
        if self.command == "prepare":
            cli(["prepare", JOB, "-o", str(self.folder / "run"), "--device", "cpu", "--group", "strong=role:train"])
        elif self.command == "communicate":
            cli(["communicate", JOB, "-o", str(self.folder / "costs.qsync"), "--device", "cpu"])
        elif self.command == "doctor":
            cli(["doctor"])
        else:
            qsync_torch.process_group_options(self._run)
            dist.init_process_group("gloo", timeout=timedelta(seconds=_START_S))
            (self.folder / f"applies {os.environ['RANK']}").touch()
            for _ in range(_APPLIED):
                qsync_torch.apply_(load_job(JOB, None).model, self._run)
                time.sleep(_POLL_S)

    def reap(self) -> None:
        """Note who has ended."""
        for who, pid in list(self.alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.statuses[who] = os.waitstatus_to_exitcode(status)
                del self.alive[who]

    def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether a condition comes true in time."""
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
            self.reap()
        return True

    def end(self) -> None:
        """Kill what is left, with its children."""
        for pid in self.alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.alive.clear()


def _forked(work: Callable[[], None], variables: Mapping[str, str], log: Path) -> int:
    """The process that does some work, in a session of its own."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(variables)
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def _port_of(trial: Trial) -> Iterator[int]:
    if trial.fault != "foreign":
        yield free_port()
        return
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent.getsockname()[1]


def usual_s(command: str, folder: Path, run: Path, timeout_s: float) -> float:
    """How long a job takes in which nothing goes wrong."""
    ranks = Ranks(command, folder, run, timeout_s, agent=False, port=free_port())
    try:
        for who in ("0", "1"):
            ranks.start(who)
        begin = time.monotonic()
        if command == "apply_" and ranks.until(lambda: (folder / "applies 0").exists(), _START_S):
            begin = time.monotonic()
        if not ranks.until(lambda: not ranks.alive, _START_S) or any(ranks.statuses.values()):
            raise SystemExit(f"{command} failed with nothing wrong: {[ranks.log(who).read_text()[-2000:] for who in ('0', '1')]}")
        return time.monotonic() - begin
    finally:
        ranks.end()


def silence(trial: Trial, folder: Path, run: Path, timeout_s: float, usual: float) -> Silence:
    """One trial; again, earlier, where the job had ended before the fault."""
    for attempt in range(_TRIES):
        found = _silence(trial, folder / str(attempt), run, timeout_s, trial.moment * usual / 2**attempt)
        if found is not None:
            return found
    raise SystemExit(f"{trial}: the job always ended before")


def _silence(trial: Trial, folder: Path, run: Path, timeout_s: float, after_s: float) -> Silence | None:
    with _port_of(trial) as port:
        ranks = Ranks(trial.command, folder, run, timeout_s, agent=trial.agent, port=port)
        try:
            if trial.agent and trial.fault != "foreign":
                ranks.start(HOLDER)
                ranks.until(lambda: (folder / "holds").exists(), _START_S)
            left = [who for who in ("0", "1") if who != trial.who]
            for who in left if trial.fault == "missing" else ("0", "1"):
                ranks.start(who)
            if trial.fault in ("frozen", "killed"):
                if trial.command == "apply_":
                    ranks.until(lambda: all((folder / f"applies {who}").exists() for who in "01"), _START_S)
                ranks.until(lambda: False, after_s)
                if not {*left, trial.who} <= set(ranks.alive):
                    return None
                os.kill(ranks.alive[trial.who], signal.SIGSTOP if trial.fault == "frozen" else signal.SIGKILL)
            begin = time.monotonic()
            ranks.until(lambda: not set(left) & set(ranks.alive), _NEVER_ENDED * timeout_s)
            seconds = time.monotonic() - begin
            if trial.fault in ("frozen", "killed") and all(ranks.statuses.get(who) == 0 for who in left):
                return None  # it was over but for its end
            outputs = tuple(ranks.log(who).read_text(errors="replace") for who in left)
            sentences = [" ".join(found[-1].split()) if (found := _SENTENCE.findall(output)) else "" for output in outputs]
            said = all(sentences) and all(ranks.statuses.get(who, 0) != 0 for who in left)
            names = {"0": ("rank 0", "store"), "1": ("rank 1",), HOLDER: ("store",), "port": ("port", "another program")}
            named = all(any(name in sentence for name in names[trial.who]) for sentence in sentences)
            return Silence(trial, seconds, said, said and named, outputs)
        finally:
            ranks.end()


def main() -> None:
    """Run the trials, several at once, and write the row."""
    parser = parser_of(__doc__)
    parser.add_argument("--timeout", type=float, default=8.0, help="QSYNC_RANK_TIMEOUT_S")
    parser.add_argument("--at-once", type=int, default=3, help="trials side by side")
    parser.add_argument("--only", default="", help="command:fault, for one kind alone; writes no row")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="qsync-silences-"))
    Registry.load()  # and what commands import, before they are forked
    for command in COMMANDS:
        if command != "apply_":
            cli.get_command(None, command)  # type: ignore[arg-type]
    try:
        run = folder / "usual-prepare" / "run"
        usual = {command: usual_s(command, folder / f"usual-{command}", run, 60.0) for command in COMMANDS}
        print("usual times:", ", ".join(f"{command} {seconds:.1f} s" for command, seconds in usual.items()), flush=True)
        wanted = [trial for trial in trials() if f"{trial.command}:{trial.fault}".startswith(options.only)]
        work = [(trial, folder / f"trial{n}", run, options.timeout, usual[trial.command]) for n, trial in enumerate(wanted)]
        found = []
        with multiprocessing.get_context("fork").Pool(options.at_once) as pool:
            for one in pool.imap_unordered(_of_tuple, work):
                found.append(one)
                mark = "" if one.named else "  NOT NAMED" if one.said else "  NO SENTENCE"
                print(f"{len(found):3d} {one.trial}: {one.seconds:.1f} s{mark}", flush=True)
                if mark or one.seconds > 1.5 * options.timeout:
                    print("\n".join(output[-1500:] for output in one.outputs), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    longest = max(found, key=lambda one: one.seconds)
    print(f"longest: {longest.trial}, {longest.seconds:.1f} s")
    if options.only:
        return
    row = {
        "id": "C6",
        "what": f"longest silence of the other ranks in {len(found)} jobs with a frozen, killed, missing or foreign rank (prepare, "
        f"apply_, doctor, communicate; QSYNC_RANK_TIMEOUT_S={options.timeout:g}); {sum(one.said for one in found)} ended with a "
        f"sentence, {sum(one.named for one in found)} with one that names the rank or the store at fault",
        "value": round(longest.seconds / options.timeout, 2),
        "unit": "of QSYNC_RANK_TIMEOUT_S",
        "spread": f"median {statistics.median(one.seconds for one in found) / options.timeout:.2f}; the longest: "
        f"{longest.trial.command}, {longest.trial.who} {longest.trial.fault}",
        "target": "≤ 1.5",
    }
    command = f"python bench/cluster/silences.py --timeout {options.timeout:g} --at-once {options.at_once}"
    print(f"wrote {write_rows('cluster', [row], command, directory=options.out)}")


def _of_tuple(arguments: tuple[Trial, Path, Path, float, float]) -> Silence:
    return silence(*arguments)


if __name__ == "__main__":
    main()

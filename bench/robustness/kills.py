"""T4: profile, observe, tune, indicate and plan, killed at random moments and started again.

At least 100 times a command is ended by SIGKILL or SIGINT while it runs; a moment that came too late counts for nothing.  Then
every file that was there before or appeared must be whole, and the same command, which may be interrupted once more, must end as if
nothing had happened: observations, sensitivities and plans equal those of an uninterrupted run to the bit; profiles and tuning
records have its structure, hold what was measured before the interruption to the bit, and nothing that was measured of another job.

A server process imports everything once; each command runs in a fork of it, because starting Python takes longer than most of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qsync_core.artifacts import files as artifact
from qsync_core.artifacts.codec import to_plain
from qsync_core.cli.root import cli
from qsync_core.ir.profile import Profile
from qsync_core.tuning.store import read_store
from results import write_rows

JOB = """
import torch
from qsync_torch.job import Batch, Job

def tiny():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 5),
    )

    def batch(step, size):
        generator = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, 3, 8, 8, generator=generator),), target=torch.randint(5, (size,), generator=generator))

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, batch.target)

    return Job("tiny", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.05), batch_size=8)

def other():
    job = tiny()
    return Job("tiny", job.model, job.batch, job.loss, lambda parameters: torch.optim.Adam(parameters, lr=0.001), batch_size=8)
"""
CLUSTER = """
[[group]]
name = "train"
device = "cpu"
count = 1
role = "train"
[[group]]
name = "infer"
device = "cpu"
count = 1
role = "infer"
share = 0.5
ladder = ["int8", "bfloat16", "float32"]
[[link]]
between = ["train", "infer"]
latency_us = 20
bandwidth_gbps = 10
"""
RUNGS = ["--rungs", "int8,bfloat16,float32"]
PROFILE = ["profile", "job.py:tiny", "--device", "cpu", "--dag", "dag.qsync", "-o", "out", *RUNGS]
OTHER_PROFILE = [part.replace("tiny", "other") for part in PROFILE]
COMMANDS = {
    "profile": PROFILE,
    "observe": [
        "observe",
        "job.py:tiny",
        "--device",
        "cpu",
        "--dag",
        "dag.qsync",
        "-o",
        "out",
        "--steps",
        "4",
        "--warmup",
        "2",
        *RUNGS,
    ],
    "tune": ["tune", "dag.qsync", "--device", "cpu", "-o", "out"],
    "indicate": ["indicate", "observations.qsync", "--dag", "dag.qsync", "--cluster", "cluster.toml", "-o", "out"],
    "plan": [
        *(
            "plan",
            "--dag",
            "dag.qsync",
            "--cluster",
            "cluster.toml",
            "--profile",
            "train=train.qsync",
            "--profile",
            "infer=infer.qsync",
        ),
        *("--sensitivity", "sensitivity.qsync", "--tolerance", "0.1", "-o", "out"),
    ],
}
DETERMINISTIC = ("observe", "indicate", "plan")
OUTSIDE = 71
"""Exit status of a command whose interruption came just after it: it hit the end of the program, which is Python's to handle."""
SIGNALS = (signal.SIGKILL, signal.SIGINT)


def prepare_server() -> None:
    """Import what commands need, and make profiles short: a few repetitions, and a partial file at every measurement."""
    import qsync_torch.observing.collectors
    import qsync_torch.observing.observe
    import qsync_torch.tuning.job_tuning  # noqa: F401
    from qsync_torch.profiling import resume_store
    from robustness.short import shorten_profiles

    shorten_profiles(5, 0.02)
    resume_store._WRITE_EVERY_S = 0.0
    cli.list_commands(None)  # type: ignore[arg-type]  # loads the plugins


class Command:
    """A command that runs in a fork of this process; what it prints goes to the file ``log``."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.log = folder / "log"
        self.status: int | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the command has begun
        self._process = os.fork()
        if self._process == 0:
            self._run(arguments, folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _run(self, arguments: list[str], folder: Path) -> None:
        status = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(folder)
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            make_context = cli.make_context

            def make_context_interruptibly(*given: Any, **named: Any) -> Any:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                return make_context(*given, **named)

            cli.make_context = make_context_interruptibly  # type: ignore[method-assign]
            try:
                cli.main(arguments, prog_name="qsync")
            except SystemExit as error:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                status = error.code if isinstance(error.code, int) else 1
            except KeyboardInterrupt:
                status = OUTSIDE
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            done, status = os.waitpid(self._process, os.WNOHANG)
            if done:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(0.0005)
        return True

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end; a command that does not end within a minute is killed, and its status is None."""
        os.kill(self._process, number)
        if not self.wait(60):
            os.kill(self._process, signal.SIGKILL)
            self.wait(60)
            self.status = None


@attrs.define
class Findings:
    """What happened."""

    hits: Counter[str] = attrs.field(factory=Counter)
    torn: list[str] = attrs.field(factory=list)
    mixed: list[str] = attrs.field(factory=list)
    differing: list[str] = attrs.field(factory=list)
    leftovers: int = 0

    @property
    def failures(self) -> list[str]:
        """All that is wrong."""
        return self.torn + self.mixed + self.differing


def run_to_end(arguments: list[str], folder: Path) -> float:
    """Run a command that must succeed; returns its seconds."""
    start = time.monotonic()
    command = Command(arguments, folder)
    command.wait(300)
    if command.status != 0:
        raise SystemExit(f"qsync {' '.join(arguments)} ended with {command.status}:\n{command.log.read_text()[-3000:]}")
    return time.monotonic() - start


@contextlib.contextmanager
def workplace() -> Iterator[tuple[Path, dict[str, bytes], dict[str, float]]]:
    """A folder with what the commands read, the results of uninterrupted runs, and how long these take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        (folder / "cluster.toml").write_text(CLUSTER)
        run_to_end(["trace", "job.py:tiny", "-o", "dag.qsync"], folder)
        results: dict[str, bytes] = {}
        seconds: dict[str, float] = {}
        for command, arguments in COMMANDS.items():
            seconds[command] = run_to_end(arguments, folder)
            results[command] = (folder / "out").read_bytes()
            (folder / "out").unlink()
            made = {"observe": "observations.qsync", "indicate": "sensitivity.qsync"}.get(command)
            if made:
                (folder / made).write_bytes(results[command])
            if command == "profile":
                measured = artifact.from_bytes(results[command], Profile)
                artifact.save(measured, folder / "train.qsync")
                artifact.save(attrs.evolve(measured, device=attrs.evolve(measured.device, share=0.5)), folder / "infer.qsync")
        yield folder, results, seconds


def trial(command: str, rng: random.Random, folder: Path, results: Mapping[str, bytes], seconds: float, findings: Findings) -> None:
    """Interrupt a command once or twice, look at the files, run it to its end, and compare."""
    arguments, out, partial = COMMANDS[command], folder / "out", folder / "out.partial"
    old = (
        results["plan" if command == "indicate" else "indicate"] if command in ("indicate", "plan") and rng.random() < 0.5 else None
    )
    if old is not None:
        out.write_bytes(old)
    known: Any = None
    number = rng.choice(SIGNALS)
    where = ""
    for _ in range(rng.choice((1, 1, 2))):
        running = Command(arguments, folder)
        if running.wait(rng.uniform(0, seconds)):
            break
        running.end(number)
        if running.status == OUTSIDE:
            continue
        findings.hits[f"{command} {number.name}"] += 1
        where = f"{command} after {number.name}"
        if number is signal.SIGINT and (running.status not in (0, 1) or "Traceback" in running.log.read_text()):
            findings.differing.append(f"{where}: it ended with {running.status}:\n{running.log.read_text()[-1500:]}")
        known = check_files(command, where, out, partial, old, results, findings)
        left = [path for path in folder.iterdir() if path.name.endswith(".tmp")]
        if left and number is signal.SIGINT:
            findings.torn.append(f"{where}: {left[0].name} is left behind")
        findings.leftovers += len(left)
        for path in left:
            path.unlink()
    if not where:
        clear(folder)
        return
    changed_job = command == "profile" and partial.exists() and rng.random() < 0.3
    finished = Command(OTHER_PROFILE if changed_job else arguments, folder)
    finished.wait(300)
    if finished.status != 0:
        findings.differing.append(f"{where}: started again it ended with {finished.status}:\n{finished.log.read_text()[-1500:]}")
    elif partial.exists():
        findings.torn.append(f"{where}: out.partial is left behind")
    elif command in DETERMINISTIC:
        if out.read_bytes() != results[command]:
            findings.differing.append(f"{where}: the result differs from that of an uninterrupted run")
    elif command == "profile":
        compare_profiles(
            where, artifact.load(out, Profile), artifact.from_bytes(results[command], Profile), known, changed_job, findings
        )
    else:
        compare_tuning(where, out, results[command], known, folder, findings)
    clear(folder)


def clear(folder: Path) -> None:
    """Remove what a trial left."""
    for name in ("out", "out.partial", "out.lock"):
        (folder / name).unlink(missing_ok=True)


def check_files(
    command: str, where: str, out: Path, partial: Path, old: bytes | None, results: Mapping[str, bytes], findings: Findings
) -> Any:
    """Note what is torn; returns what an unfinished run keeps."""
    known: Any = None
    try:
        if command == "tune":
            return tuned_rows(out)
        if out.exists():
            data = out.read_bytes()
            artifact.from_bytes(data)
            if data != old and command in DETERMINISTIC and data != results[command]:
                findings.torn.append(f"{where}: out holds neither what was there before nor the result")
        elif old is not None:
            findings.torn.append(f"{where}: the old file is gone")
        if partial.exists() and command == "observe":
            known = artifact.load(partial)
        elif partial.exists():
            known = json.loads(partial.read_text())["values"]
    except Exception as error:
        findings.torn.append(f"{where}: {type(error).__name__}: {error}")
    return known


def compare_profiles(
    where: str, found: Profile, reference: Profile, known: Mapping[str, Any] | None, changed_job: bool, findings: Findings
) -> None:
    """Structure as in an uninterrupted run; measured values of the partial file are there, or none of them if the job changed."""

    def structure(profile: Profile) -> Any:
        index = {op_id: sorted(map(str, variants)) for op_id, variants in profile.cost_index.items()}
        return (
            index,
            [cast.key for cast in profile.casts],
            [step.variant for step in profile.steps],
            profile.dag_digest,
            profile.device,
        )

    if structure(found) != structure(reference) or len(found.costs) != len(reference.costs):
        findings.differing.append(f"{where}: the profile has another structure than that of an uninterrupted run")
    measured = [to_plain(value) for value in (*found.costs, *found.casts, *found.steps)]
    kept = [(name, value) for name, value in (known or {}).items() if name.startswith(("operator ", "cast ", "step ")) and value]
    if changed_job:
        # Short measurements of one operator repeat by chance; whole steps and fits of many samples do not.
        mixed = [name for name, value in kept if name.startswith(("cast ", "step ")) and value in measured]
        if mixed:
            findings.mixed.append(f"{where}: of another optimizer's run there is {mixed[0]}")
    elif lost := [name for name, value in kept if value not in measured]:
        findings.mixed.append(f"{where}: {lost[0]} was measured before and is another value now")


def tuned_rows(path: Path) -> list[str]:
    """Of what a tuning store has a row: a configuration that is measured again keeps its row, with the better measurement."""
    measurements, records = read_store(path)
    measured = [f"measurement of {key.text} in {config}" for key, config, _ in measurements]
    return [*measured, *(f"search of {record.key.text} that ended with {record.config}" for record in records)]


def compare_tuning(where: str, out: Path, reference: bytes, known: list[str] | None, folder: Path, findings: Findings) -> None:
    """The same searches have ended, and every row that was there is still there."""
    whole = folder / "reference.sqlite"
    whole.write_bytes(reference)
    said = [read_store(path) for path in (out, whole)]
    ended, measured = ([{one.key.text for one in records} for _, records in said], [{k.text for k, _, _ in m} for m, _ in said])
    if ended[0] != ended[1] or measured[0] != measured[1]:
        findings.differing.append(f"{where}: other searches have ended than in an uninterrupted run")
    rows = tuned_rows(out)
    if lost := [row for row in known or [] if row not in rows]:
        findings.mixed.append(f"{where}: the row {lost[0][:200]} is gone")


def kill_all(hits: int, seed: int, commands: Mapping[str, list[str]] = COMMANDS) -> Findings:
    """Interrupt commands in turn until each was hit equally often, ``hits`` times in all."""
    prepare_server()
    findings = Findings()
    each = -(-hits // len(commands))
    with workplace() as (folder, results, seconds):
        for command in commands:
            attempt = 0
            while sum(count for name, count in findings.hits.items() if name.split()[0] == command) < each:
                if attempt > 20 * each:
                    raise SystemExit(f"{command} ends before it can be interrupted")
                attempt += 1
                trial(command, random.Random(f"{seed} {command} {attempt}"), folder, results, seconds[command], findings)
    return findings


def in_fresh_process(hits: int, seed: int, context: multiprocessing.context.BaseContext) -> Findings:
    """The same in a process that ``context`` starts, whose threads have not started yet: a fork keeps only one."""
    with context.Pool(1) as pool:
        return pool.apply(kill_all, (hits, seed))


def main() -> None:
    """Run, print, and write the rows T4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hits", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    start = time.monotonic()
    found = kill_all(options.hits, options.seed)
    print("\n\n".join(found.failures))
    print(
        json.dumps({"hits": found.hits, "seconds": round(time.monotonic() - start), "temporary files": found.leftovers}, indent=2)
    )
    hits = sum(found.hits.values())
    spread = ", ".join(f"{count} {name}" for name, count in sorted(found.hits.items()))
    rows = [
        {
            "id": "T4",
            "what": "interruptions that hit a running command",
            "value": hits,
            "unit": "times",
            "spread": spread,
            "target": "≥ 100",
        },
        {"id": "T4b", "what": "of them, files torn, gone or left behind", "value": len(found.torn), "unit": "times", "target": "0"},
        {"id": "T4c", "what": "of them, results mixed of two runs", "value": len(found.mixed), "unit": "times", "target": "0"},
        {
            "id": "T4d",
            "what": "of them, resumed results that differ from an uninterrupted run's",
            "value": len(found.differing),
            "unit": "times",
            "target": "0",
        },
    ]
    if not options.no_write:
        write_rows("robustness", rows, f"python bench/robustness/kills.py --hits {options.hits} --seed {options.seed}")
    if found.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""``examples/elastic_digits.py`` under torchrun's elastic agents, one per group, in a run folder with plans made by hand."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from clusters import cluster_text
from forked import TORCHRUN, Forked
from qsync_core.artifacts.files import digest, save
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_core.run_folder import RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLED_RANK = Path(__file__).with_name("killed_rank.py")
GROUPS = ("train", "infer")
LOWERED = {"conv2": Precision.INT8, "conv3": Precision.BFLOAT16}
STARTED = re.compile(r"(\w+)/\d+: plan in force in ([\d.]+) s, (\d) ranks, step (\d+)")
CPU = DeviceType("cpu", DeviceKind.CPU)


def make_run_folder(
    path: Path, batch_size: int = 8, counts: Mapping[str, int] | None = None, devices: Mapping[str, DeviceType] | None = None
) -> RunFolder:
    """A plan for both groups, and one for each alone, for the example's model; ``counts``: of ranks, ``devices``: by group."""
    from qsync_torch.load_job import load_job
    from qsync_torch.tracing.trace import trace

    run = RunFolder(path)
    (path / "plans").mkdir(parents=True)
    count = {name: (counts or {}).get(name, 1) for name in GROUPS}
    device = {name: (devices or {}).get(name, CPU) for name in GROUPS}
    fields = {name: {"count": count[name], "device": device[name].name, "share": device[name].share} for name in GROUPS}
    fields["infer"]["ladder"] = ["int8", "bfloat16", "float32"]
    run.cluster.write_text(cluster_text(**fields))
    dag = trace(load_job(f"{EXAMPLES / 'digits_net.py'}:job", batch_size=batch_size))
    ids = tuple(operator.op_id for operator in dag.adjustable)
    entries = {}
    for name, lowered in (("train", {}), ("infer", LOWERED)):
        assignments = {
            op_id: Assignment(Variant.of(lowered.get(op_id.fqn, Precision.FLOAT32)), "aten", "", "by hand") for op_id in ids
        }
        entries[name] = GroupPlan(name, Role(name), count[name], device[name], Precision.FLOAT32, assignments)
    for present in itertools.chain(itertools.combinations(GROUPS, 1), [GROUPS]):
        plan = PrecisionPlan(
            dag.model, digest(dag), ids, {}, "by hand", "", 0, 0, 0.0, None, tuple(entries[name] for name in present),
            "train" if "train" in present else "", local_batches=dict.fromkeys(present, batch_size),
            output_formats=OutputFormats(decides=False),
        )  # fmt: skip
        save(plan, run.plan(present))
    return run


@attrs.frozen
class Start:
    """One start of a rank: the group, seconds until its plan was in force, how many ranks there are, and from which step."""

    group: str
    plan_s: float
    ranks: int
    step: int


class ElasticJob:
    """Agents, one for each rank, that find each other at a store of one process more, so that any may go.

    Args:
        run: the run folder.
        folder: of this job's checkpoints and logs.
        steps, save_every: of the example.
        kills: by group where its rank kills itself, once each: ``forward:STEP``, ``all-reduce:STEP`` or ``checkpoint:STEP``.
        groups: of the machines that are started, one for each entry (:func:`names_of`).
        least, most: how many machines may make the job; by default one to two.
        wait_s: for further machines, once there are enough.
        environments: more variables, by machine.
        torchrun: start torchrun itself, and not its agent in a fork, whose ranks are forks again (``forking_agent.py``).
    """

    def __init__(
        self,
        run: RunFolder,
        folder: Path,
        steps: int,
        save_every: int,
        kills: dict[str, str] | None = None,
        groups: Sequence[str] = GROUPS,
        *,
        least: int = 1,
        most: int = 2,
        wait_s: int = 1,
        environments: Mapping[str, Mapping[str, str]] | None = None,
        torchrun: bool = False,
    ) -> None:
        self.run, self.folder, self.steps, self.save_every, self.machines = run, folder, steps, save_every, names_of(groups)
        folder.mkdir(parents=True, exist_ok=True)
        self._kills, self._environments = kills or {}, environments or {}
        self._nodes, self._wait_s, self._torchrun = f"{least}:{most}", wait_s, torchrun
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self.agents: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def start(self, machine: str) -> None:
        """Start a machine's agent."""
        group = machine.partition(".")[0]
        rendezvous = (
            f"is_host=false,last_call_timeout={self._wait_s},keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
        )
        command = [f"--nnodes={self._nodes}", "--nproc-per-node=1"]
        command += ["--max-restarts=1000", "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-conf={rendezvous}"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=job", str(KILLED_RANK), str(self.run.path)]
        command += [f"--steps={self.steps}", f"--save-every={self.save_every}", f"--checkpoints={self.folder / 'checkpoints'}"]
        command += [f"--losses={self.folder / f'{machine}.losses'}"]
        own = self._environments.get(machine, {})
        command += [f"--backend={own['BACKEND']}"] if "BACKEND" in own else []
        variables = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "QSYNC_GROUP": group,
            "ELASTIC_KILLS": self._kills.get(group, ""),
            "ELASTIC_FOLDER": str(self.folder),
            "ELASTIC_MACHINE": machine,
            **own,
        }
        env, path = os.environ | variables, self.folder / f"{machine}.out"
        if self._torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", *command]
            with path.open("ab") as output:
                self.agents[machine] = subprocess.Popen(command, cwd=EXAMPLES, env=env, stdout=output, stderr=output)
        else:
            self.agents[machine] = Forked([TORCHRUN, *command], cwd=EXAMPLES, env=env, output=path)

    def worker(self, machine: str) -> int | None:
        """The process of a machine's rank that has its plan in force; None while there is none."""
        try:
            pid = int((self.folder / f"{machine}.pid").read_text() or 0)
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return pid or None

    def kill_machine(self, machine: str) -> None:
        """SIGKILL to a machine's agent and its rank."""
        pid = self.worker(machine)
        for process in (self.agents[machine].pid, pid):
            if process:
                os.kill(process, signal.SIGKILL)
        self.agents.pop(machine).wait()

    def starts(self, machine: str) -> list[Start]:
        """What a machine's rank said when its plan was in force."""
        found = STARTED.findall(self.output(machine))
        return [Start(name, float(seconds), int(ranks), int(step)) for name, seconds, ranks, step in found]

    def segments(self, last: int) -> Iterator[tuple[tuple[str, ...], int, int]]:
        """Which ranks ran which steps of those that count: (the group of each, by rank; step before the first; last step).

        Each start begins one: DistributedDataParallel's first step has other buckets than its later ones, and with three ranks and
        more the order in which an element's gradients are summed follows from its place in a bucket.
        """
        found: list[tuple[tuple[str, ...], int]] = []
        for start in map(json.loads, (self.folder / "starts").read_text().splitlines()):
            groups = tuple(start["groups"])
            while found and found[-1][1] >= start["step"]:
                found.pop()
            found.append((groups, start["step"]))
        for (groups, begin), end in zip(found, [*(begin for _, begin in found[1:]), last], strict=True):
            if begin < end:
                yield groups, begin, end

    def output(self, machine: str) -> str:
        """All that a machine printed."""
        path = self.folder / f"{machine}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def losses(self, machine: str) -> list[dict]:
        """Of every step that a machine's rank has run, in the order in which they ran."""
        path = self.folder / f"{machine}.losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def last_losses(self, machine: str) -> dict[int, float]:
        """Of every step, that of its last run: of the run that counts."""
        return {line["step"]: line["loss"] for line in self.losses(machine)}

    def wait(self, until: Callable[[], object], what: str, timeout_s: float = 400) -> None:
        """Until something is so; an agent that ends first fails the test with what it printed."""
        deadline = time.monotonic() + timeout_s
        while not until():
            ended = {machine: agent.poll() for machine, agent in self.agents.items() if agent.poll() not in (None, 0)}
            if ended or time.monotonic() > deadline:
                said = "\n".join(self.output(machine)[-3000:] for machine in self.machines)
                raise AssertionError(f"{what}: agents ended with {ended}\n{said}")
            time.sleep(0.02)

    def finish(self) -> dict:
        """Wait for all agents; the last checkpoint."""
        self.wait(lambda: all(agent.poll() is not None for agent in self.agents.values()), "the job's end")
        return self.newest()

    def newest(self) -> dict:
        """The last whole checkpoint."""
        return torch.load(max((self.folder / "checkpoints").glob("step-*.pt")), weights_only=True)

    def close(self) -> None:
        """End what still runs."""
        for agent in self.agents.values():
            if agent.poll() is None:
                os.kill(agent.pid, signal.SIGTERM)
        for agent in self.agents.values():
            agent.wait()
        for machine in self.machines:
            if pid := self.worker(machine):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> ElasticJob:
        for machine in self.machines:
            self.start(machine)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def names_of(groups: Sequence[str]) -> tuple[str, ...]:
    """Machines by name: ``infer``, and ``infer.1`` where there is a second one of that group."""
    seen: Counter[str] = Counter()
    found = []
    for group in groups:
        found.append(f"{group}.{seen[group]}" if seen[group] else group)
        seen[group] += 1
    return tuple(found)


def differences(one: dict, other: dict) -> list[str]:
    """Which tensors of two checkpoints are not the same to the last bit."""
    found = [] if one["step"] == other["step"] and one["plan"] == other["plan"] else ["step"]
    model, theirs = one["state"]["model"], other["state"]["model"]
    found += [name for name in model if not torch.equal(model[name], theirs[name])]
    momentum, their_momentum = (state["state"]["optimizer"]["state"] for state in (one, other))
    for index in momentum:
        if not torch.equal(momentum[index]["momentum_buffer"], their_momentum[index]["momentum_buffer"]):
            found.append(f"momentum {index}")
    return found

"""The torchrun of every machine of a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import attrs

from qsync_core.errors import ClusterError
from qsync_core.launching.machines import GroupMachines, PlannedJob


@attrs.frozen
class Meeting:
    """How the processes of a job find each other.

    Attributes:
        host: the machine of node rank 0.
        elastic: machines may come and go; else all must be there.
        standalone: one machine is all there is, and needs neither address nor port.
        max_restarts: how often all processes are started again after one has failed; an elastic job counts machines that come and
            go, too.
    """

    host: str
    port: int = 29500
    name: str = "qsync"
    elastic: bool = False
    max_restarts: int = attrs.field()
    standalone: bool = False

    @max_restarts.default
    def _usual(self) -> int:
        return 100 if self.elastic else 3

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun is started with: agents of an elastic job must not keep one store for all starts
        (docs/coming-and-going.md#starting-it)."""
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.elastic else {}


def environment_of(job: PlannedJob, machines: GroupMachines, meeting: Meeting) -> dict[str, str]:
    """What the processes of one machine are started with.

    The number of CTAs is the plan's; an elastic job may go on with another, so its script asks for the process group's options.
    """
    ctas = {"NCCL_MAX_CTAS": str(job.max_ctas)} if job.max_ctas and not meeting.elastic else {}
    return machines.environment | ctas | meeting.environment


def torchrun_options(job: PlannedJob, machines: GroupMachines, meeting: Meeting, node_rank: str) -> list[str]:
    """Options of torchrun on one machine; an elastic job gives node ranks itself."""
    each = f"--nproc-per-node={machines.ranks_each}"
    if meeting.elastic:
        return [
            f"--nnodes={job.fewest_nodes}:{job.nodes}",
            each,
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meeting.host}:{meeting.port}",
            f"--rdzv-id={meeting.name}",
            f"--max-restarts={meeting.max_restarts}",
        ]
    if meeting.standalone:
        return ["--standalone", each]
    return [
        f"--nnodes={job.nodes}",
        f"--node-rank={node_rank}",
        each,
        f"--master-addr={meeting.host}",
        f"--master-port={meeting.port}",
    ]


@attrs.frozen
class MachineCommand:
    """What is started on one machine: variables and the command, and of which group it is."""

    group: str
    device: str
    node_rank: int
    environment: dict[str, str]
    command: list[str]

    def line(self) -> str:
        """Return the variables and the command as one line of a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def training(script: Sequence[str]) -> list[str]:
    """What torchrun starts to train: ``script`` with its arguments, behind ``--`` where these have long options.

    Of those behind a script's name torchrun refuses one that several of its own begin with, such as ``--run`` or ``--log``.
    """
    name = next((place for place, word in enumerate(script) if not word.startswith("-")), len(script))
    dashes = ["--"] if any(word.startswith("--") for word in script[name:]) and "--" not in script[:name] else []
    return [*script[:name], *dashes, *script[name:]]


def preparing(script: Sequence[str], run: str, cluster: str) -> list[str]:
    """What torchrun starts to prepare a job: ``qsync prepare`` of what trains, ``script`` with its arguments.

    Args:
        run: the run folder, on each machine.
        cluster: the cluster file there.

    Raises:
        ClusterError: for an option in the place of the script, such as torchrun's ``-m``.
    """
    job, *arguments = script
    if job.startswith("-"):
        file = f"{arguments[0].replace('.', '/')}.py" if job == "-m" and arguments else "train.py"
        raise ClusterError(
            f"'qsync prepare' takes a script or a function of a file, and neither modules nor options before it, got "
            f"{shlex.join(script[:2])[:120]}: write the file, as in -- {file}, or -- {file}:make_job"
        )
    return ["-m", "qsync", "prepare", job, "-o", run, "--cluster", cluster, *(["--", *arguments] if arguments else [])]


def machine_commands(job: PlannedJob, meeting: Meeting, script: Sequence[str]) -> list[MachineCommand]:
    """Make the command of every machine, in the order of node ranks."""
    return [
        MachineCommand(
            machines.name,
            machines.device.name,
            node,
            environment_of(job, machines, meeting),
            ["torchrun", *torchrun_options(job, machines, meeting, str(node)), *script],
        )
        for machines in job.groups
        for node in range(machines.first_node, machines.first_node + machines.nodes)
    ]

"""A job as a Kubernetes JobSet (jobset.x-k8s.io/v1alpha2): one replicated job per group.

Pods of a group are numbered by their Job (``JOB_COMPLETION_INDEX``), and all meet at the first pod of the first group, by the name
that the JobSet's headless service gives it: ``JOBSET-GROUP-0-0.JOBSET``.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.plan import Role
from qsync_core.launching.machines import GroupMachines, PlannedJob
from qsync_core.launching.pods import PodSettings, check_settings, names_of_groups, pod_of, render
from qsync_core.launching.torchrun import Meeting, environment_of, torchrun_options

_LONGEST_NAME = 63


def jobset(job: PlannedJob, name: str, settings: PodSettings, script: Sequence[str], meeting: Meeting) -> str:
    """Write the manifest, as YAML.

    Args:
        script: what torchrun starts, with arguments.
        meeting: port, restarts, and whether machines may come and go; host and name are the JobSet's.

    Raises:
        ClusterError: for what Kubernetes would refuse or misunderstand, and a GPU whose node label cannot be known.
    """
    check_settings(job, "JobSet", name, settings)
    names = names_of_groups(job)
    for group in job.groups:
        pod = f"{name}-{names[group.name]}-0-{group.nodes - 1}-12345"
        if len(pod) > _LONGEST_NAME:
            raise ClusterError(
                f"pods of group {group.name!r} would have names of {len(pod)} letters ({pod}), and Kubernetes allows "
                f"{_LONGEST_NAME}: give a shorter --name"
            )
    meeting = attrs.evolve(meeting, host=f"{name}-{names[job.groups[0].name]}-0-0.{name}", name=name)
    pods = [
        attrs.evolve(
            pod_of(group, names[group.name], settings, environment_of(job, group, meeting)), command=_command(job, group, meeting)
        )
        for group in job.groups
    ]
    training = [names[group.name] for group in job.groups if group.role is Role.TRAIN]
    literal = [_literal(argument) for argument in script]
    return render("jobset.yaml.j2", name=name, settings=settings, meeting=meeting, pods=pods, training=training, script=literal)


def _command(job: PlannedJob, group: GroupMachines, meeting: Meeting) -> list[str]:
    options = torchrun_options(job, group, meeting, f"$(({group.first_node} + JOB_COMPLETION_INDEX))")
    if meeting.elastic:
        return ["torchrun", *options]
    return ["sh", "-c", _literal(f'exec torchrun {" ".join(options)} "$@"'), "torchrun"]


def _literal(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands and arguments; ``$$`` stands for a ``$``."""
    return text.replace("$", "$$")

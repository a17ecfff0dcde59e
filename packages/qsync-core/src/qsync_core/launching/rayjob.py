"""A job as a RayJob of KubeRay (ray.io/v1): one group of workers per group, on nodes with its label.

Ray starts the script once, on the head; a ``TorchTrainer`` in it places a worker per rank by these labels (docs/launching.md#ray).
Labels of groups need KubeRay 1.5.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from qsync_core.launching.machines import PlannedJob
from qsync_core.launching.pods import PodSettings, check_settings, names_of_groups, pod_of, render
from qsync_core.launching.torchrun import Meeting, environment_of

NODE_LABEL = "qsync-group"
"""Label of Ray's nodes: the group's name."""


def rayjob(job: PlannedJob, name: str, settings: PodSettings, script: Sequence[str], meeting: Meeting) -> str:
    """Write the manifest, as YAML.

    Args:
        script: what Ray starts on the head, with arguments; ``python`` stands before a file of Python.
        meeting: restarts; host, name and port are Ray's own.

    Raises:
        ClusterError: as :func:`qsync_core.launching.jobset.jobset`.
    """
    check_settings(job, "RayJob", name, settings)
    names = names_of_groups(job, name)
    pods = [pod_of(group, names[group.name], settings, environment_of(job, group, meeting)) for group in job.groups]
    words = ["python", *script] if script[0].endswith(".py") else list(script)
    there = f"cd {shlex.quote(settings.directory)} && " if settings.directory else ""
    return render(
        "rayjob.yaml.j2",
        name=name,
        settings=settings,
        meeting=meeting,
        pods=pods,
        entrypoint=f"{there}exec {shlex.join(words)}",
        node_label=NODE_LABEL,
    )

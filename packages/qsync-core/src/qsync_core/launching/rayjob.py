"""A job as a RayJob of KubeRay (ray.io/v1): one group of workers per group, on nodes with its label.

Ray starts the script once, on the head; a ``TorchTrainer`` in it places a worker per rank by these labels (docs/launching.md#ray).
Labels of groups need KubeRay 1.5.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from qsync_core.errors import ClusterError
from qsync_core.launching.machines import PlannedJob
from qsync_core.launching.pods import PodSettings, check_settings, names_of_groups, pod_of, render
from qsync_core.launching.torchrun import Meeting, environment_of

NODE_LABEL = "qsync-group"
"""Label of Ray's nodes: the group's name."""
JOB_LABEL = "qsync-job"
"""Label of pods: the RayJob's name.  KubeRay's own has that of the Ray cluster, which is drawn at every start."""
_LONGEST_NAME = 47
"""Letters of a RayJob's name: KubeRay's limit, 63 less the longest name of a service (``-serve-svc``) and 6 that it appends."""


def rayjob(job: PlannedJob, name: str, settings: PodSettings, script: Sequence[str], meeting: Meeting) -> str:
    """Write the manifest, as YAML.

    Args:
        script: what Ray starts on the head, with arguments; ``python`` stands before a file of Python, and its options.
        meeting: restarts; host, name and port are Ray's own.

    Raises:
        ClusterError: as :func:`qsync_core.launching.jobset.jobset`; and for what KubeRay would refuse.
    """
    if len(name) > _LONGEST_NAME:
        raise ClusterError(
            f"a RayJob cannot be called {name[:80]!r}, which has {len(name)} letters: KubeRay allows {_LONGEST_NAME}; "
            "give a shorter --name"
        )
    check_settings(job, "RayJob", name, settings)
    if JOB_LABEL in settings.labels:
        raise ClusterError(f"the label {JOB_LABEL!r} is the RayJob's name on its pods; give yours another name")
    names = names_of_groups(job)
    pods = [pod_of(group, names[group.name], settings, environment_of(job, group, meeting)) for group in job.groups]
    words = ["python", *script] if script[0].endswith(".py") or script[0].startswith("-") else list(script)
    there = f"cd {shlex.quote(settings.directory)} && " if settings.directory else ""
    return render(
        "rayjob.yaml.j2",
        name=name,
        settings=settings,
        meeting=meeting,
        pods=pods,
        entrypoint=f"{there}exec {shlex.join(words)}",
        node_label=NODE_LABEL,
        job_label=JOB_LABEL,
        labels={**settings.labels, JOB_LABEL: name},
    )

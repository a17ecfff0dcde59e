"""A job as a Kubernetes JobSet (jobset.x-k8s.io/v1alpha2): one replicated job per group.

``jobset.yaml.j2`` is what is written; here is what Kubernetes would refuse or misunderstand, and what a template cannot say.

Pods of a group are numbered by their Job (``JOB_COMPLETION_INDEX``), and all meet at the first pod of the first group, by the name
that the JobSet's headless service gives it: ``JOBSET-GROUP-0-0.JOBSET``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind
from qsync_core.launching.machines import GroupMachines, PlannedJob
from qsync_core.launching.torchrun import Meeting, environment_of, torchrun_options

PRODUCT = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery: the driver's name of the GPU, with dashes for blanks."""
_CPU, _WHOLE, _SHARED = "cpu", "nvidia.com/gpu", "nvidia.com/gpu.shared"
"""Processors, and resources of NVIDIA's device plugin; the last is one of several parts of a GPU (``renameByDefault: true``)."""
_FULL_NAME = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|TITAN) (?!.*\bMIG\b)[A-Za-z0-9 ._-]+", re.ASCII)
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_LONGEST_NAME = 63
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}", re.ASCII)
_QUANTITY = re.compile(r"[1-9][0-9]{0,14}([KMGT]i?)?", re.ASCII)
_PATH = re.compile(r"/[^:\x00-\x1f]{0,1023}")


@attrs.frozen
class PodSettings:
    """What a JobSet's pods have, beside what the plan says.

    Attributes:
        image: the container image, with torch, QSync and the script.
        namespace: empty for that of ``kubectl``.
        selectors: node labels by group, in the place of the GPU's product.
        resources: by group the resource that stands for its GPUs.
        shared_memory: size of /dev/shm, as Kubernetes writes it; NCCL and data loaders need it.
        claims: mount paths by the name of a PersistentVolumeClaim.
    """

    image: str
    namespace: str = ""
    selectors: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    resources: Mapping[str, str] = attrs.field(factory=dict)
    shared_memory: str = "8Gi"
    claims: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class _Pod:
    """What the template says of the pods of a group."""

    group: GroupMachines
    name: str
    selector: Mapping[str, str]
    resource: str
    command: Sequence[str]
    environment: Mapping[str, str]
    volumes: bool

    @property
    def on_cpu(self) -> bool:
        return self.resource == _CPU


def jobset(job: PlannedJob, name: str, settings: PodSettings, script: Sequence[str], meeting: Meeting) -> str:
    """Write the manifest, as YAML.

    Args:
        script: what torchrun starts, with arguments.
        meeting: port, restarts, and whether machines may come and go; host and name are the JobSet's.

    Raises:
        ClusterError: for what Kubernetes would refuse or misunderstand, and a GPU whose node label cannot be known.
    """
    import jinja2

    _check(job, name, settings)
    names = _job_names(job, name)
    meeting = attrs.evolve(meeting, host=f"{name}-{names[job.groups[0].name]}-0-0.{name}", name=name)
    pods = [
        _Pod(
            group,
            names[group.name],
            _selector(group, settings),
            _resource(group, settings),
            _command(job, group, meeting),
            environment_of(job, group, meeting),
            bool(settings.claims) or not group.shares_gpus,
        )
        for group in job.groups
    ]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["q"] = _quoted
    template = environment.from_string(resources.files(__package__).joinpath("jobset.yaml.j2").read_text("utf-8"))
    training = [names[group.name] for group in job.groups if group.plan.role is Role.TRAIN]
    literal = [_literal(argument) for argument in script]
    return template.render(name=name, settings=settings, meeting=meeting, pods=pods, training=training, script=literal)


def _quoted(value: str | Sequence[str]) -> str:
    """Text in quotes, which no reader takes for something else (``1e-3``, ``on``); or a list of texts."""
    import yaml

    written = yaml.safe_dump(value, default_style='"', default_flow_style=True, allow_unicode=True, width=10**6)
    return str(written).strip()


def _command(job: PlannedJob, group: GroupMachines, meeting: Meeting) -> list[str]:
    options = torchrun_options(job, group, meeting, f"$(({group.first_node} + JOB_COMPLETION_INDEX))")
    if meeting.elastic:
        return ["torchrun", *options]
    return ["sh", "-c", _literal(f'exec torchrun {" ".join(options)} "$@"'), "torchrun"]


def _literal(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands and arguments; ``$$`` stands for a ``$``."""
    return text.replace("$", "$$")


def _resource(group: GroupMachines, settings: PodSettings) -> str:
    default = _CPU if group.plan.device.kind is DeviceKind.CPU else _SHARED if group.shares_gpus else _WHOLE
    return settings.resources.get(group.name, default)


def _selector(group: GroupMachines, settings: PodSettings) -> dict[str, str]:
    if group.name in settings.selectors:
        return dict(settings.selectors[group.name])
    device = group.plan.device
    if device.kind is DeviceKind.CPU:
        return {}
    if not _FULL_NAME.fullmatch(device.name):
        raise ClusterError(
            f"which nodes have group {group.name!r}'s {device.name} is not known, because {PRODUCT} is a GPU's full name: look it "
            f"up with 'kubectl get nodes -L {PRODUCT}' and give --select {group.name}={PRODUCT}=…"
        )
    return {PRODUCT: device.name.replace(" ", "-")}


def _job_names(job: PlannedJob, name: str) -> dict[str, str]:
    """Names of the replicated jobs by group: a group's name in lower-case, with dashes for ``_`` and ``.``.

    Raises:
        ClusterError: for one that is no DNS label then, or that two groups have, or that makes pods' names too long.
    """
    names: dict[str, str] = {}
    for group in job.groups:
        label = group.name.lower().replace("_", "-").replace(".", "-")
        if not _LABEL.fullmatch(label):
            raise ClusterError(
                f"group {group.name!r} cannot name a replicated job: Kubernetes' names begin with a letter, end with a letter or "
                "digit, and have no others but '-' between"
            )
        if label in names.values():
            other = next(known for known, taken in names.items() if taken == label)
            raise ClusterError(
                f"groups {other!r} and {group.name!r} would both be the replicated job {label!r}; rename one of them"
            )
        pod = f"{name}-{label}-0-{group.nodes - 1}-12345"
        if len(pod) > _LONGEST_NAME:
            raise ClusterError(
                f"pods of group {group.name!r} would have names of {len(pod)} letters ({pod}), and Kubernetes allows "
                f"{_LONGEST_NAME}: give a shorter --name"
            )
        names[group.name] = label
    return names


def _check(job: PlannedJob, name: str, settings: PodSettings) -> None:
    for what, label in (("JobSet", name), ("namespace", settings.namespace), *(("claim", claim) for claim in settings.claims)):
        if (label and not _LABEL.fullmatch(label)) or (what == "JobSet" and not label):
            raise ClusterError(
                f"a {what} cannot be called {label[:80]!r}: Kubernetes' names have up to 63 lower-case letters, digits and '-', "
                "begin with a letter and do not end with '-'"
            )
    if "shared-memory" in settings.claims:
        raise ClusterError("the volume 'shared-memory' is /dev/shm's; give the claim of that name another one")
    if not settings.image:
        raise ClusterError(
            "a JobSet needs a container image with torch, QSync and the script; name it, for example with --image "
            "registry.example.com/train:1.0"
        )
    if not _IMAGE.fullmatch(settings.image):
        raise ClusterError(f"not a container image: {settings.image[:80]!r}; write for example registry.example.com/train:1.0")
    if not _QUANTITY.fullmatch(settings.shared_memory):
        raise ClusterError(f"not a size as Kubernetes writes it: {settings.shared_memory[:80]!r}; write for example 8Gi")
    for path in settings.claims.values():
        if not _PATH.fullmatch(path):
            raise ClusterError(f"a claim is mounted at an absolute path without ':', got {path[:80]!r}")
    known = [group.name for group in job.groups]
    for owner in (*settings.selectors, *settings.resources):
        if owner not in known:
            raise ClusterError(f"a selector or resource is given for group {owner!r}, but the job's groups are {', '.join(known)}")
    for key, value in ((key, value) for labels in settings.selectors.values() for key, value in labels.items()):
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ClusterError(f"not a node label: {f'{key}={value}'[:120]!r}; write for example {PRODUCT}=Tesla-T4")
    for resource in settings.resources.values():
        if not _KEY.fullmatch(resource):
            raise ClusterError(f"not a resource: {resource[:80]!r}; write for example {_SHARED}")
    for group in job.groups:
        if group.shares_gpus and group.ranks_each > 1:
            raise ClusterError(
                f"group {group.name!r} has a share of each GPU, of which a pod gets one: leave out its processes per machine"
            )

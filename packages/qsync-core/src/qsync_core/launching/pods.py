"""Pods of a job's groups: what a person asks of them, what Kubernetes would refuse or misunderstand, and the templates' words.

``templates/*.yaml.j2`` are what is written; here is what a template cannot say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.profile import DeviceKind
from qsync_core.launching.machines import GroupMachines, PlannedJob

PRODUCT = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery: the driver's name of the GPU, with dashes for blanks."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue knows in whose queue a job waits."""
_CPU, _WHOLE, _SHARED = "cpu", "nvidia.com/gpu", "nvidia.com/gpu.shared"
"""Processors, and resources of NVIDIA's device plugin; the last is one of several parts of a GPU (``renameByDefault: true``)."""
_FULL_NAME = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|TITAN) (?!.*\bMIG\b)[A-Za-z0-9 ._-]+", re.ASCII)
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}", re.ASCII)
_QUANTITY = re.compile(r"[1-9][0-9]{0,14}([KMGT]i?)?", re.ASCII)
_PATH = re.compile(r"/[^:\x00-\x1f]{0,1023}")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@attrs.frozen
class Taint:
    """A taint of nodes that pods put up with: of any value, or effect, where these are empty."""

    key: str
    value: str = ""
    effect: str = ""

    @classmethod
    def parse(cls, text: str) -> Taint:
        """Read it as ``kubectl taint`` writes it: ``KEY[=VALUE][:EFFECT]``.

        Raises:
            ClusterError: with the form, for another text.
        """
        rest, colon, effect = text.partition(":")
        key, equals, value = rest.partition("=")
        wrong = (colon and effect not in _EFFECTS) or (equals and not value)
        if wrong or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ClusterError(
                f"not a taint: {text[:120]!r}; write KEY, KEY=VALUE or either with :EFFECT ({', '.join(_EFFECTS)}), for example "
                "nvidia.com/gpu=present:NoSchedule"
            )
        return cls(key, value, effect)


@attrs.frozen
class PodSettings:
    """What a manifest's pods have, beside what the plan says.

    Attributes:
        image: the container image, with torch, QSync and the script.
        namespace: empty for that of ``kubectl``.
        selectors: node labels by group, in the place of the GPU's product.
        resources: by group the resource that stands for its GPUs.
        shared_memory: size of /dev/shm, as Kubernetes writes it; NCCL and data loaders need it.
        claims: mount paths by the name of a PersistentVolumeClaim.
        directory: where the script is started; empty for the image's own.
        queue: of Kueue; empty for none.
        labels: of the manifest and of every pod.
        tolerations: taints by group.
    """

    image: str
    namespace: str = ""
    selectors: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    resources: Mapping[str, str] = attrs.field(factory=dict)
    shared_memory: str = "8Gi"
    claims: Mapping[str, str] = attrs.field(factory=dict)
    directory: str = ""
    queue: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    tolerations: Mapping[str, Sequence[Taint]] = attrs.field(factory=dict)

    @property
    def all_labels(self) -> dict[str, str]:
        """The manifest's own labels, with its queue."""
        return {**self.labels, **({QUEUE: self.queue} if self.queue else {})}


@attrs.frozen
class Pod:
    """What templates say of the pods of a group.

    Attributes:
        name: the group's, as Kubernetes writes it.
        command: what starts torchrun; empty where something else starts the processes.
    """

    group: GroupMachines
    name: str
    selector: Mapping[str, str]
    resource: str
    tolerations: Sequence[Taint]
    environment: Mapping[str, str]
    volumes: bool
    command: Sequence[str] = ()

    @property
    def on_cpu(self) -> bool:
        """Whether it asks for processors and no GPU."""
        return self.resource == _CPU

    @property
    def apart(self) -> bool:
        """Whether pods of the group must be on machines of their own."""
        return self.group.shares_gpus and self.group.nodes > 1


def pod_of(group: GroupMachines, name: str, settings: PodSettings, environment: Mapping[str, str]) -> Pod:
    """The pods of a group.

    Raises:
        ClusterError: for a GPU whose node label cannot be known.
    """
    return Pod(
        group,
        name,
        _selector(group, settings),
        _resource(group, settings),
        settings.tolerations.get(group.name, ()),
        {**environment, "PYTHONUNBUFFERED": "1"},  # so that logs have a line when it is printed
        bool(settings.claims) or not group.shares_gpus,
    )


def render(template: str, **values: object) -> str:
    """A manifest as YAML, of the template of that name."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = _quoted
    return environment.get_template(template).render(values)


def _quoted(value: str | Sequence[str]) -> str:
    """Text in quotes, which no reader takes for something else (``1e-3``, ``on``); or a list of texts."""
    import yaml

    written = yaml.safe_dump(value, default_style='"', default_flow_style=True, allow_unicode=True, width=10**6)
    return str(written).strip()


def _resource(group: GroupMachines, settings: PodSettings) -> str:
    default = _CPU if group.device.kind is DeviceKind.CPU else _SHARED if group.shares_gpus else _WHOLE
    return settings.resources.get(group.name, default)


def _selector(group: GroupMachines, settings: PodSettings) -> dict[str, str]:
    if group.name in settings.selectors:
        return dict(settings.selectors[group.name])
    device = group.device
    if device.kind is DeviceKind.CPU:
        return {}
    if not _FULL_NAME.fullmatch(device.name):
        raise ClusterError(
            f"which nodes have group {group.name!r}'s {device.name} is not known, because {PRODUCT} is a GPU's full name: look it "
            f"up with 'kubectl get nodes -L {PRODUCT}' and give --select {group.name}={PRODUCT}=…"
        )
    return {PRODUCT: device.name.replace(" ", "-")}


def names_of_groups(job: PlannedJob) -> dict[str, str]:
    """Names of groups as Kubernetes writes them: in lower-case, with dashes for ``_`` and ``.``.

    Raises:
        ClusterError: for one that is no DNS label then, or that two groups have.
    """
    names: dict[str, str] = {}
    for group in job.groups:
        label = group.name.lower().replace("_", "-").replace(".", "-")
        if not _LABEL.fullmatch(label):
            raise ClusterError(
                f"group {group.name!r} cannot name its pods: Kubernetes' names begin with a letter, end with a letter or digit, "
                "have no others but '-' between, and 63 at most"
            )
        if label in names.values():
            other = next(known for known, taken in names.items() if taken == label)
            raise ClusterError(f"groups {other!r} and {group.name!r} would both be {label!r} in Kubernetes; rename one of them")
        names[group.name] = label
    return names


def check_settings(job: PlannedJob, kind: str, name: str, settings: PodSettings) -> None:
    """Refuse what Kubernetes would refuse.

    Args:
        kind: of the manifest that has this name.

    Raises:
        ClusterError: with the value, and what to write.
    """
    named = ((kind, name), ("namespace", settings.namespace), ("queue", settings.queue))
    for what, label in (*named, *(("claim", claim) for claim in settings.claims)):
        if (label and not _LABEL.fullmatch(label)) or (what == kind and not label):
            raise ClusterError(
                f"a {what} cannot be called {label[:80]!r}: Kubernetes' names have up to 63 lower-case letters, digits and '-', "
                "begin with a letter and do not end with '-'"
            )
    if "shared-memory" in settings.claims:
        raise ClusterError("the volume 'shared-memory' is /dev/shm's; give the claim of that name another one")
    if not settings.image:
        raise ClusterError(
            f"a {kind} needs a container image with torch, QSync and the script; name it, for example with --image "
            "registry.example.com/train:1.0"
        )
    if not _IMAGE.fullmatch(settings.image):
        raise ClusterError(f"not a container image: {settings.image[:80]!r}; write for example registry.example.com/train:1.0")
    if not _QUANTITY.fullmatch(settings.shared_memory):
        raise ClusterError(f"not a size as Kubernetes writes it: {settings.shared_memory[:80]!r}; write for example 8Gi")
    for path in settings.claims.values():
        if not _PATH.fullmatch(path):
            raise ClusterError(f"a claim is mounted at an absolute path without ':', got {path[:80]!r}")
    if settings.directory and not _PATH.fullmatch(settings.directory):
        raise ClusterError(f"a working directory is an absolute path without ':', got {settings.directory[:80]!r}")
    known = [group.name for group in job.groups]
    for owner in (*settings.selectors, *settings.resources, *settings.tolerations):
        if owner not in known:
            raise ClusterError(
                f"a selector, resource or toleration is given for group {owner!r}, but the job's groups are {', '.join(known)}"
            )
    pairs = [("node label", f"{PRODUCT}=Tesla-T4", pair) for labels in settings.selectors.values() for pair in labels.items()]
    pairs += [("label", "team=vision", pair) for pair in settings.labels.items()]
    for what, example, (key, value) in pairs:
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ClusterError(f"not a {what}: {f'{key}={value}'[:120]!r}; write for example {example}")
    for resource in settings.resources.values():
        if not _KEY.fullmatch(resource):
            raise ClusterError(f"not a resource: {resource[:80]!r}; write for example {_SHARED}")
    for group in job.groups:
        if group.shares_gpus and group.ranks_each > 1:
            raise ClusterError(
                f"group {group.name!r} has a share of each GPU, of which a pod gets one: leave out its processes per machine"
            )

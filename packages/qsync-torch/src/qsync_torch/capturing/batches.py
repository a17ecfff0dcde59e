"""What a script's loader yields, as a job's batches: which part the model is called with, which the loss, and other batch sizes.

The first batches are kept on the CPU.  A batch of any size is cut from them along dimension 0, as if they were one long batch
that begins anew behind its end.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader

from qsync_core.errors import JobError
from qsync_torch.capturing.losses import SEVERAL_CALLS, Loss, Signature, batch_of_mapping, needed_of, otherwise
from qsync_torch.capturing.random_state import as_without
from qsync_torch.job import Batch
from qsync_torch.torch_internals import pytree

KEPT_BATCHES = 16
"""Batches that are read from a loader at most."""
KEPT_BYTES = 256 * 2**20
"""No further batch is read once those that are kept have this many bytes."""


Loader = Iterable[Any] | Callable[[], Iterable[Any]]
"""What gives batches, or a function that makes it."""


def begins_to_read(loader: Any) -> bool:
    """Whether making a generator has made the iterator of its DataLoader, which draws a random number and starts workers."""
    frame = getattr(loader, "gi_frame", None)
    source = loader if frame is None else frame.f_locals.get(".0")
    return isinstance(source, Iterator) and any(kind.__module__ == DataLoader.__module__ for kind in type(source).__mro__)


def first_batches(name: str, loader: Loader) -> list[Any]:
    """What a loader yields first, read as if it had not been read.

    The random state of torch, NumPy and ``random``, the generators that the loader holds, and a loader's persistent workers are
    as before.

    Raises:
        JobError: when it cannot be read, or yields nothing.
    """
    if not isinstance(loader, Iterable) and not callable(loader):
        raise JobError(
            f"the loader of {name} is a {type(loader).__name__}, from which no batches can be read; pass what the training loop "
            "iterates over, such as a DataLoader, or a function that makes it"
        )
    found: list[Any] = []
    kept_bytes = 0
    with as_without(loader) as unread:
        try:
            for batch in itertools.islice(unread if isinstance(unread, Iterable) else unread(), KEPT_BATCHES):
                found.append(_kept(batch))
                kept_bytes += sum(leaf.nbytes for leaf in pytree.tree_leaves(found[-1]) if isinstance(leaf, torch.Tensor))
                if kept_bytes >= KEPT_BYTES:
                    break
        except Exception as error:
            raise JobError(f"reading batch {len(found)} of {name}'s loader failed: {type(error).__name__}: {error}") from error
    if not found:
        raise JobError(f"the loader of {name} yields no batch; check its data set, its sampler and drop_last")
    return found


def as_batch(name: str, model: nn.Module, loss_fn: Loss | None, given: Any) -> Batch:
    """What one element of a loader says: how the model is called, and what the loss compares its output with.

    ====================================  ==============================  =========================================
    element                               the model is called             the loss
    ====================================  ==============================  =========================================
    ``Batch``                             as it says                      ``loss_fn(output, target)`` of its target
    dictionary, no ``loss_fn``            ``model(**batch)``              the model's own
    dictionary                            as :func:`~qsync_torch.capturing.losses.batch_of_mapping` has it
    tuple or list, no ``loss_fn``         ``model(*batch)``               the model's own
    tuple or list                         with all but the last           as many as ``loss_fn`` takes after the
                                                                          output, mostly one
    tensor                                ``model(tensor)``               of the same tensor, as autoencoders have it
    ====================================  ==============================  =========================================

    Raises:
        JobError: when it is something else, or has too few parts.
    """
    if isinstance(given, Batch):
        return given
    if isinstance(given, Mapping):
        return batch_of_mapping(name, model, loss_fn, dict(given))
    if isinstance(given, torch.Tensor):
        wanted = 0 if loss_fn is None else _targets_wanted(loss_fn, model, 2)
        return Batch((given,), target=None if wanted == 0 else given)
    if isinstance(given, (tuple, list)):
        parts = tuple(given)
        wanted = 0 if loss_fn is None else _targets_wanted(loss_fn, model, len(parts))
        if len(parts) == 1 and wanted == 1:
            return Batch(parts, target=parts[0])
        if len(parts) <= wanted:
            raise JobError(
                f"the loader of {name} yields {len(parts)} parts, and the loss takes {wanted} of them beside the output, which "
                f"leaves none for the model; {otherwise(model, wanted)}"
            )
        inputs, targets = parts[: len(parts) - wanted], parts[len(parts) - wanted :]
        try:
            inspect.signature(model.forward).bind(*inputs)
        except TypeError as error:
            raise JobError(
                f"the loader of {name} yields {len(parts)} parts; the loss takes the last {wanted} beside the output, and the "
                f"model's forward does not take the other {len(inputs)} ({error}); {otherwise(model, wanted)}; {SEVERAL_CALLS}"
            ) from None
        return Batch(inputs, target=None if not targets else targets[0] if wanted == 1 else targets)
    raise JobError(
        f"the loader of {name} yields a {type(given).__name__}, which says neither what the model is called with nor what the loss "
        f"takes; {otherwise(model, 1)}"
    )


def check_samples_first(name: str, batch: Batch) -> None:
    """Refuse batches that cannot be cut along dimension 0 with their samples.

    Those are lists with an entry for each sample, as of images of several sizes, and targets that are flattened or repeated.  Of
    targets of which one has the samples there, the others may be anything, such as weights of classes.

    Raises:
        JobError: naming the list or the shape.
    """
    parts = list(_parts(batch))
    for index, (where, part) in enumerate(parts):
        if entry := _entry_by_sample(part, [_samples(other) for _, other in (*parts[:index], *parts[index + 1 :])]):
            raise JobError(
                f"the loader of {name} yields a {type(part).__name__} with {entry} for each sample ({where}), and measurements cut "
                "batches to other sizes along dimension 0 of tensors: pad the entries in collate_fn and stack them, with how many "
                "of each count in a tensor of their own, and take them apart in the loss or in the model's forward"
            )
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(batch.target) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    wrong = [size for size in sizes if size > 1 and batch.size > 1 and (size % batch.size == 0 or batch.size % size == 0)]
    if batch.size in sizes or not wrong:
        return
    raise JobError(
        f"the loader of {name} yields {batch.size} samples with a target of length {wrong[0]}, and measurements cut batches to "
        "other sizes along dimension 0: yield it with the samples there and reshape it in the loss, as in lambda output, target: "
        "loss_fn(output.flatten(0, 1), target.flatten())"
    )


def _parts(batch: Batch) -> Iterator[tuple[str, Any]]:
    """What a model and its loss are given, each with where it is."""
    yield from ((f"argument {index} of the model", value) for index, value in enumerate(batch.args))
    yield from batch.kwargs.items()
    targets = batch.target
    if isinstance(targets, Mapping):
        yield from targets.items()
    elif isinstance(targets, tuple):
        yield from ((f"target {index} of the loss", value) for index, value in enumerate(targets))
    else:
        yield "the target of the loss", targets


def _entry_by_sample(part: Any, samples: Sequence[int]) -> str:
    """What a list has for each sample, in words; empty for something else, such as several inputs that hold all samples.

    Args:
        samples: how many the other parts may have.
    """
    if not isinstance(part, (list, tuple)) or not part:
        return ""
    if _are_dictionaries(part):
        return "a dictionary"
    if not all(isinstance(entry, torch.Tensor) for entry in part) or any(entry.shape[:1] == (len(part),) for entry in part):
        return ""
    return "a tensor" if len(part) in samples else ""


def _samples(part: Any) -> int:
    """How many samples a part of a batch may have; 0 where it does not say."""
    if isinstance(part, torch.Tensor):
        return part.shape[0] if part.dim() else 0
    return len(part) if isinstance(part, (list, tuple)) and _are_dictionaries(part) else 0


def _are_dictionaries(part: Sequence[Any]) -> bool:
    return all(isinstance(entry, Mapping) and any(isinstance(value, torch.Tensor) for value in entry.values()) for entry in part)


@attrs.frozen(eq=False)
class KeptBatches:
    """Samples of a loader's first batches, as one ring; a job's batch function.

    Attributes:
        leaves: tensors whose dimension 0 is the sample, and whatever else the first batch has.
        per_sample: which of them are such tensors.
        structure: of (args, kwargs, target).
    """

    samples: int
    leaves: Sequence[Any]
    per_sample: Sequence[bool]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, name: str, batches: Sequence[Batch]) -> KeptBatches:
        """Keep those batches that have the shape which takes the most memory per sample: a plan must have room for them.

        Args:
            name: of the job, for the warning that others are left out.
        """
        layouts = [_Layout.of(batch) for batch in batches]
        largest = max(range(len(batches)), key=lambda index: batches[index].nbytes / batches[index].size)
        kept = [batch for batch, layout in zip(batches, layouts, strict=True) if layout == layouts[largest]]
        if len(set(layouts)) > 1:
            warnings.warn(
                f"the batches of {name} differ in more than their number of samples (as when each is padded to its longest "
                "sample): its plan is made for the largest of them; pad all to one length where predictions are to hold for every "
                "step",
                stacklevel=4,
            )
        columns = list(zip(*(pytree.tree_leaves((batch.args, batch.kwargs, batch.target)) for batch in kept), strict=True))
        per_sample = layouts[largest].per_sample
        joined: dict[tuple[int, ...], Any] = {}  # what model and loss both get is one tensor
        for column, whole in zip(columns, per_sample, strict=True):
            joined.setdefault(tuple(map(id, column)), torch.cat(column) if whole else column[0])
        leaves = [joined[tuple(map(id, column))] for column in columns]
        return cls(sum(batch.size for batch in kept), leaves, per_sample, layouts[largest].structure)

    def __call__(self, step: int, batch_size: int) -> Batch:
        """The samples from ``step * batch_size`` on, in tensors of their own; behind the last one comes the first again."""
        rows = torch.arange(step * batch_size, (step + 1) * batch_size) % self.samples
        cut = {id(leaf): leaf[rows] if whole else leaf for leaf, whole in zip(self.leaves, self.per_sample, strict=True)}
        return Batch(*pytree.tree_unflatten([cut[id(leaf)] for leaf in self.leaves], self.structure))


@attrs.frozen
class _Layout:
    """What two batches must share to be joined."""

    structure: pytree.TreeSpec
    shapes: tuple[Any, ...]
    per_sample: tuple[bool, ...]

    @classmethod
    def of(cls, batch: Batch) -> _Layout:
        leaves, structure = pytree.tree_flatten((batch.args, batch.kwargs, batch.target))
        whole = tuple(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch.size for leaf in leaves)
        shapes = (
            (leaf.dtype, tuple(leaf.shape[is_whole:])) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf, is_whole in zip(leaves, whole, strict=True)
        )
        return cls(structure, tuple(shapes), whole)

    def __hash__(self) -> int:  # a structure has no hash of its own
        return hash((self.shapes, self.per_sample))


def _targets_wanted(loss_fn: Loss, model: nn.Module, parts: int) -> int:
    """How many of a batch's parts the loss takes: what it needs beside the output, or all that the model does not need."""
    signature = Signature.of(loss_fn)
    if signature.takes_more:
        return max(parts - needed_of(inspect.signature(model.forward).parameters.values()), 1)
    return max(signature.needed - 1, 0)


def _kept(batch: Any) -> Any:
    """A copy on the CPU: loaders may use the same memory again."""
    if isinstance(batch, Batch):
        return Batch(*map(_kept, (batch.args, batch.kwargs, batch.target)))
    return pytree.tree_map(_on_cpu, dict(batch) if isinstance(batch, Mapping) else batch)


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf

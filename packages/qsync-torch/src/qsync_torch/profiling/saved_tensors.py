"""What autograd keeps for backward: seen through ``saved_tensors_hooks`` and deduplicated by storage.

See docs/design/memory.md#measuring-and-checking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch


@attrs.frozen
class Saved:
    """What one operator's forward keeps.

    Attributes:
        inputs: positions of the activations that are kept (as such or as a view).
        output: whether the (first) output is kept.
        own_bytes: bytes of every other storage that is kept; parameters and buffers are not counted.
        result: what the forward returned.
    """

    inputs: tuple[int, ...]
    output: bool
    own_bytes: int
    result: Any


def watch_saved(forward: Callable[[], Any], activations: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor] = ()) -> Saved:
    """Run ``forward`` and report which storages its autograd nodes keep.

    Args:
        forward: the operator; it must read ``activations`` and ``parameters`` themselves, not copies.
        activations: its activation inputs, in order.
        parameters: tensors that live anyway (parameters, buffers) and are not counted.
    """
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # an output that its own node keeps would hold that node, and neither would ever be freed
        storage = tensor.untyped_storage()
        if storage.nbytes():
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # a freed address could be handed out again while we compare addresses
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    for tensor in parameters:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    inputs = []
    for position, tensor in enumerate(activations):
        if tensor.untyped_storage().data_ptr() in kept:
            inputs.append(position)
    for tensor in activations:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    first = result[0] if isinstance(result, (tuple, list)) else result
    output = isinstance(first, torch.Tensor) and kept.pop(first.untyped_storage().data_ptr(), None) is not None
    return Saved(tuple(inputs), output, sum(kept.values()), result)

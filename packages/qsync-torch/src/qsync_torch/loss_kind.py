"""Which loss a job minimises, and how it is reduced over the batch."""

from __future__ import annotations

from collections.abc import Sequence

from qsync_torch.classify import LOSSES
from qsync_torch.graph_values import Draft


def loss_kind(drafts: Sequence[Draft], loss: int | None) -> tuple[str, str]:
    """Kind (``cross_entropy``, ``mse``, … or ``custom``) and reduction (``mean``, ``sum`` or ``none``).

    From the loss back to the model's output: where every path passes a loss function of one kind, that is the kind
    (the mean of two cross-entropies is cross-entropy); anything else is ``custom``.
    """
    if loss is None:
        return "custom", "mean"
    kinds: set[str] = set()
    reductions: list[str] = []
    waiting, seen = [loss], set()
    while waiting:
        position = waiting.pop()
        if position in seen:
            continue
        seen.add(position)
        draft = drafts[position]
        if draft.name in LOSSES:
            is_log_softmax = any(drafts[source].name == "log_softmax" for source in draft.inputs)
            kind = LOSSES[draft.name]
            kinds.add("cross_entropy" if kind == "nll" and is_log_softmax else kind)
            reductions.append(draft.reduction)
        elif draft.in_loss and draft.kind != "input":
            if draft.name in ("mean", "sum"):
                reductions.append(draft.name)
            waiting.extend(draft.inputs)
        else:
            kinds.add("custom")
    known = [reduction for reduction in dict.fromkeys(reductions) if reduction != "none"]
    return (kinds.pop() if len(kinds) == 1 else "custom"), (known[0] if known else "none")

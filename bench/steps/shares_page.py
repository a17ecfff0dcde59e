"""The page of ``memory-shares.json``: what plans choose at shares of the memory, and what that buys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
_TITLES = {"resnet50": "ResNet50, 128 images of 224×224", "bert-base": "BERT-base, 12 sequences of 384"}
_SHARE = re.compile(r"(?P<model>.+)-(?P<percent>\d+)-(chosen|least)")
_HEADS = ("memory", "operators and chains", "peak of a step", "step over uniform 16 bit's", "largest batch in AMP's memory")
_TEXT = """# Shares of the memory

A device has part of the memory that a job takes in float32. What does a plan choose there, what does a step take and how long does
it last, and how much larger could batches be? Every row is one plan for a job of two like devices: one trains in float32, the other
has that share of the memory, and its operators may run in int8 with 16-bit results, in float16 or in float32, its
[chains](design/fused-chains.md) fused or not, with their inputs kept as they are or in int8.

- **100%** is what a process takes in float32, as predicted from the profile: tensors with DistributedDataParallel's buckets, the
  allocator's reserve, the CUDA context ([memory](design/memory.md)). Weights, optimizer state, gradients, buckets and context are
  the same under every plan: 2.8 of BERT-base's 5.9 GiB, 1.2 of ResNet50's 12.6. That is why no plan fits BERT-base's lower shares.
- **Peak** and **step** are measured on the device alone, without DistributedDataParallel, under a cap of that memory, compiled by
  `qsync.compile`. Uniform 16 bit is every such operator in float16, compiled in the same way, without a cap. The float32 device
  leaves time for float32, so that a plan goes no lower than its memory asks for.
- **The largest batch** is that of the plan's formats in the memory that a step takes under PyTorch's AMP (float16, eager) at the
  job's batch: the largest that was tried and fits.

`python bench/gpu_memory_shares.py --out OUT` measures it, other shares with `--shares 45,40`;
[the rows](results/memory-shares.md) have the machine, the command, and what was predicted.
"""


def shares_page(stored: Sequence[Mapping[str, Any]]) -> str:
    """The page as Markdown.

    Args:
        stored: the rows of the file.
    """
    by_id = {row["id"]: row for row in stored}
    found: dict[str, list[int]] = {}
    for row_id in by_id:
        if match := _SHARE.fullmatch(row_id):
            found.setdefault(match["model"], []).append(int(match["percent"]))
    lines = [_TEXT]
    for model in sorted(found, key=lambda name: (name not in _TITLES, name != next(iter(_TITLES)), name)):
        lines += [f"## {_TITLES.get(model, model)}", "", *table(by_id, model, sorted(found[model], reverse=True)), ""]
    return "\n".join(lines)


def table(rows: Rows, model: str, percents: Sequence[int]) -> list[str]:
    """A model's shares, one a line, below what they are compared with."""
    amp, full, device = rows[f"{model}-amp"], rows[f"{model}-full"], rows[f"{model}-full"].get("device", "")
    head = f"On {device}: 100% is {full['value']:.3g} GiB; a step under AMP peaks at {amp['value']:.3g} GiB ({amp['spread']})."
    return [head, "", "| " + " | ".join(_HEADS) + " |", "|---" * len(_HEADS) + "|", *(_line(rows, model, p) for p in percents)]


def _line(rows: Rows, model: str, percent: int) -> str:
    stem = f"{model}-{percent}"
    if least := rows.get(f"{stem}-least"):
        return f"| {percent}% | no plan fits; one fits {least['value']:.1%} | – | – | – |"

    def cell(what: str, form: str) -> str:
        row = rows.get(f"{stem}-{what}")
        return "–" if row is None else form.format(row["value"])

    cells = (cell("peak", "{:.3g} GiB"), cell("step", "{:.3g}"), cell("batch", "{:.0f}"))
    chosen = rows[f"{stem}-chosen"]["spread"]
    if f"{stem}-runs" in rows:
        cells = ("does not run under the cap", "–", "–")
    return f"| {percent}% | {chosen} | " + " | ".join(cells) + " |"

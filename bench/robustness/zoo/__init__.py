"""A zoo of tiny training jobs as people write them: each either runs right under a plan or is refused in one sentence.

``ZOO`` maps names to functions that make the job.  All of them are small (a step takes milliseconds), run on a CPU, and have fixed
seeds: making a job twice gives equal weights and equal batches.
"""

from __future__ import annotations

# Importing them enters their jobs.
from robustness.zoo import families, in_place, layers, operators, outputs, recomputation, weights  # noqa: F401
from robustness.zoo.entries import ZOO

__all__ = ["ZOO"]

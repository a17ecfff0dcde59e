"""2,000 damaged files: each is refused, or is a valid artifact in canonical form; nothing else ever happens.

``bench/fuzz_artifacts.py`` does the same with 100,000 files of real size in a process with little memory.
"""

from __future__ import annotations

import random
from collections import Counter

from artifact_examples import examples
from artifact_mutations import MUTATIONS, mutate

from qsync_core.artifacts import files as artifact
from qsync_core.errors import ArtifactError


def test_damaged_files_are_refused_or_valid() -> None:
    originals = [artifact.to_bytes(value) for value in examples(layers=1).values()]
    rng = random.Random(20)
    outcomes: Counter[tuple[str, bool]] = Counter()
    for number in range(2_000):
        mutation, resealed = MUTATIONS[number % len(MUTATIONS)]
        original = originals[number % len(originals)]
        damaged = mutate(rng, original, mutation, resealed)
        if damaged == original:
            continue
        try:
            value = artifact.from_bytes(damaged)
        except ArtifactError:
            outcomes["refused", resealed] += 1
            continue
        assert artifact.to_bytes(value) == damaged
        outcomes["valid", resealed] += 1
    assert outcomes["valid", False] == 0
    assert outcomes["refused", False] > 900
    assert outcomes["refused", True] > 500
    assert outcomes["valid", True] > 50  # under a matching digest another digit is as good as the old one

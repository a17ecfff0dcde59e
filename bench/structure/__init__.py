"""How the source is arranged, and what that costs when it runs: rows H1 to H10 of ``docs/results/structure.json``."""

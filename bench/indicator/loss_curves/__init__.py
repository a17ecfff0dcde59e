"""Loss curves of models of real size under plans: rows L of ``docs/results/accuracy.json``."""

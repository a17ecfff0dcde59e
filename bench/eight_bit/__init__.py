"""What the rows of ``docs/results/today.json`` are measured with."""

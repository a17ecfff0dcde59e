"""What rows L1 to L9 of ``docs/results/steps.json`` are measured with (``gpu_steps.py``)."""

"""Tuning the kernels of a traced job: what to measure, operands, a timer, and the choice that follows from the records."""

"""Compares kernel backends: their products beside PyTorch's own in 16 bit, timed in turns and checked against float64."""

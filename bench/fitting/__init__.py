"""Estimates held against what was measured: times of other chips, and peaks of memory (docs/results/way.json)."""

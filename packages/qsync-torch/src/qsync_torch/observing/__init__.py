"""Collecting the device-independent numbers that indicators need, over the first updates of a run (docs/design/indicator.md)."""

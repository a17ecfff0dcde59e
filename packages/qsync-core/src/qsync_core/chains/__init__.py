"""Chains of a graph: which there are, and why an activation that 8-bit operators read is in none (docs/design/fused-chains.md)."""

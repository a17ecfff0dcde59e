"""Producers: normalizations and activations that write the 8-bit copy of their result (docs/design/fused-chains.md)."""

"""Quantization of float tensors to int8 and float8."""

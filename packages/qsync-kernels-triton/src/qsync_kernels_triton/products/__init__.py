"""Products of 8-bit operands, dequantized on the way out."""

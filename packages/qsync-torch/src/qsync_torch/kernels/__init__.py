"""TODO-ROOM: kernels."""

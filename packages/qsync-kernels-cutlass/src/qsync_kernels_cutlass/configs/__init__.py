"""The configurations of kernels: what a request asks, which configurations a chip runs, and which are worth measuring."""

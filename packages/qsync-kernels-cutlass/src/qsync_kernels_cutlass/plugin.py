"""Hook implementations of qsync-kernels-cutlass; importing this module does not import torch."""

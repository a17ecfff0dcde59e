"""Hook implementations of qsync-kernels-triton; importing this module does not import torch."""

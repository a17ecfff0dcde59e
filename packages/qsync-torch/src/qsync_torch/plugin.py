"""Hook implementations of qsync-torch; importing this module does not import torch."""

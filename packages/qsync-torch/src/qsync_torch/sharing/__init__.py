"""A share of a GPU: put this process under it, see that it is, and compare what the ranks of a job have (docs/shared-gpus.md)."""

"""Whether a job fits GPUs that are not at hand, and how long its step takes there (docs/fits.md)."""

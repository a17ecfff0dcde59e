"""Measuring what a model's operators, casts, buckets and optimizer cost on one device (DESIGN section 2, ``Profile``)."""

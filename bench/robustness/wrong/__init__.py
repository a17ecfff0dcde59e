"""The scripts of row T2, by what they do with a model; :mod:`robustness.wrong.two` holds what they share."""

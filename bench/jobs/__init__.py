"""Jobs of unequal groups that benchmarks prepare and train, by the README's two commands, in every way that they compare."""

"""The way from a job to its PrecisionDag: export, the walk over the graph, classification, the order of gradients."""

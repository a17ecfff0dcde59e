"""Jobs, scripts and faults that the pipeline has to get right or refuse."""

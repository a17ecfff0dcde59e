"""`qsync doctor`: what torch and this machine can do; under torchrun, what the ranks of a job can do together."""

"""What all ranks must agree on: the plan, the group of each process, the loss scale."""

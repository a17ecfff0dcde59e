"""What a kernel backend is: requests, specifications, which backend runs each kernel of an operator, lower bounds of time."""

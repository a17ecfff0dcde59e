"""Hook implementations of qsync-planner."""

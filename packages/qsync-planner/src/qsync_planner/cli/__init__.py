"""The planner's commands: indicate, plan, explain, replay, verify."""

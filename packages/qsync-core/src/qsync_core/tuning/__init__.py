"""Tuning: the search over a backend's configurations, and the records of what was measured."""

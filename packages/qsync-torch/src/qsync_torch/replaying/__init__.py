"""Calls of planned operators that are recorded once, and run again without Python's frames (docs/decisions/replays.md)."""

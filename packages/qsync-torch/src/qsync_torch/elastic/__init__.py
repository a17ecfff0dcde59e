"""Ranks that come and go: what stays the same when a job starts again with other ones (docs/coming-and-going.md)."""

"""Ranks that watch each other: row W3."""

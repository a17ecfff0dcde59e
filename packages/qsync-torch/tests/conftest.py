"""Loads hypothesis's profile."""

import hypothesis_profiles  # noqa: F401

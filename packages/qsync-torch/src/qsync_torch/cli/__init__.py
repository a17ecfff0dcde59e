"""The commands that need torch: trace, profile, observe, tune, demo."""

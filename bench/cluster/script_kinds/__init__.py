"""Small training scripts, run under a plan and plainly."""

"""What people read about plans: explanations, differences, the page of a trade-off."""

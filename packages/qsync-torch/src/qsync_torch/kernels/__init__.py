"""From an operator's binding to a built kernel: selection among backends, tuning records, the custom operators."""

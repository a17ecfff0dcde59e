"""What turns an operator's binding into a built kernel: selection among backends, tuning records, the custom operators."""

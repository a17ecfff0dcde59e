"""What flows between the steps: formats, variants, operators, and one frozen class for each artifact."""

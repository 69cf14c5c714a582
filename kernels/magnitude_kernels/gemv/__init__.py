"""Products of few rows with 4-bit and 8-bit weights."""

"""Rounding rows of keys and values to eight bits with a scale each, and back."""

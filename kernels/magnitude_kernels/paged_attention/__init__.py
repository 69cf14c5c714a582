"""Causal attention over keys and values that lie in pages, for a ragged batch."""

"""Attention of sequences that share the pages of a prefix, whose keys are then read once for all of them."""

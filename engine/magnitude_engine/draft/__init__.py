"""Proposers: what the next tokens may be, from what was said before. Pure Python and numpy."""

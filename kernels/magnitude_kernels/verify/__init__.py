"""Acceptance of draft trees: how far what was drawn follows them."""

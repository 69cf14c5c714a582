"""Grammars: what an answer may look like, compiled to token masks."""

"""Proposers that compute: a draft model, and a part of the model itself. They draft token by token, for all at once."""

"""Moving the keys and values of an accepted path together."""

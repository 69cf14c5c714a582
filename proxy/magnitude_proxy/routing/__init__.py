"""Which route answers a step, and how one that fails is left for another."""

"""Attention of draft trees: each node sees the context, its ancestors and itself."""

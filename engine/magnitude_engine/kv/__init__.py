"""The key-value cache: pages, who holds them, and what is kept of a session for its next step."""

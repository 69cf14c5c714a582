"""The key-value cache: pages, who holds them, and the prefixes that a tenant's later requests find again."""

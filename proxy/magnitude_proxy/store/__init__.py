"""The session store: an embedded or external Valkey or Redis, and the same rules in memory while it is away."""

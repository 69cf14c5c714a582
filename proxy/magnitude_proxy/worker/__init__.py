"""The local worker as a route, and the process behind it."""

"""`magnitude cache`: what a running server's cache holds."""

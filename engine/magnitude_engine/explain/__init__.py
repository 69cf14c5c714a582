"""Why a prompt was computed although much of it, or something like it, had been computed before."""

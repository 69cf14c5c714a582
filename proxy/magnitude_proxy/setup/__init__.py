"""Commands that prepare a machine: fetching models, examining hardware and settings."""

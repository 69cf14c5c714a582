"""OpenAI-compatible servers as routes."""

"""OpenAI's wire: requests in, bodies and chunks out; pure functions and structs."""

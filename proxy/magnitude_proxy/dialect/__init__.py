"""Responses and Messages: how they are read as a chat, and how its answer is written in their form."""

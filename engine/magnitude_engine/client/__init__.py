"""The published client over HTTP: `client` is what users see, the other files serve it. Needs no torch."""

from __future__ import annotations

from magnitude_engine.client.client import AnswerStream, MagnitudeClient
from magnitude_engine.client.health import RuntimeHealth

__all__ = ["AnswerStream", "MagnitudeClient", "RuntimeHealth"]

"""The engine inside the caller's own process, in the published client's terms; torch is loaded at `warmup`."""

from __future__ import annotations

from magnitude_engine.inprocess.engine import MagnitudeEngine, find_model

__all__ = ["MagnitudeEngine", "find_model"]

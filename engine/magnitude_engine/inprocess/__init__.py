"""The engine inside the caller's own process, in the published client's terms; torch is loaded at `warmup`."""

from __future__ import annotations

from magnitude_engine.inprocess.branches import Branch, Branches
from magnitude_engine.inprocess.engine import MagnitudeEngine
from magnitude_engine.inprocess.start import find_model

__all__ = ["Branch", "Branches", "MagnitudeEngine", "find_model"]

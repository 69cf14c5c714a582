"""The in-process engine. Importing this package loads neither torch nor a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magnitude_engine.config import AgentConfig
    from magnitude_engine.inprocess import MagnitudeEngine

__all__ = ["AgentConfig", "MagnitudeEngine"]


def __getattr__(name: str) -> Any:
    if name == "AgentConfig":
        from magnitude_engine.config import AgentConfig

        return AgentConfig
    if name == "MagnitudeEngine":
        from magnitude_engine.inprocess import MagnitudeEngine

        return MagnitudeEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The inference worker and the published client. Importing this package loads neither torch nor the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magnitude_engine.client import MagnitudeClient
    from magnitude_engine.config import AgentRuntimeConfig

__all__ = ["AgentRuntimeConfig", "MagnitudeClient"]


def __getattr__(name: str) -> Any:
    if name == "MagnitudeClient":
        from magnitude_engine.client import MagnitudeClient

        return MagnitudeClient
    if name == "AgentRuntimeConfig":
        from magnitude_engine.config import AgentRuntimeConfig

        return AgentRuntimeConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

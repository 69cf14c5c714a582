"""What a server says about itself, and where that differs from what a program expects."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from magnitude_engine.config import AgentRuntimeConfig


class RuntimeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says about itself.

    Attributes:
        status: `ok`, or `degraded` when it serves with something missing (see `warnings`).
        model: the name of the model it serves.
        draft: the draft model in use, if any.
        speculation: whether drafts are verified at all.
        cache, store: state of the key-value cache and of the session store.
        warnings: what differs from the client's config, or is degraded, in plain words.
    """

    status: str
    model: str | None = None
    draft: str | None = None
    speculation: bool = False
    cache: str | None = None
    store: str | None = None
    warnings: tuple[str, ...] = ()


def other_model(wanted: str, served: Sequence[str]) -> str:
    """Returns the warning that `wanted` is not among the `served` models."""
    return f"the server does not list the model {wanted!r}; {served[0]!r} answers instead"


def differences(config: AgentRuntimeConfig, served: Sequence[str], health: RuntimeHealth) -> tuple[str, ...]:
    """Returns what the server does otherwise than `config` expects."""
    found = []
    if served and config.target_model_path is not None and config.target_model_path not in served:
        found.append(other_model(config.target_model_path, served))
    if config.draft_model_path is not None and config.draft_model_path != health.draft:
        present = "no draft model" if health.draft is None else f"the draft model {health.draft!r}"
        found.append(f"the server uses {present}, not {config.draft_model_path!r}; answers are the same, speed differs")
    if config.speculative_decoding_enabled and not health.speculation:
        found.append("the server does not speculate; answers are the same, speed differs")
    return tuple(found)

"""Settings with API keys."""

from __future__ import annotations

import hashlib

import msgspec

from magnitude_proxy.config import KeyConfig, ProxyConfig


def keyed(config: ProxyConfig, *tenants: str) -> ProxyConfig:
    """Returns settings with one key per tenant, its name with `key-` before it."""
    keys = [KeyConfig(sha256=hashlib.sha256(f"key-{name}".encode()).hexdigest(), tenant=name) for name in tenants]
    return msgspec.structs.replace(config, keys=tuple(keys))

"""Who may use the proxy: API keys, tenants and their salts, and the names a loopback server answers to."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import KeyConfig

OPEN_TENANT = "default"
SECRET_BYTES = 32
_HEX = re.compile("[0-9a-f]{64}")
# Clients send the same few names with every request.
_REMEMBERED = 256


class Tenant(NamedTuple):
    """Whom a key stands for; `salt` (hex) keeps sessions and cache entries of tenants apart."""

    name: str
    salt: str


class KeyRing:
    """Maps presented keys to tenants. Without configured keys every key, and none, is the one open tenant."""

    def __init__(self, keys: Sequence[KeyConfig], secret: bytes) -> None:
        self._tenants = tuple((key.sha256, Tenant(key.tenant, salt(secret, key.tenant))) for key in keys)
        self._open = Tenant(OPEN_TENANT, salt(secret, OPEN_TENANT))

    @property
    def required(self) -> bool:
        """True when a request needs a key."""
        return bool(self._tenants)

    def tenant(self, key: str | None) -> Tenant | None:
        """Returns the tenant of `key`, None for an unknown one; compares with all keys in constant time."""
        if not self._tenants:
            return self._open
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).hexdigest()
        found: Tenant | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if key else None


def salt(secret: bytes, tenant: str) -> str:
    """Returns the hex HMAC-SHA256 of the tenant's name under the server's secret."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()


def parse_key_file(text: str, name: str) -> tuple[KeyConfig, ...]:
    """Returns the keys of a key file: `sk-… TENANT` or `sha256:HEX TENANT` a line, `#` starts a comment.

    Raises:
        ConfigError: names the line, never the key.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{name}, line {number}: must be a key and a tenant, separated by a space", param="keys")
        key, tenant = words
        digest = key.removeprefix("sha256:") if key.startswith("sha256:") else hashlib.sha256(key.encode()).hexdigest()
        if not _HEX.fullmatch(digest):
            raise ConfigError(f"{name}, line {number}: sha256: must be followed by 64 hex digits", param="keys")
        if len(tenant) > 128:
            raise ConfigError(f"{name}, line {number}: the tenant is longer than 128 characters", param="keys")
        keys.append(KeyConfig(sha256=digest, tenant=tenant))
    if not keys:
        raise ConfigError(f"{name}: holds no key; write one `KEY TENANT` a line", param="keys")
    return tuple(keys)


def server_secret(data_dir: Path) -> bytes:
    """Returns the server's secret, made on the first call and kept in `secret` (mode 0600) of the data folder.

    Raises:
        ConfigError: the folder cannot be written, or the file is not a secret.
    """
    path = data_dir / "secret"
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _create(path)
        found = bytes.fromhex(path.read_text("ascii").strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be used as server secret: {error}", param="data_dir") from error
    if len(found) != SECRET_BYTES:
        raise ConfigError(f"{path}: is not a server secret; delete it to have a new one made", param="data_dir")
    return found


def _create(path: Path) -> None:
    """Writes a new secret; of several processes that try at once one wins and no reader sees half a file."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


@functools.lru_cache(_REMEMBERED)
def is_loopback(host: str) -> bool:
    """True for `localhost`, names under it and loopback addresses."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@functools.lru_cache(_REMEMBERED)
def host_is_local(header: str | None) -> bool:
    """True when a Host header names this machine's loopback; anything else may be a rebound DNS name."""
    if header is None:
        return True
    return is_loopback(urlsplit(f"//{header}").hostname or "") if _plain(header) else False


def origin_is_local(header: str | None) -> bool:
    """True when a request has no Origin, or one on loopback; a web page from elsewhere has another."""
    if header is None:
        return True
    if not _plain(header):
        return False
    parts = urlsplit(header)
    return parts.scheme in ("http", "https") and is_loopback(parts.hostname or "")


def _plain(header: str) -> bool:
    """True when urlsplit can take the header without raising."""
    try:
        return urlsplit(header if "//" in header else f"//{header}").hostname is not None
    except ValueError:
        return False

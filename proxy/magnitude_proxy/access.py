"""Who may use the proxy: API keys and what they may do, tenants' salts, names that a loopback server answers to."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import NO_LIMITS, KeyConfig, Limits

OPEN_TENANT = "default"
SECRET_BYTES = 32
# Clients send the same few names with every request.
_REMEMBERED = 256


class Tenant(NamedTuple):
    """Whom a key stands for; `salt` (hex) keeps sessions and cache entries of tenants apart."""

    name: str
    salt: str


@dataclass(frozen=True, slots=True)
class Key:
    """What a request may do by the key that it came with.

    Attributes:
        id: 16 hex digits that tell nothing of the key; what is counted per key is counted under it.
        name: for people; empty where the configuration gives none.
        admin: it opens the second listener.
        upstream, limits: see `KeyConfig`; the limits are those in force, with the server's where the key has none.
    """

    id: str
    tenant: Tenant
    name: str = ""
    admin: bool = True
    upstream: str | None = None
    limits: Limits = NO_LIMITS


class KeyRing:
    """Maps presented keys to what they may do. Without keys every key, and none, is the one open tenant's."""

    def __init__(self, keys: Sequence[KeyConfig], secret: bytes, limits: Limits = NO_LIMITS) -> None:
        """`limits` are of keys that set none."""
        self._secret = secret
        self._limits = limits
        self._keys: tuple[tuple[str, Key], ...] = ()
        self._open = Key(OPEN_TENANT, Tenant(OPEN_TENANT, salt(secret, OPEN_TENANT)), limits=limits)
        self.replace(keys)

    @property
    def required(self) -> bool:
        """True when a request needs a key."""
        return bool(self._keys)

    @property
    def tenants(self) -> int:
        """How many tenants there are."""
        return len({key.tenant for _, key in self._keys}) or 1

    def replace(self, keys: Sequence[KeyConfig]) -> None:
        """Takes `keys` instead of the present ones; requests that are under way go on."""
        alone = len({key.tenant for key in keys}) == 1
        self._keys = tuple((key.sha256, self._key(key, alone)) for key in keys)

    def find(self, presented: str | None) -> Key | None:
        """Returns what `presented` may do, None for an unknown key; compares with all keys in constant time."""
        if not self._keys:
            return self._open
        digest = hashlib.sha256((presented or "").encode("utf-8", "surrogateescape")).hexdigest()
        found: Key | None = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        return found if presented else None

    def _key(self, key: KeyConfig, alone: bool) -> Key:
        return Key(
            id=hmac.new(self._secret, f"key {key.sha256}".encode(), hashlib.sha256).hexdigest()[:16],
            tenant=Tenant(key.tenant, salt(self._secret, key.tenant)),
            name=key.name,
            admin=key.admin or alone,
            upstream=key.upstream,
            limits=overridden(self._limits, key.limits),
        )


def overridden(server: Limits, key: Limits) -> Limits:
    """Returns the limits of a key: its own, and the server's where it has none."""
    own = {name: value for name, value in msgspec.structs.asdict(key).items() if value is not None}
    return msgspec.structs.replace(server, **own)


def salt(secret: bytes, tenant: str) -> str:
    """Returns the hex HMAC-SHA256 of the tenant's name under the server's secret."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()


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

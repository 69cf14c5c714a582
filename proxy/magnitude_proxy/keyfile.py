"""API keys as a file holds them, and new ones.

    # comment
    sha256:HEX TENANT [name=NAME] [upstream=NAME] [admin=true] [LIMIT=VALUE …]

One key a line; the LIMITs are the fields of `config.Limits`. Instead of the hash a line may hold the key itself. No
error ever shows a key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import KeyConfig, Limits, UpstreamConfig

FLAG = "--key-file"
PREFIX = "sk-magnitude-"
SECRET_BYTES = 32
MAX_BYTES = 8 * 1024 * 1024
_HASH = "sha256:"
_HEX = re.compile("[0-9a-f]{64}")
_LIMITS = tuple(field.name for field in msgspec.structs.fields(Limits))
_OPTIONS = ("name", "upstream", "admin", *_LIMITS)
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


class NewKey(NamedTuple):
    """A key that nobody keeps, and the line that knows it by its hash."""

    key: str
    line: str


def new_key(tenant: str, options: Sequence[str]) -> NewKey:
    """Returns a key of 256 random bits for `tenant`; `options` are words `NAME=VALUE` of its line.

    Raises:
        ConfigError: the tenant or an option could not stand in a key file.
    """
    key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return NewKey(key, hashed_line(key, tenant, options))


def hashed_line(key: str, tenant: str, options: Sequence[str]) -> str:
    """Returns the line that knows `key` by its hash; raises ConfigError."""
    words = [_HASH + hashlib.sha256(key.encode()).hexdigest(), tenant, *options]
    for word in words:
        if not word or len(word.split()) != 1:
            raise ConfigError(f"{word!r} must be one word without spaces", param="keys")
    _read_line(words, "the new key")
    return " ".join(words)


def parse_key_file(text: str, name: str) -> tuple[KeyConfig, ...]:
    """Returns the keys of a key file's text.

    Raises:
        ConfigError: names the line and what is wrong with it, never the key.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_read_line(words, f"{name}, line {number}"))
    if not keys:
        raise ConfigError(f"{name}: holds no key; `magnitude keys new --tenant TENANT` makes one", param="keys")
    return tuple(keys)


def read_key_file(name: str) -> tuple[KeyConfig, ...]:
    """Returns the keys of the file `name`; raises ConfigError."""
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{FLAG} {name}: is larger than {MAX_BYTES} bytes, which is no key file", param="keys")
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{FLAG} {name}: cannot be read as text: {reason}", param="keys") from error
    return parse_key_file(text, name)


def configured_keys(
    inline: Sequence[KeyConfig], file: str | None, upstreams: Sequence[UpstreamConfig]
) -> tuple[KeyConfig, ...]:
    """Returns all keys: those of the settings and those of the key file.

    Raises:
        ConfigError: the file cannot be used, a key or a name stands twice, or a key names an unknown upstream.
    """
    keys = (*inline, *(() if file is None else read_key_file(file)))
    known = {upstream.name for upstream in upstreams}
    hashes: set[str] = set()
    names: set[str] = set()
    for place, key in enumerate(keys, 1):
        who = f"key {key.name!r}" if key.name else f"key number {place}"
        if key.sha256 in hashes:
            raise ConfigError(f"{who}: the same key stands twice; remove one of the two", param="keys.sha256")
        if key.name and key.name in names:
            raise ConfigError(f"{who}: two keys have this name; rename one", param="keys.name")
        if key.upstream is not None and key.upstream not in known:
            configured = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"{who}: upstream {key.upstream!r} is not configured; configured: {configured}", param="keys.upstream"
            )
        hashes.add(key.sha256)
        names.add(key.name)
    return keys


def _read_line(words: Sequence[str], place: str) -> KeyConfig:
    """Returns the key of a line's words; `place` says where it stands."""
    if len(words) < 2:
        raise ConfigError(f"{place}: must be a key and a tenant, separated by a space", param="keys")
    key, tenant, *options = words
    digest = key.removeprefix(_HASH) if key.startswith(_HASH) else hashlib.sha256(key.encode()).hexdigest()
    if not _HEX.fullmatch(digest):
        raise ConfigError(f"{place}: {_HASH} must be followed by 64 hex digits", param="keys.sha256")
    if len(tenant) > 128:
        raise ConfigError(f"{place}: the tenant is longer than 128 characters", param="keys.tenant")
    given: dict[str, str] = {}
    for word in options:
        name, separator, value = word.partition("=")
        if not separator or name not in _OPTIONS:
            # What stands here may be a key, misplaced.
            told = f" {name}" if separator and _PLAIN.fullmatch(name) and len(name) <= 32 else ""
            raise ConfigError(
                f"{place}: unknown option{told}; after key and tenant may stand {', '.join(_OPTIONS)}, each as "
                "NAME=VALUE",
                param="keys",
            )
        if name in given:
            raise ConfigError(f"{place}: {name} stands twice; keep one", param=f"keys.{name}")
        given[name] = value
    limits = {name: given.pop(name) for name in _LIMITS if name in given}
    return _convert({"sha256": digest, "tenant": tenant, **given, "limits": limits}, place)


def _convert(fields: dict[str, object], place: str) -> KeyConfig:
    try:
        return msgspec.convert(fields, KeyConfig, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").rpartition(".")[2]
        raise ConfigError(f"{place}: {name} {_allowed(name, problem)}", param=f"keys.{name}") from error


def _allowed(name: str, problem: str) -> str:
    """Returns what an option takes."""
    if name == "admin":
        return "must be true or false"
    if name in ("name", "upstream"):
        return "must be at most 64 letters, digits, dots, dashes or underscores"
    if name == "max_seconds":
        return "must be a number above 0"
    return "must be a whole number of at least 1" if name in _LIMITS else f"is wrong: {problem}"

"""An upstream as a flag or the environment writes it."""

from __future__ import annotations

import typing
from typing import Any

from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import UpstreamKind


def read_upstream(text: str) -> dict[str, Any]:
    """Returns the table of `[NAME=][KIND+]URL`; without a name it is the URL's host and port.

    Raises:
        ConfigError: what is no such URL.
    """
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = "", text
    kind, plus, rest = url.partition("+")
    kinds = typing.get_args(UpstreamKind)
    given: dict[str, Any] = {}
    if plus and kind in kinds:
        given, url = {"kind": kind}, rest
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--upstream {text!r}: must be URL, NAME=URL or NAME=KIND+URL with http:// or https://, for example "
            f"http://127.0.0.1:8001/v1; kinds: {', '.join(kinds)}",
            param="upstreams",
        )
    authority = url.split("://", 1)[1].split("/", 1)[0].rpartition("@")[2]
    return {"name": name or authority.replace(":", "-").strip("[]"), "url": url.rstrip("/"), **given}

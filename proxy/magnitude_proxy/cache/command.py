"""Asks the second listener of a running server what its worker's cache holds."""

from __future__ import annotations

import httpx
import msgspec

from magnitude_engine import api
from magnitude_engine.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionFailed,
    MagnitudeError,
    NotReady,
    RequestTimeout,
    StatusError,
)
from magnitude_proxy.errors import ErrorBody, ErrorDetail

# Longer than the server itself waits for its worker, so that the server's own words arrive.
ANSWER_S = 15.0
WHERE = "say with --admin-url where the second listener of `magnitude serve` is (by default its port is --port + 1)"


def fetch(url: str, key: str | None) -> api.CacheReport:
    """Returns the report of the server whose second listener is `url`; `key` is an API key, where it needs one.

    Raises:
        ConfigError: `url` or `key` cannot be used, or what answers there is no second listener.
        ConnectionFailed, RequestTimeout: nothing answers there, or not in time.
        AuthenticationFailed: the key is missing or refused.
        NotReady: the server has no local worker, or the worker is away.
        StatusError: any other refusal.
    """
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("MAGNITUDE_API_KEY holds more than printable ASCII: set it to the bare key", param="api-key")
    headers = {} if not key else {"Authorization": f"Bearer {key}"}
    # Plain HTTP needs no certificates, and to load them takes longer than to ask.
    secure = not url.startswith("http://")
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/cache", headers=headers, timeout=ANSWER_S, trust_env=False, verify=secure
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise ConfigError(f"--admin-url {url!r} is not http://HOST:PORT: {error}", param="admin-url") from error
    except httpx.TimeoutException as error:
        raise RequestTimeout(f"the server at {url} did not answer within {ANSWER_S:g} s; try again") from error
    except httpx.TransportError as error:
        raise ConnectionFailed(f"no server answers at {url} ({error}): start one, or {WHERE}") from error
    if answer.status_code != 200:
        raise _refusal(url, answer)
    try:
        return msgspec.json.decode(answer.content, type=api.CacheReport)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"what answers at {url} is not a Magnitude server of this release ({error}): {WHERE}"
        ) from error


def _refusal(url: str, answer: httpx.Response) -> MagnitudeError:
    """Returns the error for an answer that is no report, in the server's own words where it has some."""
    status = answer.status_code
    try:
        detail = msgspec.json.decode(answer.content, type=ErrorBody).error
    except msgspec.DecodeError:
        detail = ErrorDetail(message=answer.reason_phrase, type="")
    if status in (401, 403):
        return AuthenticationFailed(
            f"the server at {url} refuses: {detail.message}; put a key it knows into MAGNITUDE_API_KEY"
        )
    if status == 503 or detail.code == "no_worker":
        return NotReady(f"the server at {url} has nothing to show: {detail.message}")
    if status == 404:
        return ConfigError(f"what answers at {url} has no /cache: {WHERE}", param="admin-url")
    return StatusError(
        f"the server at {url} answers {status}: {detail.message}",
        status=status,
        error_code=detail.code,
        param=detail.param,
        request_id=answer.headers.get("x-request-id"),
    )

"""What can go wrong with an upstream, as the failure that the dispatcher and the client see."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import aiohttp

from magnitude_engine import api
from magnitude_proxy.routing import policy
from magnitude_proxy.upstream.wire import WireError

MESSAGE_LIMIT = 2000
LONGEST_PAUSE_S = 3600.0


class Trouble(Exception):
    """Ends an exchange with an upstream; raised and caught inside the route only.

    `connection` says that the server was away, so that another one may stand there next.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        final: bool = False,
        error: WireError | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self._code = code
        self._message = message
        self._final = final
        self._error = error or WireError()
        self._retry_after_s = retry_after_s
        self.connection = code in ("upstream_unreachable", "upstream_disconnected")

    def failed(self, request: api.Generate) -> api.Failed:
        """Returns the failure of `request`."""
        code = self._error.code
        return api.Failed(
            request=request.request,
            epoch=request.epoch,
            code=self._code,
            message=self._message,
            param=self._error.param,
            retryable=not self._final,
            retry_after_s=self._retry_after_s,
            upstream_code=None if code is None else str(code),
        )


def status_trouble(name: str, status: int, error: WireError, pause_s: float | None) -> Trouble:
    """Returns the trouble of an HTTP status; only refusals of the request itself pass the server's words on."""
    code = policy.status_code(status)
    if status in policy.UPSTREAM_FINAL:
        message = error.message[:MESSAGE_LIMIT] or f"upstream {name} refused the request with HTTP {status}"
        return Trouble(code, message, final=True, error=error)
    if 300 <= status < 400:
        advice = "; redirects are not followed, set its url to the final address"
    elif status in (401, 403):
        advice = "; check its key_file"
    elif policy.operators_fault(status):
        advice = "; check its url"
    else:
        advice = ""
    return Trouble(code, f"upstream {name} answered HTTP {status}{advice}", retry_after_s=pause_s)


def connection_trouble(name: str, error: Exception, limit: str, *, begun: bool = False) -> Trouble:
    """Returns the trouble of a failed connection.

    `limit` says which time limit a plain TimeoutError stands for; `begun` says that the answer had begun.
    Addresses and certificates stay out of the message; the operator finds them in the configuration.
    """
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Trouble("upstream_unreachable", f"upstream {name} cannot be reached: no connection in time (connect_s)")
    if isinstance(error, TimeoutError):
        return Trouble("upstream_timeout", f"upstream {name} gave {limit}")
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return Trouble("upstream_unreachable", f"upstream {name} cannot be reached: TLS failed")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Trouble("upstream_unreachable", f"upstream {name} cannot be reached: its host name is not known")
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio puts the address into strerror; the number has the plain words.
        reason = os.strerror(error.os_error.errno) if error.os_error.errno else "no connection"
        return Trouble("upstream_unreachable", f"upstream {name} cannot be reached: {reason}; is it running?")
    if begun:
        return Trouble("upstream_stream_broken", f"upstream {name} broke off in the middle of its answer")
    if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
        return Trouble("upstream_disconnected", f"upstream {name} closed the connection before it answered")
    return Trouble("upstream_stream_broken", f"upstream {name} did not answer in valid HTTP")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns the pause that a response asks for, at most an hour.

    `Retry-After` in seconds, or as a date measured against the response's own `Date` so that clocks need not
    agree; OpenAI's `retry-after-ms` before both.
    """
    seconds = _number(headers.get("retry-after-ms"), 0.001)
    value = headers.get("Retry-After")
    if seconds is None:
        seconds = _number(value, 1.0)
    if seconds is None and value is not None:
        try:
            seconds = (parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds()
        except (ValueError, TypeError):
            return None
    return None if seconds is None else min(max(seconds, 0.0), LONGEST_PAUSE_S)


def _number(value: str | None, unit: float) -> float | None:
    try:
        number = float(value) * unit if value is not None else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None

"""HTTP as the published client needs it: retries, server-sent events, and every failure as a typed error.

Retries follow the openai SDK: a connection that fails, 408, 409, 429 and 5xx are tried again with exponential
back-off; `Retry-After`, `retry-after-ms` and `x-should-retry` of the server win. An answer whose headers
arrived is never asked for twice, and neither is one that did not come in time: the server still works on it.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from math import isfinite
from typing import Self, TypeVar

import httpx
import msgspec

from magnitude_engine.errors import (
    AuthenticationFailed,
    ClientError,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    SessionLimitExceeded,
    StatusError,
    StreamBroken,
)

CONNECT_S = 5.0
FIRST_DELAY_S = 0.5
LAST_DELAY_S = 8.0
LONGEST_RETRY_AFTER_S = 120.0
NDJSON = "application/x-ndjson"
MAX_EVENT_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")


def base_url(endpoint: str) -> httpx.URL:
    """Returns `endpoint` without a trailing slash; one without a path gets `/v1`.

    Raises:
        ConfigError: not an http or https URL with a host.
    """
    if not isinstance(endpoint, str):
        raise ConfigError(f"endpoint must be a URL as text, not {type(endpoint).__name__}", param="endpoint")
    try:
        url = httpx.URL(endpoint.strip())
    except httpx.InvalidURL as problem:
        raise ConfigError(f"endpoint {endpoint!r} is not a URL ({problem})", param="endpoint") from problem
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(
            f"endpoint must be an http or https URL such as http://localhost:8000/v1, not {endpoint!r}",
            param="endpoint",
        )
    return url.copy_with(path=url.path.rstrip("/") or "/v1")


def is_loopback(host: str) -> bool:
    """True for localhost and the loopback addresses."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Returns the seconds a server asks to wait, if it does; `now` is Unix time for the date form."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
    try:
        return parsedate_to_datetime(headers["retry-after"]).timestamp() - now
    except (KeyError, ValueError, OverflowError):
        return None


def backoff(attempt: int, jitter: float) -> float:
    """Returns the seconds before attempt `attempt` + 1; `jitter` in 0..1 takes off up to a quarter."""
    return min(FIRST_DELAY_S * 2.0 ** min(attempt, 16), LAST_DELAY_S) * (1 - 0.25 * jitter)


def retry_delay(status: int, headers: Mapping[str, str], attempt: int, jitter: float, now: float) -> float | None:
    """Returns the seconds to wait before asking again after an HTTP error, None when it is final."""
    wait = retry_after(headers, now)
    if wait is not None and isfinite(wait) and wait > LONGEST_RETRY_AFTER_S:
        return None
    told = headers.get("x-should-retry")
    transient = status in (408, 409, 429) or status >= 500
    if told == "false" or (told != "true" and not transient):
        return None
    if wait is not None and 0 < wait <= LONGEST_RETRY_AFTER_S:
        return wait
    return backoff(attempt, jitter)


class _Detail(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Detail | str


def error_detail(body: bytes) -> _Detail:
    """Returns what an OpenAI error body says; other bodies give their beginning as the message."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        text = body[:200].decode("utf-8", "replace").strip()
        return _Detail(message=text or "no error body")
    return error if isinstance(error, _Detail) else _Detail(message=error)


def status_failure(response: httpx.Response) -> ClientError:
    """Returns the error for a read response that is not a success."""
    request, status = response.request, response.status_code
    detail = error_detail(response.content)
    message = f"{request.method} {request.url} answered {status}: {detail.message}"
    if status in (401, 403):
        return AuthenticationFailed(f"{message} (pass api_key= or set MAGNITUDE_API_KEY to a key this server knows)")
    if 300 <= status < 400:
        target = response.headers.get("location", "nowhere")
        message = f"{request.method} {request.url} redirects to {target}: set the endpoint to the final address"
    elif status == 404 and detail.code is None:
        message += " (does the endpoint end in the API's path, for example /v1?)"
    kind = SessionLimitExceeded if detail.code == SessionLimitExceeded.code else StatusError
    return kind(
        message,
        status=status,
        error_code=None if detail.code is None else str(detail.code),
        param=detail.param,
        request_id=response.headers.get("x-request-id"),
    )


def transport_failure(problem: httpx.RequestError, method: str, url: httpx.URL, timeout: float) -> ClientError:
    """Returns the error for a request that got no response."""
    if isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout):
        cause = str(problem) or f"no connection within {min(timeout, CONNECT_S):g} s"
        return ConnectionFailed(
            f"cannot reach {url}: {cause}. Start the server (magnitude serve), "
            "or pass endpoint= or set MAGNITUDE_ENDPOINT to where it runs"
        )
    if isinstance(problem, httpx.TimeoutException):
        return RequestTimeout(f"{method} {url}: nothing came for {timeout:g} s; pass a larger timeout= to wait longer")
    cause = str(problem) or type(problem).__name__
    return ConnectionFailed(f"{method} {url}: the connection broke before the answer was complete ({cause})")


def stream_failure(problem: httpx.RequestError, url: httpx.URL, timeout: float) -> ClientError:
    """Returns the error for a stream that broke after its headers."""
    if isinstance(problem, httpx.TimeoutException):
        return RequestTimeout(
            f"stream from {url}: nothing came for {timeout:g} s; pass a larger timeout= to wait longer"
        )
    cause = str(problem) or type(problem).__name__
    return StreamBroken(f"stream from {url} broke before its end ({cause}); the text so far is not a complete answer")


def decode(response: httpx.Response, shape: type[_T], body: bytes | None = None) -> _T:
    """Returns a response's body, or this part of it, as `shape`; raises StatusError for anything else."""
    try:
        return msgspec.json.decode(response.content if body is None else body, type=shape)
    except msgspec.DecodeError as problem:
        raise StatusError(
            f"{response.request.url} answered something else than this client expects ({problem}): "
            "is the endpoint a Magnitude server's base URL?",
            status=response.status_code,
            error_code=None,
            param=None,
            request_id=response.headers.get("x-request-id"),
        ) from problem


class SseDecoder:
    """Splits the bytes of a `text/event-stream` into the data of its events, whatever the chunks' borders."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the data of every event that `chunk` completes.

        Raises:
            StreamBroken: an event is larger than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamBroken(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class EventStream:
    """The data of each event of a response, as an asynchronous iterator that ends where the connection ends.

    A class and not a generator: a generator around httpx's own would be closed at the same time as those when the
    event loop shuts down, and Python would complain.
    """

    def __init__(self, response: httpx.Response, timeout: float) -> None:
        self._response = response
        self._timeout = timeout
        self._chunks = response.aiter_bytes()
        self._decoder = SseDecoder()
        self._ready: deque[bytes] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Raises StreamBroken or RequestTimeout where the stream fails."""
        try:
            while not self._ready:
                self._ready.extend(self._decoder.feed(await anext(self._chunks)))
        except httpx.RequestError as problem:
            raise stream_failure(problem, self._response.request.url, self._timeout) from problem
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Closes the connection, which tells the server to stop."""
        await self._response.aclose()


async def _close_with_loop(http: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    """Closes `http` when the event loop shuts its asynchronous generators down, or when this is collected.

    A program that never closes its client would otherwise leave open sockets to a closed loop, and Python would
    warn about them at exit.
    """
    try:
        yield
    finally:
        await http.aclose()


class Transport:
    """Connections to one endpoint; use it in one event loop, close it with `aclose`."""

    def __init__(self, base: httpx.URL, api_key: str | None, timeout: float, max_retries: int) -> None:
        self.base = base
        self._timeout = timeout
        self._max_retries = max_retries
        headers = {"Accept": "application/json", "User-Agent": "magnitude-runtime"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_S)),
            # A sidecar on this host must not be looked for behind the environment's HTTP proxy.
            trust_env=not is_loopback(base.host),
            # Reading the certificates takes 20 ms and more: only where they are used.
            verify=True if base.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            limits=httpx.Limits(max_connections=1000, max_keepalive_connections=100),
        )
        self._guard: AsyncGenerator[None, None] | None = None

    def url(self, path: str) -> httpx.URL:
        """Returns the address of `path` under the endpoint."""
        return self.base.copy_with(path=self.base.path.rstrip("/") + path)

    async def request(self, method: str, url: httpx.URL, body: bytes | None = None) -> httpx.Response:
        """Returns a read 2xx response.

        Raises:
            ClientError: ConnectionFailed, RequestTimeout, AuthenticationFailed or StatusError, after the retries.
        """
        return await self._attempts(method, url, body, stream=False)

    async def stream(self, url: httpx.URL, body: bytes) -> tuple[httpx.Response, EventStream]:
        """Returns a 2xx response and its events, still to be read; raises as `request` does."""
        response = await self._attempts("POST", url, body, stream=True)
        return response, EventStream(response, self._timeout)

    async def upload(self, url: httpx.URL, lines: AsyncGenerator[bytes, None]) -> httpx.Response:
        """Sends lines of JSON as they come and returns the read 2xx response; nothing is sent twice.

        Raises:
            ClientError: as `request` does.
        """
        await self._guarded()
        try:
            response = await self._http.post(url, content=lines, headers={"Content-Type": NDJSON})
        except httpx.RequestError as problem:
            raise transport_failure(problem, "POST", url, self._timeout) from problem
        if not response.is_success:
            raise status_failure(response)
        return response

    async def aclose(self) -> None:
        """Closes all connections; may be called more than once."""
        if self._guard is not None:
            await self._guard.aclose()
        await self._http.aclose()

    async def _guarded(self) -> None:
        if self._guard is None:
            self._guard = _close_with_loop(self._http)
            await anext(self._guard)

    async def _attempts(self, method: str, url: httpx.URL, body: bytes | None, *, stream: bool) -> httpx.Response:
        await self._guarded()
        attempt = 0
        while True:
            delay: float | None = backoff(attempt, random.random())
            cause: httpx.RequestError | None = None
            try:
                response = await self._once(method, url, body, stream)
            except httpx.RequestError as problem:
                cause, failure = problem, transport_failure(problem, method, url, self._timeout)
                if isinstance(failure, RequestTimeout):
                    delay = None
            else:
                if response.is_success:
                    return response
                failure = status_failure(response)
                delay = retry_delay(response.status_code, response.headers, attempt, random.random(), time.time())
            if delay is None or attempt >= self._max_retries:
                raise failure from cause
            await asyncio.sleep(delay)
            attempt += 1

    async def _once(self, method: str, url: httpx.URL, body: bytes | None, stream: bool) -> httpx.Response:
        """Returns the response of one attempt; read, unless it is a successful stream."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = self._http.build_request(method, url, content=body, headers=headers)
        response = await self._http.send(request, stream=True)
        if not (stream and response.is_success):
            try:
                await response.aread()
            finally:
                await response.aclose()
        return response

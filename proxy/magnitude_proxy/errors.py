"""Every error a client of the proxy can see, in OpenAI's form, and how other failures map to it.

ProxyError                    status, type, code, message, param → {"error": {...}}
├── BadRequest           400  a field is wrong; `param` names it
├── Unauthorized         401  no key, or one that is not known
├── Forbidden            403  a Host or Origin that a loopback server does not answer
├── NotFound             404  no such route, model or session
├── RequestTimeout       408  the body did not arrive in time
├── Conflict             409  what is asked for has ended, such as a branch that was pruned
├── BodyTooLarge         413  the body exceeds the configured limit
├── HttpRefused          4xx  the HTTP server's own refusal, such as 405
├── TooManyRequests      429  the queue is full or a limit is reached; Retry-After
│   ├── SessionLimitExceeded  the session has used up what it may; trying again is of no use
│   └── RateLimited           the key has used up what it may for now; Retry-After
├── UpstreamError        4xx  passed on from an upstream: its status, type, code and message
├── Unavailable          503  nothing can answer; says what was tried
└── DeadlineExceeded     504  nothing answered in time
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from magnitude_engine import api


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The object under `error` in OpenAI's error body."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error body."""

    error: ErrorDetail


class ProxyError(Exception):
    """Base of all; `headers` are added to the response."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.headers = headers or {}

    @property
    def http_status(self) -> int:
        """The response's status."""
        return self.status

    def body(self) -> ErrorBody:
        """Returns the JSON body."""
        return ErrorBody(error=ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code))


class BadRequest(ProxyError):
    """A field is wrong; `param` names it."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class Unauthorized(ProxyError):
    """No key, or one that is not known."""

    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class Forbidden(ProxyError):
    """A Host or Origin that a loopback server does not answer."""

    status = 403
    type = "invalid_request_error"
    default_code = "forbidden"


class NotFound(ProxyError):
    """No such route, model or session."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class RequestTimeout(ProxyError):
    """The body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class Conflict(ProxyError):
    """What is asked for has ended."""

    status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class HttpRefused(ProxyError):
    """The HTTP server's own refusal, such as a wrong method."""

    type = "invalid_request_error"
    default_code = "invalid_request"

    def __init__(self, message: str, *, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, headers=headers)
        self._status = status

    @property
    def http_status(self) -> int:
        """The server's status."""
        return self._status


class BodyTooLarge(ProxyError):
    """The body exceeds the configured limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class TooManyRequests(ProxyError):
    """The queue is full or a limit is reached."""

    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"


class SessionLimitExceeded(TooManyRequests):
    """The session has used up what it may; `param` is the limit. SDKs obey the header and do not try on."""

    default_code = "session_limit_exceeded"

    def __init__(self, message: str, *, param: str, headers: dict[str, str]) -> None:
        super().__init__(message, param=param, headers={**headers, "x-should-retry": "false"})


class RateLimited(TooManyRequests):
    """The key has used up what it may for now; `param` is the limit."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, param: str, wait_s: int, again: bool = True) -> None:
        """`again` says that waiting is worth a client's while."""
        headers = {"Retry-After": str(wait_s)} | ({} if again else {"x-should-retry": "false"})
        super().__init__(message, param=param, headers=headers)


class Unavailable(ProxyError):
    """Nothing can answer."""

    status = 503
    type = "server_error"
    default_code = "unavailable"


class DeadlineExceeded(ProxyError):
    """Nothing answered in time."""

    status = 504
    type = "server_error"
    default_code = "deadline_exceeded"


class UpstreamError(ProxyError):
    """An upstream's own refusal, passed on."""

    default_code = "upstream_error"

    def __init__(self, message: str, *, status: int, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self._status = status

    @property
    def http_status(self) -> int:
        """The upstream's status."""
        return self._status

    def body(self) -> ErrorBody:
        """Returns the JSON body with the type that fits the status."""
        kind = "invalid_request_error" if self._status < 500 and self._status != 429 else self.type
        return ErrorBody(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))


_BAD_REQUEST = ("invalid_value", "context_length_exceeded", "unsupported_feature")


def from_failed(failed: api.Failed) -> ProxyError:
    """Returns the error that tells a client about `failed`."""
    if failed.code in _BAD_REQUEST:
        return BadRequest(failed.message, param=failed.param, code=failed.code)
    if failed.code == "model_not_found":
        return NotFound(failed.message, param="model", code=failed.code)
    if failed.code == "overloaded":
        wait = max(1, round(failed.retry_after_s or 1))
        return TooManyRequests(failed.message, code=failed.code, headers={"Retry-After": str(wait)})
    if failed.code in ("deadline_exceeded", "upstream_timeout"):
        return DeadlineExceeded(failed.message, code=failed.code)
    if failed.code.startswith("upstream_http_"):
        status = int(failed.code.removeprefix("upstream_http_"))
        return UpstreamError(failed.message, status=status, code=failed.upstream_code, param=failed.param)
    if failed.code == "branch_ended":
        return Conflict(failed.message, param="branch", code=failed.code, headers={"x-should-retry": "false"})
    if failed.code == "answer_invalid":
        # The worker has tried twice; SDKs obey the header and do not try on.
        return Unavailable(failed.message, code=failed.code, headers={"x-should-retry": "false"})
    again = failed.retry_after_s
    headers = {} if again is None else {"Retry-After": str(max(1, round(again)))}
    return Unavailable(failed.message, code=failed.code, headers=headers)

"""Every error of the engine and the published client.

MagnitudeError
├── ConfigError              a setting cannot be used; names the field and the fix
├── ModelError               the model cannot be served
│   ├── ModelNotFound        no such file or name
│   ├── ModelUnsupported     a format, architecture or tokenizer the engine does not have
│   └── ModelDoesNotFit      needs more memory than there is; says both
├── RequestError             this request cannot be answered as asked (HTTP 400); names the field
│   ├── ContextTooLong       prompt and output exceed the context; says both numbers
│   ├── FeatureUnsupported   a known field the engine does not serve; another route may
│   ├── BranchLimit          more branches of a session than it may have
│   └── BranchEnded          the branch was pruned or selected
├── EngineError              the engine could not answer; the request itself was fine
│   ├── Overloaded           the queue is full (HTTP 429 with Retry-After)
│   ├── NumericFailure       the model produced non-finite numbers for this request
│   ├── GrammarFailure       a grammar was broken, or became too complex while it was followed
│   ├── AnswerInvalid        what was written, twice, breaks what no grammar enforces of its schema; names it
│   └── WorkerLost           the worker ended or stopped answering
└── ClientError              raised by MagnitudeClient
    ├── ConnectionFailed     the endpoint cannot be reached
    ├── RequestTimeout       no answer in time
    ├── NotReady             the server answers but cannot serve
    ├── AuthenticationFailed the key was refused
    ├── StatusError          any other HTTP error; carries status, code, param, request id
    │   └── SessionLimitExceeded  the session has used up what it may; `param` names the limit
    ├── StreamBroken         the stream ended without an end mark, or carried an error
    └── WrongEventLoop       the client belongs to another event loop
"""

from __future__ import annotations

from typing import ClassVar


class MagnitudeError(Exception):
    """Base of all; `message` says what was wrong, where, and what to do."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(MagnitudeError):
    """A setting cannot be used; `param` is its name."""

    code = "invalid_config"


class ModelError(MagnitudeError):
    """The model cannot be served."""

    code = "model_error"


class ModelNotFound(ModelError):
    """No such file or name."""

    code = "model_not_found"


class ModelUnsupported(ModelError):
    """A format, architecture or tokenizer the engine does not have."""

    code = "model_unsupported"


class ModelDoesNotFit(ModelError):
    """The model needs more memory than there is."""

    code = "model_does_not_fit"


class RequestError(MagnitudeError):
    """The request cannot be answered as asked; `param` is the field."""

    code = "invalid_value"


class ContextTooLong(RequestError):
    """Prompt and output exceed the context."""

    code = "context_length_exceeded"


class FeatureUnsupported(RequestError):
    """A known field that the engine does not serve."""

    code = "unsupported_feature"


class BranchLimit(RequestError):
    """More branches of a session than it may have; says all numbers."""

    code = "branch_limit_exceeded"


class BranchEnded(RequestError):
    """The branch was pruned or selected; nothing more comes of it."""

    code = "branch_ended"


class EngineError(MagnitudeError):
    """The engine could not answer a valid request."""

    code = "engine_error"


class Overloaded(EngineError):
    """The queue is full; `retry_after_s` estimates when it is not."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NumericFailure(EngineError):
    """The model produced non-finite numbers for this request."""

    code = "numeric_failure"


class GrammarFailure(EngineError):
    """A token that the grammar forbids was to be accepted, or following the grammar went over its limits."""

    code = "grammar_failure"


class AnswerInvalid(EngineError):
    """What was written breaks a keyword of its schema that no grammar enforces, or could not be checked.

    A client sees it only when a second try failed as well.
    """

    code = "answer_invalid"


class WorkerLost(EngineError):
    """The worker ended or stopped answering."""

    code = "worker_lost"


class ClientError(MagnitudeError):
    """Base of what MagnitudeClient raises."""

    code = "client_error"


class ConnectionFailed(ClientError):
    """The endpoint cannot be reached."""

    code = "connection_failed"


class RequestTimeout(ClientError):
    """No answer in time."""

    code = "timeout"


class NotReady(ClientError):
    """The server answers but cannot serve."""

    code = "not_ready"


class AuthenticationFailed(ClientError):
    """The key was refused."""

    code = "authentication_failed"


class StatusError(ClientError):
    """An HTTP error with its OpenAI error body.

    Attributes:
        status: HTTP status.
        error_code: the body's `code`, if any.
        request_id: the `x-request-id` header, if any.
    """

    code = "status_error"

    def __init__(
        self, message: str, *, status: int, error_code: str | None, param: str | None, request_id: str | None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.error_code = error_code
        self.request_id = request_id


class SessionLimitExceeded(StatusError):
    """The session has used up what it may, `param` names the limit; another session may go on."""

    code = "session_limit_exceeded"


class StreamBroken(ClientError):
    """The stream ended without an end mark, or carried an error."""

    code = "stream_broken"


class WrongEventLoop(ClientError):
    """The client was made in another event loop."""

    code = "wrong_event_loop"

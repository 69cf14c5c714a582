"""Every setting of the proxy as frozen structs, composed from small parts.

The structs say what exists, its bounds and what it means; `settings.py` reads flags, environment and one TOML
file into them. A value outside its bounds stops the start with the field's name.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from magnitude_engine.config import EngineConfig

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
WorkerMode = Literal["spawn", "attach", "none"]
UpstreamKind = Literal["openai", "vllm", "sglang", "llamacpp", "trtllm", "tgi", "dynamo", "magnitude"]

# What a worker that the proxy starts may keep on disk; an engine that somebody else starts keeps nothing unless told.
KV_DISK_MB = 4096


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every group of settings."""


class ListenConfig(Section, frozen=True, kw_only=True):
    """Where the proxy listens and how much it reads.

    Attributes:
        admin_port: second listener (metrics, administration); None means `port` + 1, 0 a free port.
        max_body_bytes: larger request bodies get 413.
        max_refused_per_minute: an address that came with more unknown keys is heard, for the rest of the minute, only
            with keys that it had used before; 0 hears everybody.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024 * 1024
    max_refused_per_minute: Annotated[int, Meta(ge=0)] = 100


class SessionLimits(Section, frozen=True, kw_only=True, omit_defaults=True):
    """What one session may use at most; None sets no limit. A request that finds a limit used up is refused.

    Attributes:
        max_iterations: answered steps.
        max_tokens: prompt and completion tokens of all its steps.
        max_seconds: seconds since its first request.
        max_repeats: how often one identical tool call may stand in its recent history.
    """

    max_iterations: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_seconds: Annotated[float, Meta(gt=0)] | None = None
    max_repeats: Annotated[int, Meta(ge=1)] | None = None


class Limits(SessionLimits, frozen=True, kw_only=True, omit_defaults=True):
    """What each session of a key, and the key itself, may use at most; None sets no limit.

    Attributes:
        requests_per_minute: requests for an answer that begin, per proxy.
        concurrent_requests: requests for an answer at once, per proxy.
        tokens_per_day: prompt and completion tokens of a UTC day, over all proxies of one store.
    """

    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None
    concurrent_requests: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_day: Annotated[int, Meta(ge=1)] | None = None


NO_LIMITS = Limits()


class KeyConfig(Section, frozen=True, kw_only=True):
    """One API key.

    Attributes:
        sha256: of the key, in hex; the key itself is kept nowhere.
        tenant: whom it stands for; keys of one tenant share sessions and cache.
        name: for people, in the log and in errors.
        upstream: the only upstream that may answer its requests; None allows all.
        admin: it opens the second listener where that is not on loopback; while all keys are one tenant's, each does.
        limits: instead of the server's, field by field.
    """

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{0,64}$")] = ""
    upstream: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")] | None = None
    admin: bool = False
    limits: Limits = Limits()


class UpstreamConfig(Section, frozen=True, kw_only=True):
    """One OpenAI-compatible server, in order of preference.

    Attributes:
        url: base URL including its version path, for example `http://host:8001/v1`.
        kind: what the server is; `auto` asks it, `openai` tells it plain OpenAI fields only.
        fields: request fields beyond its kind's that it understands; they are sent as the client wrote them.
        shared_cache: tenants may use one prefix cache where the server cannot keep them apart.
        key_file: file whose content is sent as bearer token; read once at the start.
        models: the client's model name → the upstream's; `*` stands for any other name.
        first_token_s: limit until the first content of a stream, or of a whole answer that is not streamed.
        idle_s: limit between two pieces of a stream.
    """

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
    url: Annotated[str, Meta(pattern="^https?://")]
    kind: Literal["auto", UpstreamKind] = "auto"
    fields: tuple[str, ...] = ()
    shared_cache: bool = False
    key_file: str | None = None
    models: dict[str, str] = {}
    connect_s: Seconds = 2.0
    first_token_s: Seconds = 60.0
    idle_s: Seconds = 30.0


class StoreConfig(Section, frozen=True, kw_only=True):
    """The session store.

    Attributes:
        url: redis://, rediss:// or unix:// URL; None starts the embedded server, "none" keeps sessions in memory.
        timeout_s: no request waits longer than this for the store.
        session_ttl_s: an idle session is forgotten after this long; kept responses after a day at the latest.
    """

    url: str | None = None
    timeout_s: Seconds = 0.05
    session_ttl_s: Seconds = 172_800.0


class DeadlineConfig(Section, frozen=True, kw_only=True):
    """How long the local worker may take while another route could answer instead.

    Attributes:
        progress_s: limit without a computed prefill chunk before the first content.
        first_token_s: absolute limit until the first content.
        idle_s: limit between two pieces of output.
        hold_headers_s: response headers of a stream wait for the first content this long.
        keepalive_s: an SSE comment is sent after this long without an event.
        worker_start_s: how long a request that only the worker can answer waits for one that starts again.
    """

    progress_s: Seconds = 1.0
    first_token_s: Seconds = 30.0
    idle_s: Seconds = 10.0
    hold_headers_s: Seconds = 5.0
    keepalive_s: Seconds = 10.0
    worker_start_s: Seconds = 60.0


class RetryConfig(Section, frozen=True, kw_only=True):
    """Circuit breaker and retry budget shared by all routes."""

    breaker_failures: Annotated[int, Meta(ge=1)] = 5
    breaker_open_s: Seconds = 30.0
    budget_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2
    budget_min: Annotated[int, Meta(ge=0)] = 3


class WorkerConfig(Section, frozen=True, kw_only=True):
    """The local worker.

    Attributes:
        mode: `spawn` starts and supervises one, `attach` connects to `socket`, `none` uses upstreams only.
        socket: unix socket path; None means a private one in the data folder.
        model: a known name (see `magnitude pull`), or a path.
        aliases: further names under which clients may ask for the model; `*` stands for any.
        hang_s: a worker whose step counter stands still this long while work waits is restarted.
        start_s: a spawned worker that is not ready after this long is restarted.
    """

    mode: WorkerMode = "spawn"
    socket: str | None = None
    model: str = "smollm2"
    aliases: tuple[str, ...] = ()
    hang_s: Seconds = 20.0
    start_s: Seconds = 300.0
    engine: EngineConfig | None = None


class BranchConfig(Section, frozen=True, kw_only=True):
    """Branches of sessions; `max_parallel` is how many a session may have open at a time."""

    max_parallel: Annotated[int, Meta(ge=1, le=1024)] = 8


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """Logs, and traces when an OTLP endpoint is set."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = None
    trace_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0


class ProxyConfig(Section, frozen=True, kw_only=True):
    """All settings of one proxy process.

    Attributes:
        most_urgent: the lowest priority that a client may ask for; below 0 it goes before everybody who asks for none.
        keys, key_file: API keys; those of the file come on top, and are read again when it changes.
        limits: of keys that set none of their own.
    """

    data_dir: str
    listen: ListenConfig = ListenConfig()
    keys: tuple[KeyConfig, ...] = ()
    key_file: str | None = None
    limits: Limits = Limits()
    insecure: bool = False
    most_urgent: Annotated[int, Meta(ge=-100, le=0)] = 0
    worker: WorkerConfig = WorkerConfig()
    upstreams: tuple[UpstreamConfig, ...] = ()
    store: StoreConfig = StoreConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    retry: RetryConfig = RetryConfig()
    branches: BranchConfig = BranchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

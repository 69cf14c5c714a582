"""One OpenAI-compatible server as a route: requests out, neutral events back, every trouble a typed failure.

| code of the failure       | when                                                          | another route may try |
|---------------------------|---------------------------------------------------------------|-----------------------|
| `upstream_http_STATUS`    | any status but 200; 400, 404, 413, 422 carry the server's own words | all but those four |
| `upstream_unreachable`    | no connection: refused, name, TLS, no socket within `connect_s`     | yes                |
| `upstream_disconnected`   | the connection was closed before an answer began              | yes, the same one too |
| `upstream_timeout`        | `first_token_s` or `idle_s` passed                            | yes                   |
| `upstream_stream_broken`  | cut off, not HTTP, not JSON, not UTF-8, an oversized line, an error inside a 200 | yes   |
| `upstream_empty`          | a 200 without any choice                                      | yes                   |
| `upstream_too_large`      | a whole answer over 64 MiB                                    | yes                   |
| `unsupported_feature`     | the server has no words for a field that changes the answer; nothing was sent | yes   |

An answer is complete only when every choice that was asked for has its `finish_reason`. Nothing of the client's
headers is sent on, redirects are not followed, compressed answers are not asked for and not accepted.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import msgspec

from magnitude_engine import api
from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import UpstreamConfig
from magnitude_proxy.routing import policy
from magnitude_proxy.routing.route import Step
from magnitude_proxy.sse import DONE_DATA, EventParser, OversizedEvent
from magnitude_proxy.telemetry import SPAN_ATTEMPT, Telemetry
from magnitude_proxy.upstream.adapters.plan import Refused, Sent, adapt
from magnitude_proxy.upstream.adapters.recognise import ModelList, Reply
from magnitude_proxy.upstream.adapters.server import Server
from magnitude_proxy.upstream.adapters.slots import Slots
from magnitude_proxy.upstream.adapters.tell import Facts, cache_salt
from magnitude_proxy.upstream.errors import Trouble, connection_trouble, retry_after_s, status_trouble
from magnitude_proxy.upstream.known import Known
from magnitude_proxy.upstream.wire import (
    Tally,
    WireAnswer,
    WireError,
    answer_decoder,
    choice_events,
    outgoing,
    read_error,
    read_error_body,
)

ANSWER_LIMIT = 64 * 1024 * 1024
ERROR_BODY_LIMIT = 64 * 1024
MODELS_FRESH_S = 30.0
MODELS_TIMEOUT_S = 5.0
CONNECTIONS = 1024
# aiohttp warns about larger bodies given as bytes, since it writes them in one go.
_STREAMED_BODY = 1024 * 1024
_DRAIN_S = 0.1
_ERROR_STATUS = re.compile("[45][0-9][0-9]")
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}


def make_session() -> aiohttp.ClientSession:
    """Returns the connection pool of all upstreams; call it in the running loop and close it at the end.

    No cookies, no proxies from the environment, no decompression (so no decompression bombs), no total timeout:
    each request sets its own limits and turns redirects off.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "magnitude"},
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        trust_env=False,
    )


class Upstream:
    """A route to one server; `clock` gives monotonic seconds, `several` says that it serves more than one tenant.

    Raises:
        ConfigError: the key file cannot be read or used.
    """

    def __init__(
        self,
        config: UpstreamConfig,
        session: aiohttp.ClientSession,
        telemetry: Telemetry,
        clock: Callable[[], float],
        several: bool = False,
    ) -> None:
        self._config = config
        self._session = session
        self._telemetry = telemetry
        self._clock = clock
        self._base = config.url.rstrip("/")
        self._headers = _authorization(config)
        self._timeout = aiohttp.ClientTimeout(total=None, connect=config.connect_s, sock_connect=config.connect_s)
        self._models: tuple[str, ...] = ()
        self._models_until = float("-inf")
        self._models_lock = asyncio.Lock()
        self._known = Known(config, self._ask, clock)
        self._slots = Slots()
        self._apart = several and not config.shared_cache

    @property
    def name(self) -> str:
        """The configured name."""
        return self._config.name

    def coming(self) -> bool:
        """False: nobody here can bring an upstream back."""
        return False

    def available(self) -> bool:
        """Always True: only an attempt can tell. The dispatcher adds breaker and Retry-After."""
        return True

    async def models(self) -> tuple[str, ...]:
        """Returns the names that the server lists, at most 30 s old; those last known when it does not answer."""
        async with self._models_lock:
            if self._clock() >= self._models_until:
                self._models = await self._list_models()
                self._models_until = self._clock() + MODELS_FRESH_S
            return self._models

    async def answer(self, step: Step, attempt: int) -> AsyncGenerator[api.AnswerEvent, None]:
        """Yields the server's answer to `step`, ending with Completed or Failed; see `Route.answer`."""
        response: aiohttp.ClientResponse | None = None
        slot: int | None = None
        try:
            deadline = self._clock() + self._config.first_token_s
            server = await self._known.server()
            slot = self._slots.take(f"{step.request.session}-{step.request.branch}", server.slots or 0)
            response = await self._open(self._sent(step, server, slot), step, deadline)
            yield api.Started(request=step.request.request, epoch=step.request.epoch)
            # Servers that cannot stream, or that report an error, answer a streaming request with plain JSON.
            if not step.stream or response.content_type == "application/json":
                for event in await self._whole(response, step, deadline):
                    yield event
            else:
                async with aclosing(self._stream(response, step, deadline)) as events:
                    async for event in events:
                        yield event
        except Trouble as trouble:
            if trouble.connection:
                self._known.doubt()
            yield trouble.failed(step.request)
        finally:
            if slot is not None:
                self._slots.release(slot)
            if response is not None:
                response.close()

    def _sent(self, step: Step, server: Server, slot: int | None) -> Sent:
        """Returns what the server is sent; raises Trouble where it has no words for the request."""
        request = step.request
        facts = Facts(
            chat=step.kind == "chat",
            salt=cache_salt(request.tenant, step.body.get("cache_salt")),
            session=request.session,
            branch=request.branch,
            step=request.step,
            priority=request.priority,
            slot=slot,
            cached=not self._apart,
        )
        sent = adapt(outgoing(self._config, step), server, facts, self._config.fields)
        if isinstance(sent, Refused):
            raise Trouble(
                "unsupported_feature",
                sent.words(self.name, server),
                final=True,
                error=WireError(param=sent.field),
            )
        return sent

    async def _open(self, sent: Sent, step: Step, deadline: float) -> aiohttp.ClientResponse:
        """Sends the request; returns the response once its status is 200."""
        body = msgspec.json.encode(sent.body)
        try:
            with self._telemetry.span(SPAN_ATTEMPT, route=self.name):
                async with asyncio.timeout(deadline - self._clock()):
                    response = await self._session.post(
                        self._base + _PATHS[step.kind],
                        data=io.BytesIO(body) if len(body) > _STREAMED_BODY else body,
                        headers={**self._headers, **sent.headers},
                        allow_redirects=False,
                        timeout=self._timeout,
                    )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise connection_trouble(self.name, error, self._limit_words(False)) from error
        try:
            await self._accept(response, deadline)
        except BaseException:
            response.close()
            raise
        return response

    async def _accept(self, response: aiohttp.ClientResponse, deadline: float) -> None:
        """Returns when the response may be read; raises Trouble for any status but 200 and for compression."""
        status = response.status
        if status != 200:
            final = status in policy.UPSTREAM_FINAL
            body = await self._read_all(response, ERROR_BODY_LIMIT, deadline) if final else b""
            raise status_trouble(self.name, status, read_error_body(body), retry_after_s(response.headers))
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Trouble("upstream_stream_broken", f"upstream {self.name} compressed its answer although asked not to")

    async def _stream(
        self, response: aiohttp.ClientResponse, step: Step, deadline: float
    ) -> AsyncGenerator[api.AnswerEvent, None]:
        parser = EventParser()
        tally = Tally(step.request)
        ended = False
        while not ended:
            try:
                piece = await self._read(response, deadline, tally.content)
            except Trouble:
                if not tally.complete():
                    raise
                break
            ended = not piece
            for data in self._events(parser, piece):
                if data == DONE_DATA:
                    ended = True
                    await _drain(response)
                    break
                for event in self._chunk(data, step, tally):
                    yield event
                if tally.content:
                    deadline = self._clock() + self._config.idle_s
        if not tally.complete():
            raise Trouble(
                "upstream_stream_broken", f"upstream {self.name} ended its stream before the answer was complete"
            )
        yield tally.completed()

    def _events(self, parser: EventParser, piece: bytes) -> Iterator[bytes]:
        try:
            for event in parser.feed(piece):
                if event.data:
                    yield event.data
        except OversizedEvent as error:
            raise Trouble("upstream_stream_broken", f"upstream {self.name} sent a broken stream: {error}") from error

    def _chunk(self, data: bytes, step: Step, tally: Tally) -> Iterator[api.Delta | api.Finished]:
        answer = self._decode(data)
        if answer.usage is not None:
            tally.usage = answer.usage
        if answer.timings is not None:
            tally.timings = answer.timings
        for choice in answer.choices or ():
            if choice.finish_reason == "error":
                raise Trouble("upstream_stream_broken", f"upstream {self.name} ended a choice with an error")
            try:
                events = list(choice_events(choice, step.request))
            except msgspec.ValidationError as error:
                raise self._unreadable(error) from error
            for event in events:
                tally.note(event)
                yield event

    async def _whole(self, response: aiohttp.ClientResponse, step: Step, deadline: float) -> list[api.AnswerEvent]:
        """Returns the events of an answer that came as one body."""
        body = await self._read_all(response, ANSWER_LIMIT, deadline)
        tally = Tally(step.request)
        events: list[api.AnswerEvent] = list(self._chunk(body, step, tally)) if body else []
        if not events:
            raise Trouble("upstream_empty", f"upstream {self.name} answered 200 without an answer")
        if not tally.complete():
            raise Trouble("upstream_stream_broken", f"upstream {self.name} sent an incomplete answer")
        return [*events, tally.completed()]

    def _decode(self, data: bytes) -> WireAnswer:
        try:
            answer = answer_decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._unreadable(error) from error
        if answer.error:
            told = read_error(answer.error)
            if _ERROR_STATUS.fullmatch(str(told.code)):
                raise status_trouble(self.name, int(str(told.code)), told, None)
            words = f": {told.message[:300]}" if told.message else ""
            raise Trouble("upstream_stream_broken", f"upstream {self.name} reported an error inside its answer{words}")
        return answer

    def _unreadable(self, error: Exception) -> Trouble:
        words = str(error) if isinstance(error, msgspec.ValidationError) else "not valid JSON"
        return Trouble("upstream_stream_broken", f"upstream {self.name} sent a piece that cannot be read: {words}")

    async def _read(self, response: aiohttp.ClientResponse, deadline: float, begun: bool) -> bytes:
        """Returns the next bytes, none at the end."""
        content = response.content
        try:
            # What has arrived is taken without arming a timer for it.
            piece = content.read_nowait()
            if piece or content.at_eof():
                return piece
            async with asyncio.timeout(deadline - self._clock()):
                return await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise connection_trouble(self.name, error, self._limit_words(begun), begun=True) from error

    async def _read_all(self, response: aiohttp.ClientResponse, limit: int, deadline: float) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := await self._read(response, deadline, False):
            size += len(piece)
            if size > limit:
                raise Trouble("upstream_too_large", f"upstream {self.name} sent an answer of more than {limit} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    def _limit_words(self, content: bool) -> str:
        if content:
            return f"nothing new for {self._config.idle_s:g} s (its idle_s)"
        return f"no answer within {self._config.first_token_s:g} s (its first_token_s)"

    async def _list_models(self) -> tuple[str, ...]:
        reply = await self._ask(f"{self._base}/models")
        if reply is None or reply.status != 200:
            return self._models
        try:
            listed = msgspec.json.decode(reply.body, type=ModelList)
        except (ValueError, RecursionError):
            return self._models
        return tuple(entry.id for entry in listed.data)

    async def _ask(self, url: str) -> Reply | None:
        """Returns the server's answer to a GET request, None when there is none."""
        limit = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S, sock_connect=self._config.connect_s)
        try:
            async with self._session.get(url, headers=self._headers, allow_redirects=False, timeout=limit) as response:
                body = await self._read_all(response, ANSWER_LIMIT, self._clock() + MODELS_TIMEOUT_S)
                return Reply(response.status, response.headers.get("Server", ""), body)
        except (aiohttp.ClientError, OSError, ValueError, Trouble):
            return None


def _authorization(config: UpstreamConfig) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if config.key_file is None:
        return headers
    try:
        key = Path(config.key_file).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not plain ASCII text"
        raise ConfigError(
            f"the key file of upstream {config.name} cannot be read: {reason}; give a file with one bearer token",
            param=f"upstreams.{config.name}.key_file",
        ) from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the key file of upstream {config.name} must hold exactly one bearer token on one line",
            param=f"upstreams.{config.name}.key_file",
        )
    return {**headers, "Authorization": f"Bearer {key}"}


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Reads what follows the end mark, as a rule nothing, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await response.content.readany():
                pass
    except (aiohttp.ClientError, OSError):
        response.close()

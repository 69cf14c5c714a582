"""One session of a server: what the server knows of it, and news of its tools while they run.

session = client.session("run-1")
async with session.events() as events:
    await events.tool_started(call["id"], "shell")
    async for text in shell.output():
        await events.tool_output(call["id"], text)  # computed ahead while the tool still runs
    await events.tool_finished(call["id"])
print((await session.report()).cache, (await session.cache_report()).misses)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

import httpx
import msgspec

from magnitude_engine.client.branches import (
    SessionBranch,
    SessionBranches,
    branch_path,
    encode_fork,
    encode_prune,
    encode_score,
)
from magnitude_engine.client.misses import CacheReport
from magnitude_engine.client.transport import Transport, decode
from magnitude_engine.errors import RequestError

EVENTS_AHEAD = 64
PIECE_CHARS = 256 * 1024


class SessionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all steps."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TrackedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was asked for with `track_feedback`, or that was said to have failed (`dead` is the reason given).

    `success` is what the feedback says that the step is credited with; None without one.
    """

    step: int
    at: float | None = None
    branch: str | None = None
    route: str | None = None
    finish_reason: str | None = None
    ok: bool | None = None
    success: bool | None = None
    dead: str | None = None


class GivenFeedback(msgspec.Struct, frozen=True, kw_only=True):
    """Feedback as the server keeps it; `branch` is None where it is about the whole session."""

    success: bool
    error_reason: str | None
    timestamp: str
    branch: str | None = None


class PrunedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """What the session's prompts are not given any more, because its requests asked for `prune`.

    Attributes:
        kind: `dead-end`, `thinking`, or `reasoning` (thinking beside the text).
        messages: indices in the client's own list when it was decided; `digest` is theirs.
        at: Unix seconds.
        ahead: decided while the session waited, so that the shorter prompt was computed meanwhile.
        counted: whether the worker counted `tokens`, which otherwise are estimated.
    """

    kind: str
    messages: tuple[int, ...]
    digest: str
    reason: str
    step: int | None
    branch: str
    at: float
    ahead: bool
    tokens: int
    counted: bool


class CachedBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A branch in the worker's cache: its tokens, the tool that it waits for, and when that is expected back."""

    branch: str
    state: str
    tokens: int
    waits_for: str | None
    due_s: float | None


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a server knows of a session.

    Attributes:
        id: as in the header `x-magnitude-session`; `client_id` is the client's own.
        source: what it was recognised by.
        failures: steps without a complete answer.
        created_at, seen_at: Unix seconds; at `expires_at` it is forgotten unless it goes on.
        cache: None while no worker can say what it holds.
    """

    id: str
    client_id: str
    source: str
    state: str
    steps: int
    failures: int
    usage: SessionUsage
    route: str
    finish_reason: str
    created_at: int
    seen_at: int
    expires_at: int
    tracked_steps: tuple[TrackedStep, ...]
    feedback: tuple[GivenFeedback, ...]
    pruned: tuple[PrunedMessages, ...] = ()
    cache: tuple[CachedBranch, ...] | None


class EventsReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """How many events the server took, how many of them a worker got, and what was wrong with the others."""

    events: int
    delivered: int
    rejected: int
    errors: tuple[str, ...] = ()


class AgentSession:
    """A session by the id that its requests carry, or the one that the server shows for it."""

    def __init__(self, session_id: str, transport: Transport, check_loop: Callable[[], None]) -> None:
        if not isinstance(session_id, str) or not session_id:
            raise RequestError("session_id must be a non-empty text", param="session_id")
        self.session_id = session_id
        self._transport = transport
        self._check_loop = check_loop

    async def report(self) -> SessionReport:
        """Returns what the server knows of the session; raises StatusError (404) for one it does not know."""
        self._check_loop()
        return decode(await self._transport.request("GET", self._url()), SessionReport)

    async def cache_report(self) -> CacheReport:
        """Returns what its prompts found in the cache and why not more; raises StatusError (404) for one not known."""
        self._check_loop()
        return decode(await self._transport.request("GET", self._url("/cache")), CacheReport)

    async def end(self) -> None:
        """Says that nothing more comes of the session; raises StatusError (404) for one it does not know."""
        self._check_loop()
        await self._transport.request("DELETE", self._url())

    def events(self, *, branch: str | None = None) -> EventUpload:
        """Returns a stream of events of the session, or of a branch of it, to be opened with `async with`."""
        self._check_loop()
        return EventUpload(self._transport, self._url("/events"), self._check_loop, branch)

    async def fork(
        self,
        count: int = 1,
        *,
        parent: str | SessionBranch | None = None,
        max_parallel_branches: int | None = None,
    ) -> tuple[SessionBranch, ...]:
        """Returns branches that grow from the session's main line, or from `parent`; see `branches.py`.

        Args:
            max_parallel_branches: from now on no more of this session may be open, nor more than the server allows.

        Raises:
            StatusError: `error_code` is `branch_limit_exceeded` (429), `branch_ended` (409) for a parent that is not
                open, `branch_not_found` or `session_not_found` (404).
        """
        body = encode_fork(count, parent, max_parallel_branches)
        return decode(await self._post("/branches", body), SessionBranches).branches

    async def branches(self) -> SessionBranches:
        """Returns all branches, those that have ended too."""
        self._check_loop()
        return decode(await self._transport.request("GET", self._url("/branches")), SessionBranches)

    async def score(self, branch: str | SessionBranch, value: float) -> SessionBranch:
        """Notes how good a branch is; more is better, and the last score counts. Raises StatusError (404, 409)."""
        return decode(await self._post(branch_path(branch, "score"), encode_score(value)), SessionBranch)

    async def prune(self, branch: str | SessionBranch, reason: str = "") -> tuple[SessionBranch, ...]:
        """Ends a branch and all that was forked from it; returns those that ended now. Raises StatusError (404)."""
        body = encode_prune(reason)
        return decode(await self._post(branch_path(branch, "prune"), body), SessionBranches).branches

    async def select(self, branch: str | SessionBranch) -> SessionBranch:
        """The session goes on from a branch, all others are pruned. Raises StatusError (404, 409)."""
        return decode(await self._post(branch_path(branch, "select"), b"{}"), SessionBranch)

    async def _post(self, below: str, body: bytes) -> httpx.Response:
        self._check_loop()
        return await self._transport.request("POST", self._url(below), body)

    def _url(self, below: str = "") -> httpx.URL:
        base = self._transport.base
        # As raw bytes: a slash in an id must stay escaped.
        path = f"{base.raw_path.decode('ascii').rstrip('/')}/sessions/{quote(self.session_id, safe='')}{below}"
        return base.copy_with(raw_path=path.encode("ascii"))


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    branch: str | None = None
    call_id: str | None = None
    tool: str | None = None
    text: str | None = None
    step: int | None = None
    reason: str | None = None


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the answer: an error, or the last word."""

    class Error(msgspec.Struct, frozen=True):
        message: str

    type: Literal["error", "acknowledged"]
    line: int = 0
    error: Error | None = None
    events: int = 0
    delivered: int = 0
    rejected: int = 0


class EventUpload:
    """Tells a server what a session's tools do, while they do it.

    Events are sent in order and as they come; a call waits only where the server takes them more slowly. Leaving
    the `async with` block waits for the server's last word, which is then in `receipt`.

    Raises:
        ClientError: from any call, and when the block is left, where the connection or the server fails.
    """

    def __init__(
        self, transport: Transport, url: httpx.URL, check_loop: Callable[[], None], branch: str | None
    ) -> None:
        self.receipt: EventsReceipt | None = None
        self._transport = transport
        self._url = url
        self._check_loop = check_loop
        self._branch = branch
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(EVENTS_AHEAD)
        self._upload: asyncio.Task[httpx.Response] | None = None

    async def __aenter__(self) -> Self:
        self._check_loop()
        if self._upload is not None:
            raise RequestError("a stream of events is opened once: call events() again")
        self._upload = asyncio.create_task(self._transport.upload(self._url, self._chunks()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        upload = self._opened()
        if error is not None:
            upload.cancel()
            await asyncio.wait({upload})
            return
        try:
            await self._put(None)
            self.receipt = _receipt(await upload)
        finally:
            upload.cancel()

    async def tool_started(self, call_id: str, tool: str = "") -> None:
        """A tool runs; `call_id` is the id of the call in the model's answer."""
        await self._send(_Event(type="tool_started", branch=self._branch, call_id=call_id, tool=tool))

    async def tool_output(self, call_id: str, text: str) -> None:
        """A tool has printed `text` since the last call."""
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            await self._send(_Event(type="tool_output_delta", branch=self._branch, call_id=call_id, text=piece))

    async def tool_finished(self, call_id: str, output: str = "") -> None:
        """A tool has ended; `output` is what it printed since the last call."""
        await self.tool_output(call_id, output)
        await self._send(_Event(type="tool_finished", branch=self._branch, call_id=call_id))

    async def step_failed(self, reason: str = "", step: int | None = None) -> None:
        """A step came to nothing; `step` counts from 0, by default the last one that was answered."""
        await self._send(_Event(type="step_failed", branch=self._branch, step=step, reason=reason))

    async def branch_failed(self, reason: str = "") -> None:
        """The branch of this stream came to nothing: it is dead, and so is all that was forked from it."""
        await self._send(_Event(type="branch_failed", branch=self._branch, reason=reason))

    async def _send(self, event: _Event) -> None:
        self._check_loop()
        await self._put(msgspec.json.encode(event) + b"\n")

    async def _put(self, line: bytes | None) -> None:
        """Queues a line; raises what ended the upload where that has ended."""
        upload = self._opened()
        if self._queue.full():
            waiting = asyncio.ensure_future(self._queue.put(line))
            try:
                await asyncio.wait({waiting, upload}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        else:
            self._queue.put_nowait(line)
        if upload.done() and line is not None:
            self.receipt = _receipt(upload.result())
            raise RequestError(f"the server has ended this stream of events: {'; '.join(self.receipt.errors)}")

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while (line := await self._queue.get()) is not None:
            yield line

    def _opened(self) -> asyncio.Task[httpx.Response]:
        if self._upload is None:
            raise RequestError("open the stream first: async with session.events() as events")
        return self._upload


def _receipt(response: httpx.Response) -> EventsReceipt:
    lines = [decode(response, _Line, part) for part in response.content.splitlines()]
    last = lines[-1] if lines else _Line(type="acknowledged")
    errors = tuple(f"event {each.line}: {each.error.message}" for each in lines if each.error is not None)
    return EventsReceipt(events=last.events, delivered=last.delivered, rejected=last.rejected, errors=errors)

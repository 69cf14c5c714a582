"""Session leases: what the proxy knows of a session, who may write it, and what to do when the store is away.

A request opens its session and gets a `Lease` with the record and a fencing token; when it ends it commits one step.
A commit is compare-and-set in the store (see `store/sessions.lua`): of two leases of one branch only the later one
can commit, once. Branches of one session (sub-agents) do not fence each other. With the store down, leases come from
memory and say `degraded`; when it is back, the next `open` simply uses it again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import msgspec

from magnitude_proxy.config import SessionLimits, StoreConfig
from magnitude_proxy.identity import FINGERPRINT, Identity, IdentityHints, identify
from magnitude_proxy.limits import NO_TERMS, Terms, Use, lowered, refusal
from magnitude_proxy.lineage import Lineage
from magnitude_proxy.store.book import SessionBook
from magnitude_proxy.store.connection import KNOCK_S, StoreConnection, StoreDown
from magnitude_proxy.store.embedded import EmbeddedStore
from magnitude_proxy.store.functions import (
    LIBRARY,
    PRUNED,
    Opening,
    commit_call,
    get_call,
    open_call,
    parse_opened,
    parse_record,
)
from magnitude_proxy.store.memory import MemoryStore, Opened
from magnitude_proxy.store.pruned import Prunings
from magnitude_proxy.store.record import Owner, SessionRecord, State, StepOutcome, after, begun
from magnitude_proxy.store.responses import KeptResponses
from magnitude_proxy.store.spending import Spending
from magnitude_proxy.telemetry import (
    SPAN_STORE,
    STALE_COMMITS,
    STORE_ERRORS,
    STORE_SECONDS,
    STORE_UP,
    UNSTABLE_IDS,
    Telemetry,
    store_log,
)

__all__ = ["Lease", "SessionRecord", "Sessions", "State", "StepOutcome"]

IN_MEMORY = "none"
# Kept responses hold whole conversations.
RESPONSE_TTL_S = 86_400.0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to commit one step of a session.

    Attributes:
        epoch: the session's lease count; grows with every open.
        token: `<store run id>.<nonce>.<epoch>`, new with every open.
        step: the session's step that this request is, from 0.
        degraded: the store did not answer; the record is this process's own.
        limits, use: what the session may use, and what it has used, this step counted.
    """

    identity: Identity
    epoch: int
    token: str
    step: int
    degraded: bool
    record: SessionRecord
    limits: SessionLimits = SessionLimits()
    use: Use = Use()

    @property
    def line(self) -> str:
        """The branch as the worker knows it."""
        return self.record.line_of(self.identity.branch)


class Sessions:
    """Opens and commits sessions; owns the store's connection and the embedded server, if any.

    Attributes:
        book: the sessions as clients ask for them.
        responses: the answers that clients may go on from.
        prunings: what was dropped from their prompts.
        spending: the tokens of each key's day.
    """

    def __init__(
        self,
        config: StoreConfig,
        data_dir: Path,
        telemetry: Telemetry,
        *,
        clock: Callable[[], float] = time.time,
        nonce: Callable[[], str] | None = None,
        knock_s: float = KNOCK_S,
    ) -> None:
        """Nothing is started yet.

        Args:
            clock: gives Unix seconds.
            nonce: gives a value that it never gave before, in no process; by default one random prefix, counted up.
            knock_s: most seconds between two attempts to reach a store that is down.

        Raises:
            ConfigError: the store's URL, or the place of the embedded one, cannot be used.
        """
        self._config = config
        self._telemetry = telemetry
        self._clock = clock
        self._nonce = nonce or _counted(secrets.token_hex(8))
        self._memory = MemoryStore(alone=config.url == IN_MEMORY)
        self._embedded = EmbeddedStore(data_dir / "store") if config.url is None else None
        url = self._embedded.url if self._embedded is not None else config.url
        self._store = (
            StoreConnection(url, config.timeout_s, library=LIBRARY, knock_s=knock_s)
            if url and url != IN_MEMORY
            else None
        )
        link = None if self._store is None else self
        self._lineage = Lineage()
        self.book = SessionBook(self._memory, link, config.session_ttl_s, self._lineage.counted)
        self.responses = KeptResponses(link, min(config.session_ttl_s, RESPONSE_TTL_S))
        self.prunings = Prunings(link, config.session_ttl_s)
        self.spending = Spending(link)
        telemetry.gauge(STORE_UP, lambda: [(float(self.healthy()), {})])

    @property
    def problem(self) -> str | None:
        """Why sessions are kept in memory although a store is configured; None when it answers."""
        if self._store is None or self._store.up:
            return None
        return (self._embedded.problem if self._embedded is not None else None) or self._store.problem

    def healthy(self) -> bool:
        """True when the store answers, or none is wanted."""
        return self._store is None or self._store.up

    async def start(self) -> None:
        """Starts the embedded server and connects; returns with the store down too (see `problem`)."""
        if self._embedded is not None:
            await self._embedded.start()
        if self._store is not None:
            await self._store.start()
            if not self._store.up:
                store_log.warning("sessions are kept in memory until the store answers: %s", self.problem)

    async def close(self) -> None:
        """Closes the connection and stops the embedded server if this process owns it."""
        if self._store is not None:
            await self._store.close()
        if self._embedded is not None:
            await self._embedded.close()

    async def enter(
        self, tenant: str, headers: Mapping[str, str], hints: IdentityHints, terms: Terms = NO_TERMS
    ) -> Lease:
        """Returns the lease of a request's next step, of the session that it is found to belong to; see `open`."""
        identity = self._lineage.place(identify(tenant, headers, hints), hints)
        if identity.advice is not None:
            self._telemetry.count(UNSTABLE_IDS, source=identity.source)
        if identity.source == FINGERPRINT and hints.messages and all(m.role != "assistant" for m in hints.messages):
            # Runs that begin alike may share a session: a history that holds no answer begins one.
            terms = msgspec.structs.replace(terms, fresh=True)
        return await self.open(identity, terms)

    async def open(self, identity: Identity, terms: Terms = NO_TERMS) -> Lease:
        """Returns the lease of the next step; from memory when the store does not answer within its limit.

        Raises:
            NotFound, Conflict: the branch is none of the session, or has ended.
            SessionLimitExceeded: the session has used up what it may. Nothing has changed.
        """
        now = self._clock()
        nonce = self._nonce()
        owner = Owner(identity.tenant, identity.source, identity.raw, identity.advice or "")
        if self._store is not None:
            try:
                opening = Opening(owner, nonce, terms)
                call = open_call(identity.session, identity.branch, opening, now, self._config.session_ttl_s)
                opened = parse_opened(identity.session, identity.branch, await self.call("open", *call))
                if opened.refused is None:
                    self._memory.remember(opened.record)
                    self.book.opened(opened.record)
                return _lease(identity, opened, terms, now, degraded=False)
            except StoreDown:
                pass
        opened = self._memory.open(identity.session, identity.branch, owner, nonce, now, terms)
        return _lease(identity, opened, terms, now, degraded=self._store is not None)

    def commit(
        self, lease: Lease, outcome: StepOutcome, pruned: Callable[[], None] = lambda: None
    ) -> asyncio.Future[bool]:
        """Sends one step under `lease` to the store; the result, False when it was not recorded there, may be awaited.

        It is not recorded when a later lease of the branch exists, this one has committed already or the store lost
        it (counted as stale), when its branch was pruned meanwhile (`pruned` is called), and when the store did not
        answer: then the step is kept in memory. Whatever this process asks the store afterwards finds the step: the
        store takes commands in order.
        """
        now, began = self._clock(), time.perf_counter()
        session, branch = lease.identity.session, lease.identity.branch
        recorded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def done(reply: object) -> None:
            if isinstance(reply, StoreDown):
                self._telemetry.count(STORE_ERRORS, operation="commit")
                known = self._memory.get(session)
                if known is None or known.epoch <= lease.epoch:
                    self._memory.remember(after(lease.record, outcome, now))
            else:
                self._telemetry.observe(STORE_SECONDS, time.perf_counter() - began, operation="commit")
                self._count_stale(reply in (1, PRUNED))
                if reply == PRUNED:
                    pruned()
            if not recorded.done():
                recorded.set_result(reply == 1)

        if self._store is None or lease.degraded:
            committed = self._memory.commit(session, branch, lease.token, outcome, now)
            recorded.set_result(self._count_stale(committed))
            return recorded
        try:
            call = commit_call(session, branch, lease.token, outcome, now, self._config.session_ttl_s)
            self._store.later(done, *call)
        except StoreDown as error:
            done(error)
        return recorded

    def latest(self, record: SessionRecord) -> SessionRecord:
        """Returns the session as this process saw it last, `record` where that is later."""
        known = self._memory.get(record.session)
        return known if known is not None and known.epoch >= record.epoch else record

    def unused(self) -> str:
        """Returns a value that nobody has seen before."""
        return self._nonce()

    async def get(self, session: str) -> SessionRecord | None:
        """Returns the record of a session id, None when there is none (or, with the store down, none here)."""
        if self._store is not None:
            try:
                return parse_record(session, await self.call("get", *get_call(session)))
            except StoreDown:
                pass
        return self._memory.get(session)

    async def call(self, operation: str, *command: str | int | float | bytes) -> object:
        """Runs one function of the store with its metrics; raises StoreDown."""
        if self._store is None:
            raise StoreDown("no store is configured")
        began = time.perf_counter()
        with self._telemetry.span(SPAN_STORE, operation=operation):
            try:
                reply = await self._store.call(*command)
            except StoreDown:
                self._telemetry.count(STORE_ERRORS, operation=operation)
                raise
        self._telemetry.observe(STORE_SECONDS, time.perf_counter() - began, operation=operation)
        return reply

    def tell(self, *command: str | int | float | bytes) -> None:
        """Sends a command whose reply nobody needs, or drops it while the store is down."""
        if self._store is not None:
            self._store.tell(*command)

    def _count_stale(self, committed: bool) -> bool:
        if not committed:
            self._telemetry.count(STALE_COMMITS)
        return committed


def _lease(identity: Identity, opened: Opened, terms: Terms, now: float, *, degraded: bool) -> Lease:
    """Returns the lease that a store gave; raises SessionLimitExceeded where it gave none."""
    record = opened.record
    if opened.refused is not None:
        record, _ = begun(record, terms, now)
    limits, use = lowered(terms.server, record.limits), record.use(now, terms.repeats)
    if opened.refused is not None:
        raise refusal(opened.refused, limits, use, identity.session)
    return Lease(
        identity=identity,
        epoch=record.epoch,
        token=opened.token,
        step=record.steps,
        degraded=degraded,
        record=record,
        limits=limits,
        use=use._replace(iterations=use.iterations + 1),
    )


def _counted(prefix: str) -> Callable[[], str]:
    numbers = count()
    return lambda: f"{prefix}{next(numbers):x}"

"""Explains to each session why its prompts were not found in the cache, and keeps that for those who ask.

Texts are the tenant's own: they are given to nobody who does not name tenant and session, and never logged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from magnitude_engine import api
from magnitude_engine.explain.cause import UNSEEN, Told
from magnitude_engine.explain.finding import Finding, find, find_beside, nearest, told
from magnitude_engine.explain.memory import Ledgers, Prompts
from magnitude_engine.explain.overlap import ID_BYTES, pack, unpack
from magnitude_engine.kv.lease import Cached
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.tokenizer import Tokenizer
from magnitude_engine.prepared import PreparedRequest
from magnitude_engine.request import Sequence

MAX_BYTES = 32 * 1024 * 1024
# More of a tenant's sessions are not looked at for the first prompt of one.
LOOKED_AT = 64
SHOWN_CHARS = 120


class _Open(NamedTuple):
    """A step that runs: its prompt and the one that it went on from."""

    now: Told
    origin: Told | None


class Explainer:
    """`began`, `ended` and `forget` belong to the engine's thread; any thread may ask for a report.

    Args:
        on: whether anything is cached at all; without, there is nothing to explain.
        now: Unix seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        on: bool = True,
        now: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._on = on
        self._tokenizer = tokenizer
        self._now = now
        self._prompts = Prompts(max_bytes)
        self._ledgers = Ledgers()
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    def prompt(self, prepared: PreparedRequest) -> Told | None:
        """Returns a request's prompt as `began` takes it, None where nothing is explained; any thread may ask."""
        return told(prepared.generate.input, pack(prepared.prompt)) if self._on else None

    def began(self, sequence: Sequence, now: Told, hits: Cached) -> api.CacheMiss | None:
        """Takes in what a step's prompt found; returns why not more, None where that was all there could be."""
        prepared, owner = sequence.prepared, sequence.owner
        found, origin = self._find(owner, now, hits.tokens)
        self._open[sequence.order.arrival] = _Open(now, origin)
        miss = None
        if found is not None:
            miss = api.CacheMiss(cause=found.cause.name, at=found.at, wasted=found.wasted)
        step = api.StepCache(
            step=prepared.generate.step,
            branch=owner.branch,
            at_s=self._now(),
            prompt_tokens=now.prompt,
            cached_tokens=hits.tokens,
            cached_host_tokens=hits.host,
            cached_disk_tokens=hits.disk,
            cause=None if miss is None else miss.cause,
            wasted=0 if miss is None else miss.wasted,
        )
        detail = None if found is None or miss is None else self._detail(step, miss, found, now)
        with self._lock:
            self._ledgers.add(owner, step, detail)
        return miss

    def ended(self, sequence: Sequence) -> None:
        """Takes in that a step leaves the engine, with what it has computed."""
        if sequence.choice:
            return
        opened = self._open.pop(sequence.order.arrival, None)
        if opened is None or sequence.lease is None or not sequence.lease.length:
            return
        now, length = opened.now, sequence.lease.length
        ids = now.ids[: length * ID_BYTES] + pack(sequence.tokens[now.prompt : length])
        answer = sequence.answer if sequence.finish is not None else None
        self._prompts.put(
            sequence.owner, now._replace(ids=ids, prompt=min(now.prompt, length), answer=answer), opened.origin
        )

    def forget(self, end: api.EndSession) -> None:
        """Nothing more comes of a session, or of one of its branches."""
        for owner in self._prompts.branches(end.tenant, end.session):
            if end.branch in (None, owner.branch):
                self._prompts.forget(owner)
        if end.branch is None:
            with self._lock:
                self._ledgers.forget(end.tenant, end.session)

    def report(self, asked: api.AskMisses) -> api.SessionMisses:
        """Returns the last steps and misses of a session; nothing for one that is not known."""
        with self._lock:
            return self._ledgers.get(asked.tenant, asked.session).report(asked)

    def _find(self, owner: SessionKey, now: Told, cached: int) -> tuple[Finding | None, Told | None]:
        """Returns why a prompt was not found, and the prompt of its session that it goes on from."""
        before = nearest(now, self._prompts.of(owner))
        if before is not None:
            found = find(before, now, cached, self._read)
            if found is None or found.cause is not UNSEEN:
                return found, before
        other = nearest(now, self._prompts.beside(owner, LOOKED_AT))
        found = Finding(UNSEEN, cached) if other is None else find_beside(other, now, cached, self._read)
        if found is not None and found.cause is UNSEEN and 2 * cached >= now.prompt:
            # It shares what sessions of one agent share, or its own earlier steps are forgotten here but not there.
            found = None
        return found, None

    def _detail(self, step: api.StepCache, miss: api.CacheMiss, found: Finding, now: Told) -> api.MissDetail:
        return api.MissDetail(
            step=step.step,
            branch=step.branch,
            at_s=step.at_s,
            miss=miss,
            prompt_tokens=step.prompt_tokens,
            cached_tokens=step.cached_tokens,
            evicted=found.evicted,
            message=found.cause.message,
            text=self._text(found, now),
        )

    def _text(self, found: Finding, now: Told) -> api.MissText | None:
        if found.change is None or found.before is None:
            return None
        before, after, at = found.change
        return api.MissText(
            lead=before[max(0, at - SHOWN_CHARS) : at],
            before=before[at : at + SHOWN_CHARS],
            now=after[at : at + SHOWN_CHARS],
            token_before=self._read(found.before.ids, found.at, found.at + 1),
            token_now=self._read(now.ids, found.at, found.at + 1),
        )

    def _read(self, ids: bytes, start: int, stop: int) -> str:
        """Returns the text of ids, special tokens by their names."""
        tokenizer = self._tokenizer
        special = tokenizer.special_ids
        return b"".join(
            tokenizer.token_text(token).encode() if token in special else tokenizer.token_bytes(token)
            for token in unpack(ids, start, stop)
        ).decode(errors="replace")

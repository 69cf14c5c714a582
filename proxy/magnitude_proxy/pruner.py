"""Prompt pruning, for clients that ask for it: `x-magnitude-prune`, or `magnitude.prune` in a body.

A request's prompt loses what was dropped before, and what it pays to drop now. Where a session waits between two
steps, more pays: the shorter prompt is then computed by the worker while nobody waits for it. What is dropped is
written down before the model sees a prompt without it; while the store is away nothing more is dropped. Every route
gets the same messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, get_args

import msgspec

from magnitude_engine import api
from magnitude_proxy.dialect.form import Events
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.pruning.history import together
from magnitude_proxy.pruning.plan import (
    Cut,
    DeadStep,
    Idea,
    Pace,
    Word,
    choose,
    propose,
    read_words,
    settle,
    shares,
)
from magnitude_proxy.pruning.scene import LOCAL, Key, Pruned, Recent, Scene, scene
from magnitude_proxy.routing.route import Taken
from magnitude_proxy.session import Lease
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.store.credit import SessionView, credited
from magnitude_proxy.store.pruned import Drop
from magnitude_proxy.store.record import SessionRecord
from magnitude_proxy.surface import Surface
from magnitude_proxy.telemetry import PRUNED_TOKENS, proxy_log
from magnitude_proxy.wire.intake import Asked

HEADER = "x-magnitude-prune"
COUNT_S = 1.0


class Known(NamedTuple):
    """What a session's record says; `view` is None where it cannot be read, so that nothing may be added."""

    drops: tuple[Drop, ...]
    view: SessionView | None


class Moment(NamedTuple):
    """When a decision falls: in which session and branch, and whether nobody waits for it."""

    key: Key
    length: int
    ahead: bool


async def pruned(surface: Surface, headers: Mapping[str, str], salt: str, lease: Lease, asked: Asked) -> Asked:
    """Returns a request without what its session has dropped; as it is where its client did not ask for that.

    Raises:
        BadRequest: the header holds an unknown word.
    """
    wish = read_words((*_header_words(headers.get(HEADER, "")), *asked.prune))
    given = asked.inputs[0]
    if not any(wish) or not isinstance(given, api.ChatInput):
        return asked
    key = Key(lease.identity.session, lease.identity.branch)
    aside = lease.identity.aside
    if not aside:
        surface.recents.take(key)
    seen = scene(given, asked.body["messages"], wish)
    known = await _known(surface, key.session, readable=not lease.degraded)
    # A call beside the conversation sees the same beginning, and decides nothing about it.
    made = () if aside else await _decide(surface, seen, known, Moment(key, len(seen.lines), ahead=False))
    drops = known.drops + made if await _written(surface, key, made) else known.drops
    cut = settle(seen.lines, drops, wish)
    shown = seen.shown(cut)
    hidden = sum(drop.tokens for drop in cut.drops if drop.kind == "reasoning")
    tokens = sum(drop.tokens for drop in cut.drops) - hidden
    return dataclasses.replace(
        asked,
        inputs=(msgspec.structs.replace(given, messages=shown.messages),),
        body={**asked.body, "messages": list(shown.wire)},
        pruned=Pruned(seen, salt, tokens, hidden, ahead=asked.generate.preferences.predictive_caching),
    )


def watched(asked: Asked, events: Events) -> Events:
    """Returns an answer's events; of a pruned request they are gathered, and its usage tells what was saved."""
    return events if asked.pruned is None else _watched(asked.pruned, events)


async def _watched(done: Pruned, events: Events) -> Events:
    label = ""
    async with aclosing(events):
        async for item in events:
            if isinstance(item, Taken):
                label = item.label
            elif isinstance(item, api.Delta):
                done.said.see(item)
            elif isinstance(item, api.Completed):
                usage = msgspec.structs.replace(item.usage, pruned_tokens=done.saved(label))
                item = msgspec.structs.replace(item, usage=usage)
            yield item


def answered(surface: Surface, lease: Lease, done: Pruned, label: str) -> None:
    """A step has ended in full: what its session need not see again is dropped while it waits."""
    surface.telemetry.count(PRUNED_TOKENS, done.saved(label), route=label)
    if label != LOCAL or not done.ahead or lease.identity.aside:
        return
    key = Key(lease.identity.session, lease.identity.branch)
    recent = Recent(key, done.scene.with_answer(done.said.answer), done.salt)
    surface.recents.put(recent)
    surface.recents.spawn(_between(surface, recent))


def marked(surface: Surface, session: str) -> None:
    """A step of a session was said to be dead."""
    for recent in surface.recents.of(session):
        surface.recents.spawn(_between(surface, recent))


async def _between(surface: Surface, recent: Recent) -> None:
    """Drops what pays while the session waits, and has the worker compute its shorter prompt."""
    worker = surface.worker
    if worker is None or not worker.available():
        return
    async with recent.lock:
        known = await _known(surface, recent.key.session, readable=True)
        if known.view is None or not surface.recents.holds(recent):
            return
        made = await _decide(surface, recent.scene, known, Moment(recent.key, recent.length, ahead=True))
        if not surface.recents.holds(recent) or not await _written(surface, recent.key, made):
            return
        cut = settle(recent.scene.lines, known.drops + made, recent.scene.wish, recent.length)
        await worker.tell(
            api.Expect(
                tenant=recent.salt,
                session=recent.key.session,
                branch=known.view.record.line_of(recent.key.branch),
                messages=recent.scene.shown(cut).messages[:-1],
            )
        )


async def _known(surface: Surface, session: str, *, readable: bool) -> Known:
    if readable:
        try:
            view = await surface.sessions.book.view(session)
            return Known(await surface.sessions.prunings.of(session), view)
        except StoreDown:
            pass
    return Known(surface.sessions.prunings.recall(session), None)


async def _decide(surface: Surface, seen: Scene, known: Known, moment: Moment) -> tuple[Drop, ...]:
    """Returns what is to be dropped beyond what was dropped before."""
    if known.view is None:
        return ()
    ideas = propose(seen.lines, known.drops, seen.wish, dead_steps(known.view), moment.length)
    if surface.worker is not None:
        # The worker's prompts never hold thinking beside the text.
        ideas = [idea for idea in ideas if idea.kind != "reasoning"]
    before = settle(seen.lines, known.drops, seen.wish, moment.length)
    chosen = choose(ideas, seen.lines, before, pace(known.view.record, moment.ahead and _idle(surface)))
    if not chosen:
        return ()
    drops = [_drop(seen, idea, moment, surface.now()) for idea in chosen]
    after = settle(seen.lines, (*known.drops, *drops), seen.wish, moment.length)
    fits = [place for place, drop in enumerate(drops) if drop in after.drops]
    total = await _counted(surface, seen, before, after)
    tokens = shares([chosen[place] for place in fits], total)
    return tuple(
        msgspec.structs.replace(drops[place], tokens=share, counted=total is not None)
        for place, share in zip(fits, tokens, strict=True)
    )


async def _written(surface: Surface, key: Key, made: Sequence[Drop]) -> bool:
    """Writes down what is dropped from now on; False where that is nothing, or cannot be written."""
    try:
        return bool(made) and await surface.sessions.prunings.add(key.session, made)
    except StoreDown:
        return False


async def _counted(surface: Surface, seen: Scene, before: Cut, after: Cut) -> int | None:
    """Returns how many tokens shorter the worker's prompt becomes; None where it does not say so soon."""
    worker = surface.worker
    if worker is None or not worker.available():
        return None
    counts = []
    try:
        async with asyncio.timeout(COUNT_S):
            for cut in (before, after):
                chat = msgspec.structs.replace(seen.chat, messages=seen.shown(cut).messages)
                counted = await worker.count(chat)
                if isinstance(counted, api.Failed):
                    proxy_log.debug("pruned tokens are estimated: %s", counted.message)
                    return None
                counts.append(counted.usage.prompt_tokens)
    except TimeoutError:
        return None
    return max(0, counts[0] - counts[1])


def _drop(seen: Scene, idea: Idea, moment: Moment, now: float) -> Drop:
    return Drop(
        kind=idea.kind,
        index=idea.start,
        count=idea.count,
        digest=together(seen.lines[idea.start : idea.start + idea.count]),
        reason=idea.reason,
        step=idea.step,
        branch=moment.key.branch,
        at_s=now,
        tokens=0,
        ahead=moment.ahead,
    )


def dead_steps(view: SessionView) -> tuple[DeadStep, ...]:
    """Returns the steps that the agent, or feedback, called dead, as far as it is known where they stand.

    Those of a pruned branch are.
    """
    found, branches = [], view.branches.notes
    for number, note in sorted(view.steps.items()):
        said = credited(note, view.feedback)
        if number in view.dead:
            reason = f"failed: {view.dead[number]}".removesuffix(": ")
        elif said is not None and not said.success:
            reason = f"failed by feedback: {said.error_reason or ''}".removesuffix(": ")
        elif note.branch in view.branches.dead:
            reason = f"was on a pruned branch: {branches[note.branch].reason}".removesuffix(": ")
        else:
            continue
        found.append(DeadStep(number, note.anchors, note.place, reason))
    return tuple(found)


def pace(record: SessionRecord, idle: bool) -> Pace:
    """Returns how a session goes; nothing is cached of one that has no steps yet."""
    hit = record.cached_tokens / record.prompt_tokens if record.prompt_tokens else 0.0
    return Pace(record.steps, min(1.0, hit), record.completion_tokens / max(1, record.steps), idle)


def _idle(surface: Surface) -> bool:
    """Whether the worker has nothing to do but, perhaps, what has just ended."""
    status = surface.worker.status if surface.worker is not None else None
    return status is not None and status.waiting == 0 and status.running <= 1


def _header_words(given: str) -> Sequence[str]:
    words = [word.strip().lower() for word in given.split(",") if word.strip()]
    unknown = next((word for word in words if word not in get_args(Word)), None)
    if unknown is not None:
        known = ", ".join(get_args(Word))
        raise BadRequest(f"{HEADER}: {unknown[:64]!r} is unknown; it takes {known}", param=HEADER)
    return words

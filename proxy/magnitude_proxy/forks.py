"""Acts on the branches of a session: noted in its record, and the worker is told which lines are dead."""

from __future__ import annotations

from magnitude_engine import api
from magnitude_proxy.identity import MAIN_BRANCH
from magnitude_proxy.session import SessionRecord
from magnitude_proxy.sessions import store_down, unknown_session
from magnitude_proxy.store.book import Acted, Decide
from magnitude_proxy.store.branches import PREFIX, pruned, selected
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.surface import Surface


async def act(surface: Surface, record: SessionRecord, decide: Decide) -> Acted:
    """Changes a session's branches as `decide` says; raises ProxyError."""
    try:
        acted = await surface.sessions.book.branch(record, decide)
    except StoreDown as down:
        raise store_down() from down
    if acted is None:
        raise unknown_session()
    return acted


async def prune(surface: Surface, salt: str, record: SessionRecord, name: str, reason: str) -> Acted:
    """Ends a branch and all that was forked from it, nothing where it has ended; raises ProxyError."""
    acted = await act(surface, record, lambda known: pruned(known, name, reason, surface.now()))
    await _tell(surface, salt, record, acted)
    return acted


async def bury(surface: Surface, salt: str, record: SessionRecord, name: str, reason: str) -> None:
    """Does the same for a branch that somebody judged; of one that was never forked the worker alone is told.

    Raises:
        ProxyError: see `prune`.
    """
    if name.startswith(PREFIX):
        await prune(surface, salt, record, name, reason)
    elif surface.worker is not None:
        await surface.worker.tell(api.EndSession(tenant=salt, session=record.session, branch=name, pruned=True))


async def select(surface: Surface, salt: str, record: SessionRecord, name: str) -> Acted:
    """The session goes on from a branch, all others are pruned; raises ProxyError."""
    acted = await act(surface, record, lambda known: selected(known, name, surface.now()))
    await _tell(surface, salt, record, acted)
    return acted


async def _tell(surface: Surface, salt: str, record: SessionRecord, acted: Acted) -> None:
    """Tells the worker what has ended: dead branches, and the line that a selected branch takes the place of."""
    session = record.session
    ends = [api.EndSession(tenant=salt, session=session, branch=name, pruned=True) for name in acted.change.ended]
    if acted.change.line is not None:
        # A request of the main line may still run, and the branch may need the pages: neither is cut off.
        ends.append(api.EndSession(tenant=salt, session=session, branch=acted.before.line or MAIN_BRANCH))
    if surface.worker is not None and ends:
        await surface.worker.tell(*ends)

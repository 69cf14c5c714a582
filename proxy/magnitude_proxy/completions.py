"""`POST /v1/completions`: raw prompts, without a chat template; several prompts become one answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.admission import admit
from magnitude_proxy.answer import EVENTS_AHEAD, Answer, pump
from magnitude_proxy.chat import priority, steps, tenant_salt
from magnitude_proxy.dialect.form import Events, Item
from magnitude_proxy.middleware import read_body
from magnitude_proxy.routing.route import Taken
from magnitude_proxy.surface import EXCHANGE, SURFACE
from magnitude_proxy.wire.intake import read_completion

_COUNTED = tuple(field.name for field in msgspec.structs.fields(api.Usage) if field.type is int)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answers one completion request; raises ProxyError before anything is sent."""
    surface, exchange = request.app[SURFACE], request[EXCHANGE]
    asked = read_completion(await read_body(request), surface.seed())
    salt = tenant_salt(request)
    offer = surface.catalogue.offer(asked.model, exchange.upstream)
    lease = await admit(request, salt, asked)
    answer_id = f"cmpl-{random.getrandbits(128):032x}"
    made = steps(asked, lease, salt, answer_id, offer, priority(request, asked))
    runs = [surface.dispatcher.run(step) for step in made]
    events = runs[0] if len(runs) == 1 else joined(runs, asked.generate.n)
    return await Answer(surface, exchange, asked, lease, answer_id).send(request, events)


async def joined(runs: Sequence[Events], n: int) -> AsyncGenerator[Item, None]:
    """Yields the events of all `runs` as those of one answer, side by side.

    Choice `c` of run `r` becomes choice `r * n + c`; the first Taken stands for all that name the same route, the
    usage is the sum. The first Failed ends everything, and closing cancels all runs.
    """
    queue: asyncio.Queue[tuple[int, Item]] = asyncio.Queue(EVENTS_AHEAD)
    pumps = [asyncio.create_task(pump(run, _numbered(queue, index))) for index, run in enumerate(runs)]
    usage, open_runs, label = api.Usage(), len(runs), None
    try:
        while open_runs:
            index, item = await queue.get()
            if isinstance(item, Taken):
                if item != label:
                    label = item
                    yield item
            elif isinstance(item, api.Completed):
                usage = _sum(usage, item.usage)
                open_runs -= 1
                if not open_runs:
                    yield msgspec.structs.replace(item, usage=usage)
            elif isinstance(item, api.Failed):
                yield item
                return
            elif isinstance(item, api.Delta | api.Finished):
                yield msgspec.structs.replace(item, choice=index * n + item.choice)
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


def _numbered(queue: asyncio.Queue[tuple[int, Item]], index: int) -> Callable[[Item], Awaitable[None]]:
    """Returns a `put` that notes which run an event is of."""
    return lambda item: queue.put((index, item))


def _sum(one: api.Usage, other: api.Usage) -> api.Usage:
    """Adds up what is counted for every prompt, and keeps the first miss; a prediction belongs to chats only."""
    counted = {name: getattr(one, name) + getattr(other, name) for name in _COUNTED}
    return api.Usage(**counted, miss=one.miss or other.miss)

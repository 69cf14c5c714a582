"""`POST /v1/chat/completions`: one step of an agent, from its JSON to its answer."""

from __future__ import annotations

import random
import re

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.admission import admit
from magnitude_proxy.answer import Answer
from magnitude_proxy.catalogue import Offer
from magnitude_proxy.errors import BadRequest, Unauthorized
from magnitude_proxy.middleware import read_body
from magnitude_proxy.pruner import pruned, watched
from magnitude_proxy.routing.route import Step
from magnitude_proxy.session import Lease
from magnitude_proxy.surface import EXCHANGE, SURFACE
from magnitude_proxy.wire.intake import Asked, read_chat

SEEDS = 1 << 63
# The second is vLLM's own.
PRIORITY_HEADERS = ("x-magnitude-priority", "x-vllm-priority")
LEAST_URGENT = 100
_NUMBER = re.compile("-?[0-9]{1,18}")
SEED_STRIDE = 0x9E3779B97F4A7C15


async def chat(request: web.Request) -> web.StreamResponse:
    """Answers one chat request; raises ProxyError before anything is sent."""
    surface, exchange = request.app[SURFACE], request[EXCHANGE]
    asked = read_chat(await read_body(request), surface.seed())
    salt = tenant_salt(request)
    offer = surface.catalogue.offer(asked.model, exchange.upstream)
    lease = await admit(request, salt, asked)
    asked = await pruned(surface, request.headers, salt, lease, asked)
    answer_id = f"chatcmpl-{random.getrandbits(128):032x}"
    step = steps(asked, lease, salt, answer_id, offer, priority(request, asked))[0]
    events = watched(asked, surface.dispatcher.run(step))
    return await Answer(surface, exchange, asked, lease, answer_id).send(request, events)


def steps(asked: Asked, lease: Lease, salt: str, answer_id: str, offer: Offer, urgency: int = 0) -> list[Step]:
    """Returns one step per prompt, each with an id of its own; an upstream gets each prompt alone.

    `urgency` is the priority that the request may have, lower is sooner.
    """
    made = []
    refusal = offer.refusal or asked.refusal
    for index, given in enumerate(asked.inputs):
        request_id = answer_id if index == 0 else f"{answer_id}-{index}"
        # Prompts of one request draw independent noise; the first keeps the client's own seed.
        sampling = asked.generate.sampling
        if index:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index * SEED_STRIDE) % SEEDS)
        request = msgspec.structs.replace(
            asked.generate,
            sampling=sampling,
            request=request_id,
            epoch=lease.epoch,
            tenant=salt,
            session=lease.identity.session,
            branch=lease.line,
            run=lease.identity.run,
            step=lease.step,
            tool_seconds=lease.identity.tool_seconds,
            input=given,
            priority=urgency,
        )
        body = asked.body
        if len(asked.inputs) > 1:
            body = {**body, "prompt": given.text if isinstance(given, api.TextInput) else asked.body["prompt"][index]}
        failed = None if refusal is None else msgspec.structs.replace(refusal, request=request_id, epoch=lease.epoch)
        made.append(
            Step(
                kind=asked.kind,
                request=request,
                body=body,
                stream=asked.stream,
                local_refusal=failed,
                upstreams=offer.upstreams,
            )
        )
    return made


def priority(request: web.Request, asked: Asked) -> int:
    """Returns the priority that a request has: what its body or a header asks for, within what the server allows.

    Lower is sooner, as in vLLM; nobody goes before those who ask for nothing unless `most_urgent` lets them.

    Raises:
        BadRequest: a header holds no whole number.
    """
    wanted = asked.priority
    for name in PRIORITY_HEADERS:
        text = request.headers.get(name)
        if text is None:
            continue
        if not _NUMBER.fullmatch(text):
            raise BadRequest(f"the header {name} must be a whole number, lower is sooner", param=name)
        wanted = int(text) if wanted is None else wanted
    return min(max(wanted or 0, request.app[SURFACE].config.most_urgent), LEAST_URGENT)


def tenant_salt(request: web.Request) -> str:
    """Returns the salt of the request's tenant; raises Unauthorized where none was established."""
    tenant = request[EXCHANGE].tenant
    if tenant is None:
        raise Unauthorized("this route needs an API key")
    return tenant.salt

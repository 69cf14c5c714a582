"""Another tenant's ids on every public route: each answer is the one that an id which never was gets, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from magnitude_proxy.listener import api_application
from testkit.agents import MESSAGES, Agents, agents
from testkit.proxy import Reply

pytestmark = pytest.mark.thorough

ALICE, BOB = "sk-one", "sk-two"
# What differs between two answers to the same request: ids that are drawn, or follow from the client's own, and times.
CHANGING = re.compile(rb'req_[0-9a-f]+|[0-9a-f]{32}|"(?:created|created_at|completed_at)":[0-9.]+')
HEADERS = {"date", "x-request-id", "request-id", "content-length"}


class Ids(NamedTuple):
    """Ids of one owner: a session as it is shown, the client's own name of it, a kept response."""

    shown: str
    own: str
    response: str


NEVER = Ids("0123456789abcdef" * 2, "run-2", "resp_" + "fedcba9876543210" * 2)


def bodies(ids: Ids) -> dict[str, list[Any]]:
    """Returns, by route, bodies that name the ids; a route without any gets each kind of body there is."""
    chat = [{"messages": MESSAGES, "magnitude": {"session": name}} for name in (ids.shown, ids.own)]
    events = [
        {"type": "tool_started", "call_id": "c"},
        {"type": "tool_output_delta", "call_id": "c", "text": "x"},
        {"type": "step_failed", "step": 0, "reason": "no"},
    ]
    said = {"success": True, "timestamp": "2026-11-30T12:00:00Z"}
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": [{"prompt": "1", "magnitude": {"session": name}} for name in (ids.shown, ids.own)],
        "/v1/messages": [{"model": "magnitude", "max_tokens": 1, **body} for body in chat],
        "/v1/responses": [{"input": "x", "previous_response_id": ids.response, "store": False}],
        "/v1/feedback": [{"session_id": name, **said} for name in (ids.shown, ids.own)],
        "/v1/sessions/{id}/events": events,
    }


def requests(agents: Agents, ids: Ids) -> Iterator[tuple[str, str, Any]]:
    """Yields method, path and body of requests that name the ids, for every route of the public listener."""
    known = bodies(ids)
    for resource in api_application(agents.proxy.running.surface).router.resources():
        route = resource.canonical
        if not route.startswith("/v1/"):
            continue
        names = (ids.shown, ids.own, ids.response) if "{" in route else (ids.shown,)
        for method in sorted(route.method for route in resource if route.method != "HEAD"):
            for name in names:
                path = re.sub(r"\{[^}]*\}", name, route).removeprefix("/v1")
                for body in known.get(route, [{}]) if method == "POST" else [None]:
                    yield method, path, body
    for query in ("after", "session", "session_id"):
        yield "GET", f"/sessions?{query}={ids.shown}", None


def told(reply: Reply, *given: Ids) -> tuple[int, dict[str, str], bytes]:
    """Returns all that a client sees of a reply, the ids that it sends itself under one name."""
    body = reply.body
    for name in (name for ids in given for name in ids):
        body = body.replace(name.encode(), b"ID")
    headers = {name.lower(): value for name, value in reply.headers.items() if name.lower() not in HEADERS}
    headers.pop("x-magnitude-session", None)
    return reply.status, headers, CHANGING.sub(b"X", body)


async def owned(agents: Agents, ids: Ids) -> list[bytes]:
    """Returns what the owner of the ids sees of them, but for how old a session is."""
    paths = (f"/sessions/{ids.shown}", "/sessions", f"/responses/{ids.response}")
    bodies = [(await agents.ask("GET", path, key=ALICE)).body for path in paths]
    return [re.sub(rb'"seconds":{"used":[0-9.]+', b"", body) for body in bodies]


async def test_another_tenants_ids_are_ids_that_never_were_on_every_route(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        shown = await made.step("run-1", ALICE, track_feedback=True)
        kept = await made.ask("POST", "/responses", {"input": "secret", "model": "magnitude"}, ALICE)
        theirs = Ids(shown, "run-1", kept.json["id"])
        salt = made.worker.generated[0].tenant
        before = await owned(made, theirs)
        asked, news = len(made.worker.generated), len(made.worker.news)
        walked = 0
        pairs = zip(requests(made, theirs), requests(made, NEVER), strict=True)
        for (method, path, body), (_, other_path, other_body) in pairs:
            seen = told(await made.ask(method, path, body, BOB), theirs, NEVER)
            never = told(await made.ask(method, other_path, other_body, BOB), theirs, NEVER)
            assert seen == never, (method, path, json.dumps(body))
            assert b"secret" not in seen[2]
            walked += 1
        assert walked > 30
        assert set((await made.proxy.get("/health", x_api_key=BOB)).json["worker"]) == {"state", "failure"}
        assert await owned(made, theirs) == before
        assert salt not in {each.tenant for each in (*made.worker.generated[asked:], *made.worker.news[news:])}
        assert salt not in {each.tenant for each in made.worker.registered}

"""From a listener's table of routes to its OpenAPI 3.1 document.

OpenAPI 3.1 has no word for sequences: the schema of `text/event-stream` is that of one event, whose data is JSON text,
and the schema of lines is that of their array.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from magnitude_proxy.errors import ProxyError
from magnitude_proxy.openapi.route import EVENT_STREAM, JSON, Content, Done, Parameter, Route
from magnitude_proxy.openapi.schemas import PLACE, Schema, any_of, components

VERSION = "3.1.0"
TITLE = "Magnitude"
ALWAYS = (400, 403)
WITHOUT_KEY = (401, 429)
WITH_BODY = (408, 413)
STOPPING = 503
UPSTREAMS = (404, 408, 409, 413, 422, 425, 429, 504)

HEADERS: dict[str, tuple[str, Schema]] = {
    "x-request-id": ("The request's id, also in the log.", {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}),
    "request-id": ("The same as `x-request-id`.", {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}),
    "x-magnitude-session": (
        "The session this request was counted to, as an id derived from the client's.",
        {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    ),
    "x-magnitude-route": ("`local`, `upstream:NAME` or `fallback:NAME`.", {"type": "string"}),
    "x-magnitude-fallback-reason": ("Why the first route was left.", {"type": "string"}),
    "x-magnitude-cache-miss": (
        "Why not more of the prompt was cached: the cause, the first token that differs, tokens computed again.",
        {"type": "string", "pattern": "^[a-z_]+; at=[0-9]+; wasted=[0-9]+$"},
    ),
    "x-magnitude-canonical": ("What was brought into one order, as asked.", {"enum": ["tools"]}),
    "x-magnitude-degraded": ("What is missing now: the store.", {"type": "string"}),
    "x-magnitude-session-advice": ("What the agent's author should change of its session ids.", {"type": "string"}),
    "x-magnitude-ignored": ("Unknown fields of the request.", {"type": "string"}),
    "x-magnitude-pruned-tokens": (
        "Tokens that the prompt was shorter by, where the request asked for pruning.",
        {"type": "integer", "minimum": 0},
    ),
    "x-magnitude-limits": (
        "What the session has used of its limits, this step counted: `iterations=3/50, tokens=1200/100000`.",
        {"type": "string"},
    ),
    "retry-after": ("Seconds to wait before the next attempt.", {"type": "integer", "minimum": 1}),
    "x-should-retry": ("`false` where another attempt would fail alike.", {"enum": ["true", "false"]}),
}
_AGAIN = ("retry-after", "x-should-retry")
_NAMED = {
    "/v1/models/{name}": "A model's name.",
    "/v1/responses/{id}": "The id of a kept response.",
    "/v1/sessions/{id}/branches/{branch}": "The id that forking the branch gave.",
    "/v1/sessions/{id}": "A session: the id in `x-magnitude-session`, or the client's own.",
}
_PASSED_ON = "An upstream's own answer, passed on."


def document(routes: Sequence[Route], version: str, *, keys: bool) -> dict[str, Any]:
    """Returns the document; `keys` says that requests need an API key."""
    refs, schemas = components(tuple(dict.fromkeys(_kinds(routes))))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_path(route.path), {})[route.method.lower()] = _operation(route, refs)
    return {
        "openapi": VERSION,
        "info": {
            "title": TITLE,
            "version": version,
            "summary": "A stateful proxy sidecar that makes autonomous agents fast.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"apiKey": []}, *([] if keys else [{}])],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": dict(_failures(routes)),
            "headers": {name: _header(name) for name in HEADERS if name in _used(routes)},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _used(routes: Sequence[Route]) -> frozenset[str]:
    """Returns the names of all headers that some route gives."""
    return frozenset(("x-request-id", *_AGAIN)).union(*(route.headers for route in routes))


def _header(name: str) -> dict[str, Any]:
    words, schema = HEADERS[name]
    return {"description": words, "schema": schema}


def _kinds(routes: Sequence[Route]) -> Iterator[Any]:
    for route in routes:
        for content in (route.takes, route.gives):
            for kinds in content.values():
                yield from kinds
        yield route.error
        if route.unwell is not None:
            yield route.unwell


def _path(path: str) -> str:
    """Returns a path without the patterns of its variables."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)


def _operation(route: Route, refs: Mapping[Any, Schema]) -> dict[str, Any]:
    handler = inspect.unwrap(route.handler)
    group = handler.__module__.rpartition(".")[2]
    made: dict[str, Any] = {
        "operationId": group if handler.__name__ == group else f"{group}_{handler.__name__}",
        "summary": _summary(handler.__doc__ or ""),
        "tags": [group],
    }
    if route.open:
        made["security"] = [{}]
    parameters = [*_variables(_path(route.path)), *map(_parameter, route.parameters)]
    if parameters:
        made["parameters"] = parameters
    if route.takes:
        made["requestBody"] = {"required": not route.optional, "content": _content(route.takes, refs)}
    answered: dict[str, Any] = {
        "description": "The answer.",
        "headers": _headers(route, *route.headers),
        "content": _content(route.gives, refs),
    }
    made["responses"] = {**({"200": answered} if route.gives else {}), **_errors(route, refs)}
    return made


def _summary(doc: str) -> str:
    """Returns what a handler does: the first clause of its docstring."""
    return re.split(r"[;.](?:\s|$)", " ".join(doc.split()), maxsplit=1)[0]


def _variables(path: str) -> Iterator[dict[str, Any]]:
    for found in re.finditer(r"\{(\w+)\}", path):
        made: dict[str, Any] = {"name": found[1], "in": "path", "required": True}
        words = _NAMED.get(path[: found.end()])
        if words is not None:
            made["description"] = words
        yield {**made, "schema": {"type": "string", "minLength": 1}}


def _parameter(given: Parameter) -> dict[str, Any]:
    return {"name": given.name, "in": given.place, "description": given.description, "schema": dict(given.schema)}


def _content(content: Content, refs: Mapping[Any, Schema]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for media, kinds in content.items():
        if media == EVENT_STREAM:
            made[media] = {"schema": _event(kinds, refs)}
        elif not kinds:
            made[media] = {"schema": {"type": "string"}}
        else:
            schema = any_of([refs[kind] for kind in kinds])
            made[media] = {"schema": schema if media == JSON else {"type": "array", "items": schema}}
    return made


def _event(kinds: Sequence[Any], refs: Mapping[Any, Schema]) -> Schema:
    """Returns the schema of one server-sent event."""
    told = any_of([refs[kind] for kind in kinds if kind is not Done])
    data: Schema = {"contentMediaType": JSON, "contentSchema": told}
    if Done in kinds:
        data = any_of([refs[Done], data])
    fields = {"event": {"type": "string"}, "data": {"type": "string", **data}}
    return {"description": "One event.", "type": "object", "properties": fields, "required": ["data"]}


def _headers(route: Route, *names: str) -> dict[str, Any]:
    own = ("x-request-id", *(("request-id",) if "request-id" in route.headers else ()))
    return {name: {"$ref": f"#/components/headers/{name}"} for name in dict.fromkeys((*own, *names))}


def _statuses(route: Route) -> Iterator[str]:
    """Yields the statuses of a route's errors."""
    found = {*ALWAYS, *route.refuses}
    found |= set() if route.open else set(WITHOUT_KEY)
    found |= set(WITH_BODY) if route.takes else set()
    found |= set(UPSTREAMS) if route.upstreams else set()
    found |= set() if route.path.startswith("/health") else {STOPPING}
    yield from map(str, sorted(found))
    if route.upstreams:
        yield "5XX"


def _errors(route: Route, refs: Mapping[Any, Schema]) -> dict[str, Any]:
    made: dict[str, Any] = {s: {"$ref": f"#/components/responses/{route.error.__name__}{s}"} for s in _statuses(route)}
    if route.unwell is not None:
        made[str(STOPPING)] = {
            "description": "Nothing can answer now.",
            "headers": _headers(route),
            "content": {JSON: {"schema": refs[route.unwell]}},
        }
    return made


def _failures(routes: Sequence[Route]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every error that some route gives."""
    words = {str(kind.status): inspect.getdoc(kind) or "" for kind in ProxyError.__subclasses__()}
    for route in routes:
        for status in _statuses(route):
            schema = {"$ref": PLACE.format(name=route.error.__name__)}
            told: dict[str, Any] = {
                "description": words.get(status, _PASSED_ON),
                "headers": _headers(route, *(_AGAIN if status in ("429", "503", "5XX") else ())),
                "content": {JSON: {"schema": schema}},
            }
            yield f"{route.error.__name__}{status}", told

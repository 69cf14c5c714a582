"""Which kind of server an upstream is, from what it answers to a few GET requests.

| kind        | what tells it                                                   | further facts                        |
|-------------|-----------------------------------------------------------------|--------------------------------------|
| `vllm`      | `owned_by` `vllm` in the list of models                         | version from `/version`              |
| `sglang`    | `owned_by` `sglang`                                             | `/server_info` or `/get_server_info` |
| `llamacpp`  | `owned_by` `llamacpp`, or the header `Server: llama.cpp`        | slots from `/props`                  |
| `trtllm`    | `owned_by` `tensorrt_llm`                                       | version from `/version`              |
| `dynamo`    | `owned_by` `nvidia`, and `/health` that lists `instances`       |                                      |
| `tgi`       | models that own themselves, and `/info` with `max_total_tokens` | version from `/info`                 |
| `magnitude` | the header `Server: magnitude`, or `owned_by` `magnitude`       |                                      |

Everything else is `openai`: told plain OpenAI fields only.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from magnitude_proxy.config import UpstreamConfig, UpstreamKind
from magnitude_proxy.upstream.adapters.server import Order, Server, read_version

_OWNERS: dict[str, UpstreamKind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "tensorrt_llm": "trtllm",
    "magnitude": "magnitude",
}
_SOFTWARE: dict[str, UpstreamKind] = {"llama.cpp": "llamacpp", "magnitude": "magnitude"}
_VERSION_PATH = re.compile(r"/v\d+$")
MOST_SLOTS = 4096


class Reply(NamedTuple):
    """A server's answer to a GET request; `software` is its `Server` header."""

    status: int
    software: str
    body: bytes


Ask = Callable[[str], Awaitable[Reply | None]]


class ModelEntry(msgspec.Struct, frozen=True):
    """One entry of `GET /models`."""

    id: str
    owned_by: Any = None


class ModelList(msgspec.Struct, frozen=True):
    """The body of `GET /models`."""

    data: list[ModelEntry] = []


async def recognise(config: UpstreamConfig, ask: Ask) -> Server | None:
    """Returns what the server is; None when it does not answer.

    A configured kind is taken as it is and only its facts are asked for. `ask` gives the reply to a URL, None for none.
    """
    base = config.url.rstrip("/")
    root = _VERSION_PATH.sub("", base)
    if config.kind != "auto":
        return await _facts(config.kind, root, ask)
    listed = await ask(f"{base}/models")
    if listed is None:
        return None
    kind = judge(listed)
    if kind in ("dynamo", "tgi") and not _confirms(kind, await _object(root, _WITNESS[kind], ask)):
        return Server()
    return await _facts(kind, root, ask)


def judge(listed: Reply) -> UpstreamKind:
    """Returns the kind that a list of models speaks for; `dynamo` and `tgi` need a second witness."""
    software = listed.software.lower()
    if software in _SOFTWARE:
        return _SOFTWARE[software]
    try:
        entries = msgspec.json.decode(listed.body, type=ModelList).data if listed.status == 200 else []
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "openai"
    for entry in entries:
        if isinstance(entry.owned_by, str) and entry.owned_by in _OWNERS:
            return _OWNERS[entry.owned_by]
    if entries and all(entry.owned_by == "nvidia" for entry in entries):
        return "dynamo"
    return "tgi" if entries and all(entry.owned_by == entry.id for entry in entries) else "openai"


_WITNESS = {"dynamo": "/health", "tgi": "/info"}


def _confirms(kind: UpstreamKind, told: dict[str, Any]) -> bool:
    return "max_total_tokens" in told if kind == "tgi" else isinstance(told.get("instances"), list)


async def _facts(kind: UpstreamKind, root: str, ask: Ask) -> Server:
    """Returns the server with the facts that its kind has."""
    if kind in ("vllm", "trtllm"):
        return Server(kind, version=read_version((await _object(root, "/version", ask)).get("version")))
    if kind == "tgi":
        return Server(kind, version=read_version((await _object(root, "/info", ask)).get("version")))
    if kind == "llamacpp":
        slots = (await _object(root, "/props", ask)).get("total_slots")
        usable = isinstance(slots, int) and not isinstance(slots, bool) and 0 < slots <= MOST_SLOTS
        return Server(kind, slots=slots if usable else None)
    if kind == "sglang":
        told = await _object(root, "/server_info", ask) or await _object(root, "/get_server_info", ask)
        return Server(
            kind,
            version=read_version(told.get("version")),
            order=_order(told),
            keeps_sessions=told.get("enable_session_radix_cache") is True,
        )
    return Server(kind)


def _order(told: dict[str, Any]) -> Order:
    if told.get("enable_priority_scheduling") is not True:
        return "none"
    return "low_first" if told.get("schedule_low_priority_values_first") is True else "high_first"


async def _object(root: str, path: str, ask: Ask) -> dict[str, Any]:
    """Returns the JSON object at a path; an empty one where there is none."""
    reply = await ask(root + path)
    if reply is None or reply.status != 200:
        return {}
    try:
        found = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

"""`POST /v1/tools`: tools that later requests will have, their schemas compiled and their prompt computed ahead."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from magnitude_engine import api
from magnitude_proxy.chat import tenant_salt
from magnitude_proxy.errors import BadRequest, NotFound, ProxyError, from_failed
from magnitude_proxy.middleware import read_body
from magnitude_proxy.surface import SURFACE, json_response
from magnitude_proxy.telemetry import TOOLS_REGISTERED
from magnitude_proxy.wire.conversation import read_tools
from magnitude_proxy.wire.replies import Reply
from magnitude_proxy.wire.requests import MAX_TOOLS, Wire, WireTool, convert, decode_json

AT_ONCE = 2
_PLACE = re.compile(r"tools\[(\d+)\]")


class ToolsRequest(Wire, frozen=True, kw_only=True):
    """Body of the request; `system` is the system message that requests with these tools will begin with."""

    tools: Annotated[list[WireTool], Meta(max_length=MAX_TOOLS)] | None = None
    system: str = ""


class ToolReply(Reply, frozen=True, kw_only=True):
    """One registered tool.

    Attributes:
        grammar: `exact` where the token masks enforce the whole schema; `checked` where arguments that they allow are
            checked before they are sent, for the sake of `checked_keywords`.
    """

    name: str
    grammar: Literal["exact", "checked"]
    checked_keywords: tuple[str, ...] = ()
    status: Literal["compiled"] = "compiled"
    object: Literal["tool"] = "tool"


class ToolsReply(Reply, frozen=True, kw_only=True):
    """Body of the answer.

    Attributes:
        ignored_keywords: keywords that assert nothing, because no standard defines them, with their place.
        prefix: `queued`, the prompt's beginning is computed when nothing else runs; `off`, this server keeps nothing.
    """

    data: tuple[ToolReply, ...]
    ignored_keywords: tuple[str, ...]
    prefix: Literal["queued", "off"]
    object: Literal["list"] = "list"


async def tools(request: web.Request) -> web.Response:
    """Registers tools; raises ProxyError, for a schema that can be neither enforced nor checked a 400 that names it."""
    surface, salt = request.app[SURFACE], tenant_salt(request)
    asked = read_registration(await read_body(request), salt)
    if surface.worker is None:
        raise NotFound("this server has no local worker to register tools with; leave it out", code="no_worker")
    with surface.turnstile.entered("registrations", salt, AT_ONCE):
        told = await surface.worker.register(asked)
    surface.telemetry.count(TOOLS_REGISTERED, status="refused" if isinstance(told, api.Failed) else "compiled")
    if isinstance(told, api.Failed):
        raise refusal(told, asked.tools)
    reply = ToolsReply(
        data=tuple(map(_tool, told.tools)), ignored_keywords=told.ignored, prefix="queued" if told.ahead else "off"
    )
    return json_response(reply)


def read_registration(raw: bytes, salt: str) -> api.Register:
    """Returns what a body asks for; raises BadRequest."""
    asked = convert(decode_json(raw), ToolsRequest)
    given = asked.tools or []
    if not given and not asked.system:
        raise BadRequest("tools is empty: send tool definitions, or a system text", param="tools")
    for index, tool in enumerate(given):
        if tool.type != "function":
            raise BadRequest(
                f"tools[{index}].type must be function: no other kind has a schema", param=f"tools[{index}].type"
            )
    return api.Register(tenant=salt, request=f"tools-{uuid.uuid4().hex}", tools=read_tools(given), system=asked.system)


def refusal(failed: api.Failed, given: tuple[api.Tool, ...]) -> ProxyError:
    """Returns the error for a registration that failed; it names the tool besides its place."""
    found = _PLACE.match(failed.param or "")
    index = int(found[1]) if found else len(given)
    if index < len(given):
        failed = msgspec.structs.replace(failed, message=f"tool {given[index].name!r}: {failed.message}")
    return from_failed(failed)


def _tool(tool: api.RegisteredTool) -> ToolReply:
    return ToolReply(
        name=tool.name, grammar="checked" if tool.checked else "exact", checked_keywords=tuple(tool.checked)
    )

"""Between the published client's terms and the engine's own: a question as `Generate`, its events as a result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from magnitude_engine import api
from magnitude_engine.client.answers import CalledFunction, CalledTool, GenerateResult, StreamItem
from magnitude_engine.client.requests import Ask
from magnitude_engine.errors import EngineError, FeatureUnsupported, MagnitudeError, RequestError

TENANT = "local"

_T = TypeVar("_T")


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str = ""


class _Tool(msgspec.Struct):
    function: _Function


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    type: Literal["function"]
    function: _Named


class _Schema(msgspec.Struct):
    schema: dict[str, Any] | bool
    name: str = ""
    strict: bool | None = None


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class _Message(msgspec.Struct):
    role: api.Role
    content: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


def to_generate(ask: Ask, request: str, session: str, branch: str, seed: int) -> api.Generate:
    """Returns the engine's request for `ask`; `seed` is used where the caller set none.

    Raises:
        RequestError: a message, tool or option has the wrong form; `param` names it.
        FeatureUnsupported: an option that the engine does not serve.
    """
    options = ask.options
    if options.prune:
        raise FeatureUnsupported("prune is not served in process; leave it out", param="prune")
    if options.extra_body:
        raise FeatureUnsupported("extra_body is not served in process; leave it out", param="extra_body")
    if options.branch is not None:
        raise FeatureUnsupported("in process a branch is asked itself: engine.branches(session_id)", param="branch")
    stop = options.stop_sequences or ()
    logprobs = options.logprobs
    return api.Generate(
        request=request,
        epoch=0,
        tenant=TENANT,
        session=session,
        branch=branch,
        input=_input(ask),
        sampling=api.Sampling(
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=seed if options.seed is None else options.seed,
        ),
        max_tokens=options.max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        format=_format(options.response_format),
        logprobs=None if logprobs is None or logprobs is False else 0 if logprobs is True else logprobs,
    )


def _input(ask: Ask) -> api.Input:
    if ask.messages is None:
        return api.TextInput(text=ask.prompt)
    messages = _convert("messages", ask.messages, list[_Message])
    return api.ChatInput(
        messages=tuple(
            api.Message(
                role=message.role,
                content=message.content or "",
                name=message.name,
                tool_calls=tuple(
                    api.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                    for call in message.tool_calls or ()
                ),
                tool_call_id=message.tool_call_id,
            )
            for message in messages
        ),
        tools=read_tools(ask.options.tools or ()),
        tool_choice=_choice(ask.options.tool_choice),
    )


def _choice(given: str | Mapping[str, Any] | None) -> api.ToolChoice:
    if given is None or given == "auto":
        return api.ToolChoice()
    if given == "none":
        return api.ToolChoice(mode="none")
    if given == "required":
        return api.ToolChoice(mode="required")
    if isinstance(given, str):
        raise RequestError(
            f"tool_choice must be 'auto', 'none', 'required' or name a function, not {given[:32]!r}",
            param="tool_choice",
        )
    return api.ToolChoice(mode="named", name=_convert("tool_choice", given, _Choice).function.name)


def _format(given: Mapping[str, Any] | None) -> api.Format | None:
    if given is None:
        return None
    wanted = _convert("response_format", given, _Format)
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return api.JsonObjectFormat()
    if wanted.json_schema is None:
        raise RequestError(
            "response_format.json_schema is missing; type json_schema needs it", param="response_format.json_schema"
        )
    described = wanted.json_schema
    return api.JsonSchemaFormat(schema=described.schema, strict=bool(described.strict), name=described.name)


def read_tools(given: Iterable[Mapping[str, Any]]) -> tuple[api.Tool, ...]:
    """Returns OpenAI tool definitions in the engine's terms.

    Raises:
        RequestError: one has the wrong form, or a name stands twice; the message says which, `param` is `tools`.
    """
    tools: dict[str, api.Tool] = {}
    for index, tool in enumerate(_convert("tools", given, list[_Tool])):
        function = tool.function
        place = f"tools[{index}].function.name"
        if not function.name:
            raise RequestError(f"{place} is empty; give the function a name", param="tools")
        if function.name in tools:
            raise RequestError(f"{place} {function.name!r} is used twice; names must differ", param="tools")
        tools[function.name] = api.Tool(
            name=function.name, description=function.description or "", parameters=function.parameters or {}
        )
    return tuple(tools.values())


def _convert(param: str, value: Any, shape: type[_T]) -> _T:
    try:
        plain = dict(value) if isinstance(value, Mapping) else [dict(item) for item in value]
        return msgspec.convert(plain, type=shape)
    except (msgspec.ValidationError, TypeError, ValueError) as problem:
        where = str(problem).replace("`$", f"`{param}")
        raise RequestError(f"{param}: not in OpenAI's form: {where}", param=param) from problem


class EventCollector:
    """Gathers the events of one request."""

    def __init__(self, ask: Ask, request: str, session: str) -> None:
        self._logprobs_wanted = ask.options.logprobs is not None and ask.options.logprobs is not False
        self._request = request
        self._session = session
        self._text: list[str] = []
        self._calls: dict[int, CalledTool] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._finish = ""

    def add(self, event: api.AnswerEvent) -> StreamItem | None:
        """Takes the next event; returns what a caller gets to see of it, if anything.

        Raises:
            MagnitudeError: the request failed.
        """
        if isinstance(event, api.Failed):
            raise error_of(event)
        if isinstance(event, api.Completed):
            return StreamItem(text="", result=self._result(event.usage))
        if isinstance(event, api.Finished):
            self._finish = event.reason
        if isinstance(event, api.Delta):
            self._add_delta(event)
            return StreamItem(text=event.text, result=None) if event.text else None
        return None

    def _add_delta(self, event: api.Delta) -> None:
        self._text.append(event.text)
        self._logprobs += [_logprob(position) for position in event.logprobs]
        for piece in event.tool_calls:
            empty = CalledTool(id="", type="function", function=CalledFunction(name="", arguments=""))
            call = self._calls.setdefault(piece.index, empty)
            call["id"] = piece.id or call["id"]
            call["function"]["name"] = piece.name or call["function"]["name"]
            call["function"]["arguments"] += piece.arguments

    def _result(self, usage: api.Usage) -> GenerateResult:
        result = GenerateResult(
            text="".join(self._text),
            session_id=self._session,
            finish_reason=self._finish,
            usage=_usage(usage),
            route="local",
            request_id=self._request,
            tool_calls=[self._calls[index] for index in sorted(self._calls)],
        )
        if self._logprobs_wanted:
            result["logprobs"] = {"content": self._logprobs}
        return result


def _usage(usage: api.Usage) -> dict[str, Any]:
    """Returns OpenAI's usage object with the engine's own figures under `magnitude`, as a server sends it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "magnitude": {
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "forced_tokens": usage.forced_tokens,
            "cached_tokens": usage.cached_tokens,
            "cached_host_tokens": usage.cached_host_tokens,
            "cached_disk_tokens": usage.cached_disk_tokens,
            **({} if usage.miss is None else {"cache_miss": msgspec.structs.asdict(usage.miss)}),
        },
    }


def _logprob(position: api.TokenLogprob) -> dict[str, Any]:
    """Returns one position in OpenAI's form."""
    return _token(position) | {"top_logprobs": [_token(other) for other in position.top]}


def _token(token: api.TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


def error_of(failed: api.Failed) -> MagnitudeError:
    """Returns the error that `failed` reports."""
    for kind in _subclasses(MagnitudeError):
        if kind.code == failed.code:
            return kind(failed.message, param=failed.param) if failed.param else kind(failed.message)
    return EngineError(failed.message)


def _subclasses(kind: type[MagnitudeError]) -> Iterator[type[MagnitudeError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)

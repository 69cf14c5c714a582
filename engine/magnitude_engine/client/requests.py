"""What the published client sends: bodies of requests, and checks that need no server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import isfinite
from typing import Any, TypedDict

import msgspec

from magnitude_engine.config import AgentRuntimeConfig
from magnitude_engine.errors import RequestError

# How msgspec names a value of the wrong type, and its names in the caller's words.
_MISFIT = re.compile(r"Expected `([^`]+)`, got `([^`]+)` - at (`key` in )?`\$\.([^`]+)`")
_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "array": "a list",
    "object": "a mapping with text keys",
    "null": "None",
}
_KINDS = {"array": "list", "object": "dict", "null": "None"}


class AnswerOptions(TypedDict, total=False):
    """What `generate_optimized` and `chat` take beside their input; None means the server's default.

    Keys:
        temperature, top_p, seed: how to draw; temperature 0 is greedy, the same seed gives the same answer.
        max_tokens: most tokens of output.
        stop_sequences: texts that end the answer; they never appear in it.
        branch: id of a branch of the session (`session(...).fork()`); in process branches are asked themselves.
        track_feedback: store the step, so that later feedback can be credited to it.
        tools, tool_choice, response_format: as in OpenAI's Chat Completions.
        logprobs: how many alternatives per position (0 or True: the chosen token only).
        prune: what a chat's prompt may lose: `dead-ends`, `observations`, `thinking`; it changes what the model sees.
        extra_body: further fields of the request, for example `{"top_k": 40}`.
    """

    temperature: float | None
    top_p: float | None
    seed: int | None
    max_tokens: int | None
    stop_sequences: str | Sequence[str] | None
    branch: str | None
    track_feedback: bool
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    logprobs: int | bool | None
    prune: Sequence[str] | None
    extra_body: Mapping[str, Any] | None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`AnswerOptions` with their defaults; an unknown name raises TypeError."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_sequences: str | Sequence[str] | None = None
    branch: str | None = None
    track_feedback: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    logprobs: int | bool | None = None
    prune: Sequence[str] | None = None
    extra_body: Mapping[str, Any] | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One question in the client's terms: `messages` for chat, else the raw `prompt`."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str = ""
    session_id: str | None = None
    stream: bool = False
    options: Options = Options()

    @property
    def path(self) -> str:
        """The route under the endpoint."""
        return "/completions" if self.messages is None else "/chat/completions"


def prompt_ask(prompt: str, session_id: str | None, stream: bool, raw: bool, options: Options) -> Ask:
    """Returns the checked question `prompt`: the user's text of a chat, or with `raw` the model's own input.

    Raises:
        RequestError: an argument has the wrong form; `param` names it.
    """
    messages = None if raw else ({"role": "user", "content": prompt},)
    ask = Ask(messages=messages, prompt=prompt, session_id=session_id, stream=stream, options=options)
    check(ask)
    return ask


def chat_ask(
    messages: Sequence[Mapping[str, Any]] | None, session_id: str | None, stream: bool, options: Options
) -> Ask:
    """Returns the checked question of a chat.

    Raises:
        RequestError: an argument has the wrong form; `param` names it.
    """
    if messages is None:
        raise RequestError("messages must be a list of OpenAI messages, not None", param="messages")
    ask = Ask(messages=messages, session_id=session_id, stream=stream, options=options)
    check(ask)
    return ask


class _Product(msgspec.Struct, omit_defaults=True):
    """The `magnitude` part of a body."""

    session: str | None = None
    branch: str | None = None
    track_feedback: bool = False
    config: AgentRuntimeConfig | None = None
    prune: Sequence[str] | None = None


def encode(ask: Ask, model: str, config: AgentRuntimeConfig | None) -> bytes:
    """Returns the JSON body that asks `model`; `ask` was checked.

    Raises:
        RequestError: a value inside a field has no form in JSON.
    """
    options = ask.options
    body: dict[str, Any] = {
        "model": model,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "stop": options.stop_sequences or None,
        "tools": options.tools or None,
        "tool_choice": options.tool_choice,
        "response_format": options.response_format,
        "stream": ask.stream or None,
        "stream_options": {"include_usage": True} if ask.stream else None,
    }
    if ask.messages is None:
        body |= {"prompt": ask.prompt, "logprobs": _alternatives(options)}
    else:
        wanted = _alternatives(options)
        body |= {"messages": ask.messages, "logprobs": None if wanted is None else True, "top_logprobs": wanted or None}
    known = None if config == AgentRuntimeConfig() else config
    product = _Product(ask.session_id, options.branch, options.track_feedback, known, options.prune or None)
    body = {name: value for name, value in body.items() if value is not None}
    body |= {"magnitude": product, **(options.extra_body or {})}
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(f"the request cannot be written as JSON: {problem}") from problem


def _alternatives(options: Options) -> int | None:
    if options.logprobs is None or options.logprobs is False:
        return None
    return 0 if options.logprobs is True else options.logprobs


def check(ask: Ask) -> None:
    """Raises RequestError for an argument of the wrong form; `param` names it."""
    options = ask.options
    _check_types(ask)
    _check_types(options)
    if ask.session_id == "":
        raise RequestError("session_id must be a non-empty text, or None", param="session_id")
    if options.branch is not None and not (options.branch and ask.session_id):
        raise RequestError("branch must be a branch's id, beside the session_id of its session", param="branch")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {options.max_tokens}", param="max_tokens")
    for name, value in (("temperature", options.temperature), ("top_p", options.top_p)):
        # JSON has no such numbers: the encoder would send null, and the server would use its default.
        if value is not None and not isfinite(value):
            raise RequestError(f"{name} must be a finite number, not {value}", param=name)
    if ask.messages is None:
        for name in ("tools", "tool_choice", "response_format", "prune"):
            if getattr(options, name) is not None:
                raise RequestError(f"{name} needs the chat template: use raw=False", param=name)


def _check_types(given: Ask | Options) -> None:
    """Raises RequestError for the first field whose value is not of the declared type."""
    try:
        msgspec.convert(msgspec.structs.asdict(given), type=type(given))
    except msgspec.ValidationError as problem:
        found = _MISFIT.fullmatch(str(problem))
        if found is None:
            raise RequestError(f"an argument has the wrong form: {problem}") from problem
        allowed, got, in_key, place = found.groups()
        words = " or ".join(_WORDS.get(name, name) for name in allowed.split(" | "))
        param = re.split(r"[.\[]", place, maxsplit=1)[0]
        where = f"a key of {place}" if in_key else place
        raise RequestError(f"{where} must be {words}, not {_KINDS.get(got, got)}", param=param) from problem


class _Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Body for `/tools`."""

    tools: Sequence[Mapping[str, Any]]
    system: str = ""


def encode_tools(tools: Sequence[Mapping[str, Any]], system: str) -> bytes:
    """Returns the JSON body for `/tools`.

    Raises:
        RequestError: an argument has the wrong form, or no form in JSON.
    """
    _check_types(Options(tools=tools))
    if not isinstance(system, str):
        raise RequestError(f"system must be text, not {type(system).__name__}", param="system")
    try:
        return msgspec.json.encode(_Tools(tools=tools, system=system))
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(f"the tools cannot be written as JSON: {problem}", param="tools") from problem


class Feedback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session, or a branch of it, ended; `timestamp` is ISO 8601."""

    session_id: str
    success: bool
    error_reason: str | None = None
    timestamp: str
    branch: str | msgspec.UnsetType | None = msgspec.UNSET


def encode_feedback(feedback: Mapping[str, Any]) -> bytes:
    """Returns the JSON body for `/feedback`.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    try:
        checked = msgspec.convert(dict(feedback), type=Feedback)
    except msgspec.ValidationError as problem:
        raise RequestError(
            f"feedback needs session_id (text), success (bool), timestamp (ISO 8601 text) and optionally "
            f"error_reason (text or None) and branch (its id or None): {problem}"
        ) from problem
    if not checked.session_id:
        raise RequestError("feedback: session_id is empty", param="session_id")
    try:
        datetime.fromisoformat(checked.timestamp)
    except ValueError as problem:
        raise RequestError(
            f"feedback: timestamp must be ISO 8601, for example 2026-11-30T12:00:00Z, not {checked.timestamp!r}",
            param="timestamp",
        ) from problem
    return msgspec.json.encode(checked)

"""From a request on the wire to the neutral form that every route understands.

What is wrong for any server raises `BadRequest`. What is right but beyond the local worker becomes
`Asked.refusal`: an upstream may still serve it, and without one the client gets that refusal as a 400.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from magnitude_engine import api
from magnitude_engine.config import AgentRuntimeConfig
from magnitude_proxy.config import SessionLimits
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.identity import IdentityHints
from magnitude_proxy.pruning.scene import Pruned
from magnitude_proxy.routing.route import Kind
from magnitude_proxy.wire.canonical import canonical_tools
from magnitude_proxy.wire.conversation import read_choice, read_messages, read_prediction, read_tools
from magnitude_proxy.wire.form import read_format
from magnitude_proxy.wire.requests import (
    MAX_PROMPTS,
    ChatRequest,
    Common,
    CompletionRequest,
    MagnitudeOptions,
    convert,
    decode_json,
    ignored_fields,
)

DEFAULT_COMPLETION_TOKENS = 16
_SMALLEST_SHARE = 1e-9


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request.

    Attributes:
        body: the client's JSON without `magnitude`, for an upstream.
        inputs: one input per prompt; a conversation is one.
        generate: the worker's request, still without ids and tenant.
        include_usage: the client wants a usage chunk at the end of its stream.
        predicted: the client sent `prediction`, so that usage must account for it.
        limits: what the client allows its session (`magnitude.limits`).
        tracked: the client may tell later how the step went (`magnitude.track_feedback`).
        priority: what the body asks for, lower is sooner; None where it asks for none.
        prune: what the client wants to be dropped from the prompt, as words; `pruned` is what came of it.
        refusal: why the worker cannot serve this, when it cannot.
        canonical: its tools were brought into one order, as it asked.
    """

    kind: Kind
    body: dict[str, Any]
    model: str
    stream: bool
    inputs: tuple[api.Input, ...]
    generate: api.Generate
    hints: IdentityHints
    include_usage: bool = False
    predicted: bool = False
    tracked: bool = False
    priority: int | None = None
    prune: tuple[str, ...] = ()
    pruned: Pruned | None = None
    limits: SessionLimits | None = None
    refusal: api.Failed | None = None
    ignored: tuple[str, ...] = ()
    canonical: bool = False


def read_chat(raw: bytes, seed: int) -> Asked:
    """Returns the checked body of `POST /v1/chat/completions`; `seed` counts when the client sent none.

    Raises:
        BadRequest: names the field.
    """
    return chat_asked(decode_json(raw), seed)


def chat_asked(body: dict[str, Any], seed: int) -> Asked:
    """Returns the checked chat request in `body`, which is kept; see `read_chat`."""
    asked = convert(body, ChatRequest)
    canonical = bool(asked.tools) and asked.magnitude is not None and asked.magnitude.canonical_tools
    if canonical:
        body = {**body, "tools": canonical_tools(body["tools"])}
        asked = convert(body, ChatRequest)
    _check_stream(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    messages = read_messages(asked.messages)
    tools = read_tools(asked.tools or [])
    given = api.ChatInput(messages=messages, tools=tools, tool_choice=read_choice(asked, tools))
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    generate = _generate(asked, asked.max_completion_tokens or asked.max_tokens, logprobs, seed)
    if asked.prediction is not None:
        generate = msgspec.structs.replace(generate, prediction=read_prediction(asked.prediction))
    return Asked(
        kind="chat",
        body=_without_own_fields(body),
        model=asked.model or "",
        stream=bool(asked.stream),
        inputs=(given,),
        generate=generate,
        hints=_hints(asked, given),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        predicted=asked.prediction is not None,
        tracked=_tracked(asked),
        priority=_priority(asked),
        prune=tuple((asked.magnitude or MagnitudeOptions()).prune or ()),
        limits=(asked.magnitude or MagnitudeOptions()).limits,
        refusal=_refusal(_chat_refusals(asked)),
        ignored=ignored_fields(body, ChatRequest),
        canonical=canonical,
    )


def read_completion(raw: bytes, seed: int) -> Asked:
    """Returns the checked body of `POST /v1/completions`; `seed` counts when the client sent none.

    Raises:
        BadRequest: names the field.
    """
    body = decode_json(raw)
    asked = convert(body, CompletionRequest)
    _check_stream(asked)
    if asked.magnitude is not None and asked.magnitude.prune:
        raise BadRequest("magnitude.prune needs messages; only chats are pruned", param="magnitude.prune")
    inputs = _prompts(asked.prompt)
    first = inputs[0]
    text = first.text if isinstance(first, api.TextInput) else ",".join(map(str, first.ids))
    generate = _generate(asked, asked.max_tokens or DEFAULT_COMPLETION_TOKENS, asked.logprobs, seed)
    return Asked(
        kind="completions",
        body=_without_own_fields(body),
        model=asked.model or "",
        stream=bool(asked.stream),
        inputs=inputs,
        generate=msgspec.structs.replace(generate, echo=bool(asked.echo)),
        hints=_hints(asked, None, text),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        tracked=_tracked(asked),
        priority=_priority(asked),
        limits=(asked.magnitude or MagnitudeOptions()).limits,
        refusal=_refusal(_completion_refusals(asked)),
        ignored=ignored_fields(body, CompletionRequest),
    )


def _without_own_fields(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "magnitude"} if "magnitude" in body else body


def _check_stream(asked: Common) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest(
            "stream_options is only for streams; send stream: true or leave it out", param="stream_options"
        )


def _prompts(prompt: object) -> tuple[api.TextInput | api.TokenInput, ...]:
    """Returns one input per prompt: a text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return (api.TextInput(text=prompt),)
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt must be a text, token ids, or a list of these", param="prompt")
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return (api.TokenInput(ids=tuple(prompt)),)
    if len(prompt) > MAX_PROMPTS:
        raise BadRequest(f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS}", param="prompt")
    if kinds == {str}:
        return tuple(api.TextInput(text=part) for part in prompt)
    if kinds == {list}:
        for index, part in enumerate(prompt):
            if not part:
                raise BadRequest(f"prompt[{index}] is empty", param=f"prompt[{index}]")
        return tuple(api.TokenInput(ids=tuple(part)) for part in prompt)
    raise BadRequest("prompt mixes texts and token ids; send one kind", param="prompt")


def _generate(asked: Common, max_tokens: int | None, logprobs: int | None, seed: int) -> api.Generate:
    stop = asked.stop or ()
    return api.Generate(
        request="",
        epoch=0,
        tenant="",
        session="",
        input=api.TextInput(text=""),
        sampling=_sampling(asked, seed),
        n=asked.n or 1,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(asked.ignore_eos),
        format=read_format(asked),
        partial_calls=bool(asked.stream),
        logprobs=logprobs,
        preferences=_preferences((asked.magnitude or MagnitudeOptions()).config),
    )


def _sampling(asked: Common, seed: int) -> api.Sampling:
    """Returns the distribution; a `top_p` of 0 keeps the likeliest token, a `top_k` of -1 the whole vocabulary."""
    return api.Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else max(asked.top_p, _SMALLEST_SHARE),
        top_k=max(0, asked.top_k or 0),
        min_p=asked.min_p or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        logit_bias=_logit_bias(asked.logit_bias or {}),
        seed=seed if asked.seed is None else asked.seed,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise BadRequest(f"logit_bias: {token[:32]!r} is not a token id", param="logit_bias")
        biases[int(token)] = bias
    return biases


def _preferences(config: AgentRuntimeConfig | None) -> api.Preferences:
    config = config or AgentRuntimeConfig()
    return api.Preferences(
        speculation=config.speculative_decoding_enabled is not False,
        predictive_caching=config.enable_predictive_caching is not False,
        max_batch_size=config.max_batch_size,
    )


def _tracked(asked: Common) -> bool:
    return asked.magnitude is not None and asked.magnitude.track_feedback


def _priority(asked: Common) -> int | None:
    own = asked.magnitude.priority if asked.magnitude is not None else None
    return asked.priority if own is None else own


def _hints(asked: Common, chat: api.ChatInput | None, text: str | None = None) -> IdentityHints:
    options = asked.magnitude or MagnitudeOptions()
    named = (asked.metadata or {}).get("session_id")
    return IdentityHints(
        magnitude_session=options.session,
        magnitude_branch=options.branch,
        magnitude_parent=options.parent,
        session_id=asked.session_id,
        program_id=asked.program_id,
        metadata_session_id=named if isinstance(named, str) else None,
        prompt_cache_key=asked.prompt_cache_key,
        messages=chat.messages if chat else (),
        tools=chat.tools if chat else (),
        text=text,
    )


def _refusal(reasons: Iterator[tuple[str, str]]) -> api.Failed | None:
    """Returns the first reason as the event that a client without an upstream gets."""
    for field, words in reasons:
        message = f"{field}: {words}; leave it out, or configure an upstream that serves it"
        return api.Failed(request="", epoch=0, code="unsupported_feature", message=message, param=field)
    return None


def _form_refusals(asked: Common) -> Iterator[tuple[str, str]]:
    for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(asked.structured_outputs, name, None) not in (None, False):
            yield f"structured_outputs.{name}", "the local worker does not serve it"


def _chat_refusals(asked: ChatRequest) -> Iterator[tuple[str, str]]:
    """Yields what the worker cannot do, field by field."""
    yield from _form_refusals(asked)
    if isinstance(asked.tool_choice, dict) and asked.tool_choice.get("type") != "function":
        yield "tool_choice", "the local worker serves none, auto, required and a named function only"
    if any(tool.type != "function" for tool in asked.tools or ()):
        yield "tools", "the local worker serves function tools only"
    if asked.modalities and asked.modalities != ["text"]:
        yield "modalities", "the local worker serves text only"
    for name in ("audio", "functions", "function_call", "web_search_options"):
        if getattr(asked, name) is not None:
            yield name, "the local worker does not serve it"
    for index, message in enumerate(asked.messages):
        if message.role == "function":
            yield f"messages[{index}].role", "function messages are deprecated, use role tool"
        if isinstance(message.content, list):
            for at, part in enumerate(message.content):
                if part.type not in ("text", "refusal"):
                    yield f"messages[{index}].content[{at}]", f"the local worker does not read {part.type} parts"
        for at, call in enumerate(message.tool_calls or ()):
            if call.type != "function":
                yield f"messages[{index}].tool_calls[{at}]", "the local worker knows function calls only"


def _completion_refusals(asked: CompletionRequest) -> Iterator[tuple[str, str]]:
    """Yields what the worker cannot do, field by field."""
    yield from _form_refusals(asked)
    if asked.suffix:
        yield "suffix", "the local worker does not fill in the middle"
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        yield "best_of", "the local worker serves best_of equal to n only"

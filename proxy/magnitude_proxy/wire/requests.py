"""The requests of Chat Completions and Completions as they stand on the wire, and how bytes become them.

`decode_json` takes only JSON that every reader understands the same way: UTF-8, no NaN or Infinity, no lone
surrogates, no duplicate keys, at most `MAX_DEPTH` levels. `convert` checks types and bounds. Both raise
`BadRequest` whose `param` is the JSON path of the field. Fields that are not declared here are ignored by the
worker and named in a response header; an upstream gets them as the client sent them.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from magnitude_engine.config import AgentRuntimeConfig
from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import SessionLimits
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.pruning.plan import Word

MAX_DEPTH = 64
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_024
MAX_STOPS = 16
OPENAI_STOPS = 4
MAX_PROMPTS = 128
INT64 = 2**63

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TokenLimit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TopCount = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SessionName = Annotated[str, Meta(min_length=1, max_length=512)]
Priority = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what clients send; further fields are allowed."""


class ContentPart(Wire, frozen=True, kw_only=True):
    """One part of a message's content; only the kinds `text` and `refusal` can be served locally."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Wire, frozen=True, kw_only=True):
    """The function of a tool call in the history; `arguments` is JSON text."""

    name: str
    arguments: str


class WireToolCall(Wire, frozen=True, kw_only=True):
    """A tool call in the history."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None


class WireMessage(Wire, frozen=True, kw_only=True):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class FunctionDefinition(Wire, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireTool(Wire, frozen=True, kw_only=True):
    """A tool definition; kind `custom` cannot be served locally."""

    type: Literal["function", "custom"]
    function: FunctionDefinition | None = None


class StreamOptions(Wire, frozen=True, kw_only=True):
    """What a stream carries besides content."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SchemaFormat(Wire, frozen=True, kw_only=True):
    """The schema that an answer must satisfy."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class Prediction(Wire, frozen=True, kw_only=True):
    """What the client expects the answer to be, in large part."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ResponseFormat(Wire, frozen=True, kw_only=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Wire, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer as vLLM has it; at most one is set. A field of another name asks for nothing known."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class MagnitudeOptions(Wire, frozen=True, kw_only=True):
    """The product's own fields: which session and branch, what the client's program prefers, what to prune.

    Attributes:
        track_feedback: the step is kept, so that feedback can be credited to it.
        canonical_tools: tools come into one order first (`canonical.py`), which changes the prompt.
    """

    session: SessionName | None = None
    branch: SessionName | None = None
    parent: SessionName | None = None
    priority: Priority | None = None
    config: AgentRuntimeConfig | None = None
    track_feedback: bool = False
    prune: list[Word] | None = None
    limits: SessionLimits | None = None
    canonical_tools: bool = False


class Common(Wire, frozen=True, kw_only=True):
    """What both endpoints have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: TokenLimit | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=OPENAI_STOPS)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    session_id: str | None = None
    program_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    priority: Priority | None = None
    magnitude: MagnitudeOptions | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[WireMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[WireTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    max_completion_tokens: TokenLimit | None = None
    prediction: Prediction | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


Prompt = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class CompletionRequest(Common, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`; `prompt` is a text, texts, token ids, or lists of token ids."""

    prompt: Prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: Choices | None = None
    logprobs: TopCount | None = None


RequestType = TypeVar("RequestType", bound=Wire)
_FIELDS: dict[type[Wire], frozenset[str]] = {
    kind: frozenset(kind.__struct_fields__) for kind in (ChatRequest, CompletionRequest, MagnitudeOptions)
}
# A quote that is not escaped before a colon. The quote stands first, so that the search leaps from quote to quote.
_KEY_END = re.compile(rb'"(?<!\\")\s*:')
# A quote after two backslashes may end a key too.
_UNCLEAR_END = re.compile(rb'\\\\"\s*:')
_NUMBER = re.compile(rb'"([A-Za-z_]{1,64})"\s*:\s*(-?(?:NaN|Infinity|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?))')
_ENUMS = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "prediction.type": ("content",),
    "magnitude.prune": get_args(Word),
    "response_format.type": ("text", "json_object", "json_schema"),
}
_TYPES = {
    "str | array": "a string or an array",
    "str | object": "a string or an object",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "a string",
    "array": "an array",
    "object": "an object",
}
_PLAIN = re.compile("[A-Za-z0-9_.-]{1,64}")


def decode_json(raw: bytes) -> dict[str, Any]:
    """Returns the object in `raw`.

    Raises:
        BadRequest: it is not one, or not in the strict form that the module describes.
    """
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        field = _bad_number(raw)
        if field is not None:
            raise BadRequest(f"{field} must be a finite number", param=field, code="invalid_json") from error
        raise BadRequest(
            f"the body is not valid JSON in UTF-8: {error}; NaN, Infinity and lone surrogates are not JSON",
            code="invalid_json",
        ) from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {_kind(body)}", code="invalid_json")
    if _count_keys(body) != len(_KEY_END.findall(raw)) or _UNCLEAR_END.search(raw):
        _refuse_duplicates(raw)
    return body


def _bad_number(raw: bytes) -> str | None:
    """Returns the first key whose value is NaN, Infinity or a number beyond every range."""
    for match in _NUMBER.finditer(raw):
        key, digits = match[1].decode(), match[2]
        if digits[-1:] in b"Ny" or len(digits) > 400 or not math.isfinite(float(digits)):
            return key
    return None


def _count_keys(body: dict[str, Any]) -> int:
    """Returns how many keys all objects of `body` have; raises BadRequest below `MAX_DEPTH` levels."""
    keys = 0
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            if type(node) is dict:
                keys += len(node)
                below += [child for child in node.values() if type(child) is dict or type(child) is list]
            else:
                below += [child for child in node if type(child) is dict or type(child) is list]
        if not below:
            return keys
        level = below
    raise _too_deep()


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels; flatten it", code="invalid_json")


def _refuse_duplicates(raw: bytes) -> None:
    """Reads the body again, slowly; called only when the count of key ends leaves room for a duplicate."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            name = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"the key {name[:64]!r} stands twice in one object; send it once", param=name[:64])
        return found

    json.loads(raw, object_pairs_hook=unique)


def convert(body: dict[str, Any], kind: type[RequestType]) -> RequestType:
    """Returns `body` as a request.

    Raises:
        BadRequest: a field has the wrong type or is out of bounds; `param` is its path.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        raise _invalid(problem, place.rstrip("`").removeprefix("$").lstrip(".")) from error
    except ConfigError as error:
        name = f"magnitude.config.{error.param}"
        raise BadRequest(f"{name}: {error.message}", param=name) from error


def _invalid(problem: str, path: str) -> BadRequest:
    """Returns the error for one of msgspec's messages, in words that name the field and what it takes."""
    path = path.replace("[...]", "")
    missing = re.fullmatch("Object missing required field `(.*)`", problem)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{name} is missing; it is required", param=name, code="missing_required_parameter")
    unknown = re.search("unknown field `(.*)`", problem)
    if unknown:
        name = f"{path}.{unknown[1]}"
        return BadRequest(f"{name} is not a known field; leave it out", param=name)
    allowed = _ENUMS.get(path.rpartition("].")[2].partition("[")[0])
    if "enum" in problem and allowed:
        return BadRequest(f"{path} must be one of {', '.join(allowed)}", param=path)
    words = problem.replace(" | null", "")
    for name, meaning in _TYPES.items():
        words = words.replace(f"got `{name}`", f"got {meaning}").replace(f"`{name}`", meaning)
    for sign, meaning in ((" <= ", " of at most "), (" >= ", " of at least ")):
        words = words.replace(sign, meaning)
    return BadRequest(f"{path or 'the body'} is wrong: {words[:1].lower()}{words[1:]}", param=path or None)


def ignored_fields(body: dict[str, Any], kind: type[Wire]) -> tuple[str, ...]:
    """Returns the names of top-level and `magnitude` fields that nothing reads, fit for a header."""
    known = _FIELDS.get(kind) or frozenset(kind.__struct_fields__)
    names = [name for name in body if name not in known]
    options = body.get("magnitude")
    if isinstance(options, dict):
        names += [f"magnitude.{name}" for name in options if name not in _FIELDS[MagnitudeOptions]]
    return tuple(name for name in names if _PLAIN.fullmatch(name))[:32]


def _kind(value: object) -> str:
    """Returns the JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "an array"

"""A request as one server understands it: what is sent, or the field that it would not understand.

A field that changes the answer is sent in the server's own words or the request is refused, never left out; what
only helps is left out where the server has no words for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from magnitude_proxy.upstream.adapters.forms import FORM_FIELDS, Form, read_form, read_response_format
from magnitude_proxy.upstream.adapters.server import NAMES, Server
from magnitude_proxy.upstream.adapters.table import SAMPLING, Adapter, adapter
from magnitude_proxy.upstream.adapters.tell import Facts

# What only this proxy may tell a server: it decides whose cache is read, who goes first, which slot is overwritten.
RESERVED = frozenset(
    {
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_prompt", "cache_salt", "data_parallel_rank",
        "disaggregated_params", "extra_key", "id_slot", "kv_transfer_params", "magnitude", "nvext", "priority",
        "request_id", "rid", "routed_dp_rank", "session_id", "session_params",
    }
)  # fmt: skip
# What of Dynamo's extensions a client may still say: it concerns this request alone.
_OWN_HINTS = ("osl", "speculative_prefill")
_NOTHING: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "ignore_eos": (False,),
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "echo": (False,),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "structured_outputs": ({},),
}


class Sent(NamedTuple):
    """The body and the headers to send."""

    body: dict[str, Any]
    headers: dict[str, str]


class Refused(NamedTuple):
    """The server has no words for `field`, which changes the answer."""

    field: str

    def words(self, name: str, server: Server) -> str:
        """Returns what a client of upstream `name` is told."""
        return (
            f"{self.field}: upstream {name} ({NAMES[server.kind]}) has no field for it and would answer as if it were "
            f"not there; leave it out, or configure a server that has one (kind and fields of upstream {name} say what "
            "it knows)"
        )


def adapt(body: dict[str, Any], server: Server, facts: Facts, extra: Iterable[str] = ()) -> Sent | Refused:
    """Returns `body` (a checked one) as `server` understands it; `extra` are further fields that it knows."""
    known = adapter(server)
    understood = known.fields.union(extra)
    made = {name: value for name, value in body.items() if name not in RESERVED and name not in known.drops}
    refused = _lacking(made, known, understood)
    if refused is not None:
        return refused
    for name in SAMPLING.intersection(made) - understood:
        del made[name]
    if known.whole_top_k is not None and made.get("top_k") == -1:
        made["top_k"] = known.whole_top_k
    refused = _write_form(made, known, understood, facts.chat)
    if refused is not None:
        return refused
    for name, other in known.renames.items():
        value = made.pop(name, None)
        if value is not None:
            made[other] = value
    told = known.tell(facts, server)
    made |= told.body
    if server.kind == "dynamo":
        _keep_hints(made, body.get("nvext"))
    return Sent(made, told.headers)


def asks(body: dict[str, Any], name: str) -> bool:
    """True when a field asks for something: it is there and has not the value that it has by default."""
    value = body.get(name)
    if value is None or (name == "best_of" and value == (body.get("n") or 1)):
        return False
    return value not in _NOTHING.get(name, ())


def _lacking(body: dict[str, Any], known: Adapter, understood: frozenset[str]) -> Refused | None:
    """Returns the first field that the server would ignore, forms apart."""
    lacking = [
        name
        for name, value in body.items()
        if value is not None and (name in known.lacks or name in SAMPLING) and name not in understood
    ]
    return next((Refused(name) for name in sorted(lacking) if asks(body, name)), None)


def _write_form(body: dict[str, Any], known: Adapter, understood: frozenset[str], chat: bool) -> Refused | None:
    """Puts the form of the answer into `body` in the server's words."""
    form = read_form(body)
    if form is not None:
        if form.field.partition(".")[0] in understood:
            return None
        return _put(body, form, known, chat)
    for name in FORM_FIELDS - understood:
        body.pop(name, None)
    if not known.own_format and (chat or "response_format" in understood):
        return None
    form = read_response_format(body.get("response_format"))
    return None if form is None else _put(body, form, known, chat)


def _put(body: dict[str, Any], form: Form, known: Adapter, chat: bool) -> Refused | None:
    if form.more:
        return Refused(f"structured_outputs.{form.more[0]}")
    written = known.write(form, chat)
    if written is None:
        return Refused(form.field)
    for name in FORM_FIELDS | {"response_format"}:
        body.pop(name, None)
    body |= written
    return None


def _keep_hints(body: dict[str, Any], given: object) -> None:
    """Adds to `nvext` what a client may say of its own request."""
    hints = given.get("agent_hints") if isinstance(given, dict) else None
    if isinstance(hints, dict):
        own = {name: hints[name] for name in _OWN_HINTS if name in hints}
        body["nvext"]["agent_hints"] = {**own, **body["nvext"].get("agent_hints", {})}

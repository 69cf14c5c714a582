"""The form that a client wants its answer in, written as each kind of server takes it.

A writer gets the form and whether the request is a chat, and returns the fields of the body that ask for it; None
where the server has no words for it. A pattern and a list of texts are one answer's whole text everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

FormKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
_KINDS: tuple[FormKind, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_GUIDED: tuple[FormKind, ...] = ("json", "regex", "choice", "grammar")
FORM_FIELDS = frozenset({"structured_outputs", *(f"guided_{kind}" for kind in _GUIDED)})
# What every server's regular expressions know as meaning something; other characters stand for themselves.
_META = re.compile(r"([\\.+*?()|\[\]{}^$])")
_GBNF = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ANY_OBJECT = {"type": "object"}
# The name of a schema whose client gave it none.
_UNNAMED = "output"

Fields = dict[str, Any]


class Form(NamedTuple):
    """What the answer must look like; `field` is where the client said so, `more` what else stood there."""

    kind: FormKind
    value: Any
    field: str
    more: tuple[str, ...] = ()


Writer = Callable[[Form, bool], Fields | None]


def read_form(body: Fields) -> Form | None:
    """Returns the form that the fields beyond OpenAI's ask for; the body was checked, so there is one at most."""
    for kind in _GUIDED:
        value = body.get(f"guided_{kind}")
        if value is not None:
            return Form(kind, _schema(value) if kind == "json" else value, f"guided_{kind}")
    given = {
        name: value for name, value in (body.get("structured_outputs") or {}).items() if value not in (None, False)
    }
    for kind in _KINDS:
        if kind in given:
            value = given.pop(kind)
            field = f"structured_outputs.{kind}"
            return Form(kind, _schema(value) if kind == "json" else value, field, tuple(given))
    return None


def read_response_format(given: object) -> Form | None:
    """Returns the form that `response_format` asks for; None for text or what is not known."""
    if not isinstance(given, dict):
        return None
    if given.get("type") == "json_object":
        return Form("json_object", True, "response_format")
    described = given.get("json_schema")
    if given.get("type") != "json_schema" or not isinstance(described, dict):
        return None
    return Form("json", described.get("schema"), "response_format")


def _schema(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value


def plain(form: Form, chat: bool) -> Fields | None:
    """OpenAI's `response_format`, which its completions do not have."""
    if not chat:
        return None
    if form.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.kind == "json":
        described = {"name": _UNNAMED, "schema": form.value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return None


def structured(form: Form, _: bool) -> Fields:
    """vLLM's `structured_outputs`."""
    return {"structured_outputs": {form.kind: form.value}}


def guided(form: Form, chat: bool) -> Fields | None:
    """The `guided_` fields of Dynamo and of vLLM before 0.11."""
    if form.kind in _GUIDED:
        return {f"guided_{form.kind}": form.value}
    return plain(form, chat)


def sglang(form: Form, _: bool) -> Fields | None:
    """SGLang's `regex` beside `response_format`, on both endpoints."""
    pattern = _pattern(form)
    return {"regex": pattern} if pattern is not None else plain(form, True)


def llamacpp(form: Form, chat: bool) -> Fields | None:
    """llama.cpp's grammars (GBNF) for texts to choose from; completions take a schema by itself."""
    if form.kind == "choice":
        return {"grammar": "root ::= " + " | ".join(f'"{_gbnf(text)}"' for text in form.value)}
    if chat or form.kind not in ("json", "json_object"):
        return plain(form, chat)
    return {"json_schema": form.value if form.kind == "json" else _ANY_OBJECT}


def trtllm(form: Form, _: bool) -> Fields | None:
    """TensorRT-LLM's `response_format`, which knows patterns, on both endpoints."""
    pattern = _pattern(form)
    if pattern is not None:
        return {"response_format": {"type": "regex", "regex": pattern}}
    return plain(form, True)


def tgi(form: Form, chat: bool) -> Fields | None:
    """TGI's `response_format` of a type and a value, in chats."""
    if not chat:
        return None
    pattern = _pattern(form)
    if pattern is not None:
        return {"response_format": {"type": "regex", "value": pattern}}
    if form.kind in ("json", "json_object"):
        return {"response_format": {"type": "json", "value": form.value if form.kind == "json" else _ANY_OBJECT}}
    return None


def _pattern(form: Form) -> str | None:
    """Returns the regular expression that a form is, where it is one."""
    if form.kind == "regex":
        return str(form.value)
    if form.kind == "choice":
        return "(" + "|".join(_META.sub(r"\\\1", text) for text in form.value) + ")"
    return None


def _gbnf(text: str) -> str:
    """Returns a text as it stands inside a GBNF literal."""
    return "".join(_GBNF.get(char) or (char if char >= " " else f"\\x{ord(char):02X}") for char in text)

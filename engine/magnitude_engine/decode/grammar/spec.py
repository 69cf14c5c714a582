"""What an answer may look like, as a request asks for it.

Two specifications with the same `key` allow the same texts and are compiled once. `param` names the request's
field in errors and is not part of the key.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from magnitude_engine.api import Frozen, Tool
from magnitude_engine.decode.tools import ToolFormat

CallMode = Literal["auto", "required", "named"]


class JsonObject(Frozen, tag="json_object", frozen=True, kw_only=True):
    """Any JSON object."""

    param: str = "response_format"

    def key(self) -> str:
        """Returns the content hash (hex)."""
        return content_key("json_object")


class JsonSchema(Frozen, tag="json_schema", frozen=True, kw_only=True):
    """JSON that a JSON Schema (a dict or a bool) accepts; its properties come in the schema's order."""

    schema: Any
    param: str = "response_format.json_schema.schema"

    def key(self) -> str:
        """Returns the content hash (hex)."""
        return content_key("json_schema", self.schema)


class Regex(Frozen, tag="regex", frozen=True, kw_only=True):
    """Text that a regular expression (Rust's syntax, without look-around) matches as a whole."""

    pattern: str
    param: str = "guided_regex"

    def key(self) -> str:
        """Returns the content hash (hex)."""
        return content_key("regex", self.pattern)


class Lark(Frozen, tag="lark", frozen=True, kw_only=True):
    """Text that a Lark grammar (llguidance's dialect) derives from its rule `start`."""

    source: str
    param: str = "guided_grammar"

    def key(self) -> str:
        """Returns the content hash (hex)."""
        return content_key("lark", self.source)


class ToolCalls(Frozen, tag="tool_calls", frozen=True, kw_only=True):
    """Tool calls in a model's own format.

    Attributes:
        mode: `auto`: free text in which a begin marker starts a call that must be valid; `required`: calls only, at
            least one; `named`: one call of the tool `name`.
        parallel: whether more than one call may come; where not, nothing follows the first.
        gap: what stands between the markers and the JSON object, and between two calls, as the chat template
            writes it, so that the replayed text is the generated one.
    """

    tools: tuple[Tool, ...]
    format: ToolFormat
    mode: CallMode = "auto"
    name: str | None = None
    parallel: bool = True
    gap: str = "\n"
    param: str = "tools"

    def key(self) -> str:
        """Returns the content hash (hex)."""
        tools = [(tool.name, tool.parameters) for tool in self.tools]
        markers = (self.format.begin, self.format.end, self.gap)
        return content_key("tool_calls", tools, self.mode, self.name, self.parallel, markers)


Spec = JsonObject | JsonSchema | Regex | Lark | ToolCalls


def content_key(kind: str, *content: Any) -> str:
    """Returns the SHA-256 (hex) of JSON-like content; the order of keys counts, since it decides that of the output.

    Raises:
        RecursionError: nested too deeply to be written (see `schema.check_size`).
    """
    written = json.dumps([kind, *content], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()

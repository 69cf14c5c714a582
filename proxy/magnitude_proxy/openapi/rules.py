"""Every rule, by the struct that it is of.

Of requests only what is refused whatever serves them stands here, so that a body outside of a schema is a 400. What no
schema says (that a tool's result answers a call before it, that names of tools differ) is checked all the same.
"""

from __future__ import annotations

from magnitude_proxy.feedback import FeedbackRequest
from magnitude_proxy.openapi.chat_rules import CHAT
from magnitude_proxy.openapi.dialect_rules import MESSAGES, RESPONSES
from magnitude_proxy.openapi.rule import FILLED, LISTED, Rule, having, typed
from magnitude_proxy.tools import ToolsRequest
from magnitude_proxy.wire.events import KINDS, Fault, Receipt

RULES: dict[type, Rule] = {
    **CHAT,
    **MESSAGES,
    **RESPONSES,
    ToolsRequest: Rule(
        properties={"tools": {"items": having({"type": {"const": "function"}})}},
        all_of=({"anyOf": [having({"tools": LISTED}), having({"system": FILLED})]},),
    ),
    FeedbackRequest: Rule(properties={"timestamp": {"pattern": "^[0-9]{4}", "examples": ["2026-11-30T12:00:00Z"]}}),
    Fault: typed("error"),
    Receipt: typed("acknowledged"),
    **{kind: Rule(properties={"type": {"const": name}}, required=("type",)) for name, kind in KINDS.items()},
}

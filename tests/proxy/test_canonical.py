"""Tools in one order: what is moved, and what stays because its order may be meant."""

from __future__ import annotations

import json
import random
from typing import Any

from magnitude_proxy.wire.canonical import canonical_tools
from magnitude_proxy.wire.intake import read_chat

THOUGHT = {
    "type": "object",
    "description": "Think before you act.",
    "properties": {
        "thought": {"type": ["string", "null"], "default": {"b": 1, "a": 2}},
        "command": {"enum": ["run", "ask", "wait"], "description": "What to do."},
        "places": {"anyOf": [{"items": {"type": "string", "minLength": 1}, "type": "array"}, {"type": "null"}]},
    },
    "required": ["thought", "command"],
    "additionalProperties": False,
    "$defs": {"z": {"type": "string", "maxLength": 3}, "a": {"type": "number"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": THOUGHT, "strict": True}}
    for name in ("ask", "run", "wait")
]
MOVABLE = ("properties", "$defs", "default")


def shuffled(value: Any, draw: random.Random, key: str = "") -> Any:
    """Returns JSON that means the same, in the order that a program without order may send it in."""
    if isinstance(value, dict):
        items = [(name, shuffled(each, draw, name)) for name, each in value.items()]
        if key not in MOVABLE:
            draw.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        each = [shuffled(item, draw) for item in value]
        return draw.sample(each, len(each)) if key in ("required", "tools") else each
    return value


def test_every_order_that_means_the_same_becomes_one_and_nothing_else_moves() -> None:
    draw = random.Random(4)
    one = json.dumps(canonical_tools(TOOLS))
    for _ in range(50):
        assert json.dumps(canonical_tools(shuffled(TOOLS, draw, "tools"))) == one
    made = json.loads(one)
    assert made == TOOLS
    parameters = made[0]["function"]["parameters"]
    assert [list(parameters[key]) for key in ("properties", "$defs")] == [["thought", "command", "places"], ["z", "a"]]
    for meant in ('["run", "ask", "wait"]', '["string", "null"]', '{"b": 1, "a": 2}'):
        assert meant in one


def test_nothing_is_moved_unasked() -> None:
    body = {"messages": [{"role": "user", "content": "Go."}], "tools": TOOLS[::-1]}
    plain = read_chat(json.dumps(body).encode(), 0)
    asked = read_chat(json.dumps({**body, "magnitude": {"canonical_tools": True}}).encode(), 0)
    assert json.dumps(plain.body["tools"]) == json.dumps(TOOLS[::-1])
    assert (plain.canonical, asked.canonical) == (False, True)
    (one,), (other,) = plain.inputs, asked.inputs
    assert [tool.name for tool in one.tools] == ["wait", "run", "ask"]  # type: ignore[union-attr]
    assert [tool.name for tool in other.tools] == ["ask", "run", "wait"]  # type: ignore[union-attr]
    assert asked.body["tools"] == canonical_tools(TOOLS)
    assert "magnitude" not in asked.body

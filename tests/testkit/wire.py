"""Checks answers against OpenAI's own response schemas, where the shared data is present.

The schemas are OpenAPI's: `nullable` is turned into JSON Schema's union with null. Chunks of streamed completions
have a null `finish_reason` until the last, as OpenAI sends them, although the published schema has one type for body
and chunk and does not say so: `check_completion_chunk` allows just that.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "wire" / "openai_response_schemas.json"


@functools.cache
def _validator(entry: str) -> Draft202012Validator | None:
    """Returns the validator of one entry point, None where the shared data is absent."""
    if not SCHEMAS.exists():
        return None
    whole = _with_null(json.loads(SCHEMAS.read_text("utf-8")))
    return Draft202012Validator({"$ref": f"#/$defs/{entry}", "$defs": whole["$defs"]})


def _with_null(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_null(child) for child in node]
    if not isinstance(node, dict):
        return node
    made = {name: _with_null(child) for name, child in node.items() if name != "nullable"}
    return {"anyOf": [made, {"type": "null"}]} if node.get("nullable") is True else made


def needs_schemas() -> None:
    """Skips a test whose only point are the schemas where they are absent."""
    if not SCHEMAS.exists():
        pytest.skip("../shared/data/wire is not present")


def check(entry: str, body: Any) -> None:
    """Fails when `body` does not fit the schema `entry`, such as `CreateChatCompletionResponse`."""
    validator = _validator(entry)
    if validator is None:
        return
    problem = jsonschema.exceptions.best_match(validator.iter_errors(body))
    assert problem is None, f"{entry}: {problem.json_path}: {problem.message}\n{json.dumps(body)[:2000]}"


def check_error(body: Any) -> dict[str, Any]:
    """Checks an error body and returns what stands under `error`."""
    check("ErrorResponse", body)
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def check_chat_chunk(chunk: Any) -> None:
    """Checks one chunk of a streamed chat."""
    check("CreateChatCompletionStreamResponse", chunk)


def check_completion_chunk(chunk: Any) -> None:
    """Checks one chunk of a streamed completion; see the module."""
    ended = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]
    filled = {**chunk, "choices": ended}
    if filled.get("usage", ...) is None:
        del filled["usage"]
    check("CreateCompletionResponse", filled)

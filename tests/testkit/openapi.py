"""A served OpenAPI document, and checks of requests and answers against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator


class Document:
    """A document as it was served."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    @property
    def operations(self) -> dict[tuple[str, str], Any]:
        """Every operation by method and path."""
        return {
            (method.upper(), path): operation
            for path, methods in self.body["paths"].items()
            for method, operation in methods.items()
        }

    def takes(self, path: str, media: str = "application/json") -> Draft202012Validator:
        """Returns the validator of what a POST takes: the body, or one item of a body of many."""
        return self._of(self.operations["POST", path]["requestBody"]["content"][media])

    def gives(self, method: str, path: str, status: int = 200, media: str = "application/json") -> Draft202012Validator:
        """Returns the validator of an answer: the body, or one item of a body of many."""
        responses = self.operations[method, path]["responses"]
        response = responses.get(str(status)) or responses[f"{status // 100}XX"]
        return self._of(self.resolved(response)["content"][media])

    def resolved(self, node: dict[str, Any]) -> Any:
        """Returns what a reference names; anything else as it is."""
        if "$ref" not in node:
            return node
        found: Any = self.body
        for step in node["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return found

    def references(self) -> set[str]:
        """Returns every reference in the document."""
        return set(_references(self.body))

    def _of(self, content: dict[str, Any]) -> Draft202012Validator:
        schema = content["schema"]
        if "properties" in schema:
            schema = _told(schema["properties"]["data"])
        return Draft202012Validator({**schema.get("items", schema), "components": self.body["components"]})


def _told(data: dict[str, Any]) -> Any:
    """Returns the schema of what an event's data says, as JSON."""
    return next(one["contentSchema"] for one in (data, *data.get("anyOf", ())) if "contentSchema" in one)


def check(validator: Draft202012Validator, value: Any) -> None:
    """Fails when `value` does not fit."""
    problem = jsonschema.exceptions.best_match(validator.iter_errors(value))
    assert problem is None, f"{problem.json_path}: {problem.message}\n{str(value)[:2000]}"


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)

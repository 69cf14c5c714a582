"""Values: wrong ones are refused by name, and the schema knows the product's settings exactly."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from magnitude_engine.config import EngineConfig
from magnitude_proxy.config import (
    BranchConfig,
    DeadlineConfig,
    Limits,
    ListenConfig,
    RetryConfig,
    StoreConfig,
    TelemetryConfig,
    UpstreamConfig,
)
from testkit import helm

DEFAULT, GPU, PROXY_ONLY = helm.VALUES
SCHEMA: Any = json.loads((helm.CHART / "values.schema.json").read_text("utf-8"))
BOUNDS = ("type", "minimum", "maximum", "exclusiveMinimum", "enum")

# What the chart decides itself and so keeps out of the values.
DECIDED: dict[str, tuple[type[msgspec.Struct], set[str]]] = {
    "listen": (ListenConfig, {"host", "port", "admin_host", "admin_port"}),
    "deadlines": (DeadlineConfig, set()),
    "branches": (BranchConfig, set()),
    "retry": (RetryConfig, set()),
    "limits": (Limits, set()),
    "telemetry": (TelemetryConfig, set()),
    "storeSettings": (StoreConfig, {"url"}),
    "engine": (EngineConfig, {"model_path", "model_name", "kv_dir"}),
    "upstream": (UpstreamConfig, {"key_file"}),
}


def product_bounds(struct: type[msgspec.Struct], name: str) -> dict[str, Any]:
    """Returns type, bounds and choices of a field as the product declares them."""
    _, components = msgspec.json.schema_components([struct])
    field = components[struct.__name__]["properties"][name]
    parts = [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]
    found = {key: parts[0][key] for key in BOUNDS if key in parts[0]}
    return {**found, "enum": set(found["enum"])} if "enum" in found else found


def chart_bounds(definition: str, name: str) -> dict[str, Any]:
    field = SCHEMA["definitions"][definition]["properties"][name]
    if "$ref" in field:
        field = SCHEMA["definitions"][field["$ref"].rpartition("/")[2]]
    found = {key: field[key] for key in BOUNDS if key in field}
    return {**found, "enum": set(found["enum"])} if "enum" in found else found


@pytest.mark.parametrize("definition", DECIDED)
def test_the_schema_has_the_products_settings(definition: str) -> None:
    struct, decided = DECIDED[definition]
    names = {field.name for field in msgspec.structs.fields(struct)} - decided
    offered = set(SCHEMA["definitions"][definition]["properties"]) - {"keySecret"}
    assert offered == names
    for name in names:
        assert chart_bounds(definition, name) == product_bounds(struct, name), f"{definition}.{name}"


def test_the_schema_allows_no_unknown_keys() -> None:
    def objects(node: Any) -> list[Any]:
        if isinstance(node, list):
            return [found for item in node for found in objects(item)]
        if not isinstance(node, dict):
            return []
        below = [found for item in node.values() for found in objects(item)]
        return [node, *below] if isinstance(node.get("properties"), dict) else below

    strict = objects(SCHEMA)
    assert len(strict) > 20
    assert [node for node in strict if node["additionalProperties"] is not False] == []


def test_every_value_is_documented_and_every_documented_value_known() -> None:
    def compare(node: Any, values: Any, place: str) -> None:
        if "$ref" in node:
            node = SCHEMA["definitions"][node["$ref"].rpartition("/")[2]]
        known = node.get("properties")
        if known is None or not isinstance(values, dict) or not values:
            return
        assert set(values) == set(known) - {"global"}, place
        for name, value in values.items():
            compare(known[name], value, f"{place}.{name}")

    values = yaml.safe_load((helm.CHART / "values.yaml").read_text("utf-8"))
    compare(SCHEMA, values, "values")


def test_chart_images_and_package_have_one_version() -> None:
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text("utf-8"))
    project = tomllib.loads((helm.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert chart["appVersion"] == project["version"]


WRONG = [
    ("replicaCount=two", "replicaCount"),
    ("proxy.prot=9000", "prot"),
    ("worker.image.tag=latest", "tag"),
    ("worker.engine.kv_memory_mb=lots", "kv_memory_mb"),
    ("worker.engine.profile=fast", "profile"),
    ("proxy.deadlines.idle_s=-1", "idle_s"),
    ("store.url=redis://:secret@store:6379", "url"),
    ("upstreams[0].url=ftp://example", "url"),
    ("upstreams[0].api_key=sk-1", "api_key"),
    ("service.type=External", "type"),
    ("userId=0", "userId"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("major", ["4", "3"])
@pytest.mark.parametrize(("setting", "field"), WRONG)
def test_lint_refuses_a_wrong_value_by_name(setting: str, field: str, major: helm.HelmMajor) -> None:
    outcome = helm.lint(PROXY_ONLY, "--set", setting, major=major)
    assert outcome.status != 0
    assert field in outcome.text
    assert "1 chart(s) failed" in outcome.text


CONTRADICTIONS = [
    (DEFAULT, "auth.existingSecret=", "auth.existingSecret is empty"),
    (DEFAULT, "worker.enabled=false", "upstreams is empty"),
    (DEFAULT, "model.pull=", "model.path"),
    (DEFAULT, "replicaCount=2", "replicaCount is above 1"),
    (PROXY_ONLY, "store.url=redis://store:6379/0", "valkey.enabled and store are both set"),
    (PROXY_ONLY, "valkey.auth.existingSecret=", "valkey.auth.existingSecret is empty"),
    (DEFAULT, "proxy.preStopSeconds=40", "terminationGracePeriodSeconds"),
    (DEFAULT, "proxy.adminPort=8000", "proxy.adminPort"),
    (DEFAULT, "server.enabled=false", "nothing would be installed"),
    (PROXY_ONLY, "server.enabled=false", "sidecar.upstreams is empty"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("values", "setting", "words"), CONTRADICTIONS, ids=lambda part: str(part).split("/")[-1])
def test_contradicting_values_are_refused_with_the_fix(values: Path, setting: str, words: str) -> None:
    outcome = helm.template(helm.CHART, values, "--set", setting)
    assert outcome.status != 0
    assert words in outcome.text

"""Dockerfiles and compose file: clean under hadolint, alike where they must be, and true to the product."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from typing import Any

import msgspec
import pytest
import yaml

from magnitude_engine.config import EngineConfig
from magnitude_proxy import settings
from testkit import helm

DEPLOY = helm.ROOT / "deploy"
DOCKERFILES = tuple(sorted(DEPLOY.glob("Dockerfile.*")))
each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_image
def test_hadolint_has_no_complaint(path: Any) -> None:
    done = subprocess.run([helm.hadolint(), "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each_image
def test_images_run_as_the_charts_user(path: Any) -> None:
    user = yaml.safe_load((helm.CHART / "values.yaml").read_text("utf-8"))["userId"]
    text = path.read_text("utf-8")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == [f"{user}:{user}"]
    assert f"--owner={user} --group={user} --mode=0700 /var/lib/magnitude /run/magnitude" in text


@each_image
def test_images_set_no_variable_that_would_win_over_a_settings_file(path: Any) -> None:
    text = path.read_text("utf-8")
    assert [name for s in settings.TABLE for name in s.variables if re.search(rf"\b{name}=", text)] == []


@each_image
def test_images_name_tagged_bases_and_no_registry(path: Any) -> None:
    text = path.read_text("utf-8")
    assert re.findall(r"^ARG BASE=(.*)$", text, re.MULTILINE) == ["python:3.11-slim-bookworm"]
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)


def test_compose_services_are_hardened_and_published_on_loopback_only() -> None:
    services = compose()["services"]
    assert set(services) == {"valkey", "worker", "proxy"}
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert [port.split(":")[0] for port in ports] == ["127.0.0.1"]
    assert compose()["networks"]["store"]["internal"] is True
    assert {name for name, s in services.items() if "store" in s["networks"]} == {"valkey", "proxy"}


@pytest.mark.thorough
def test_compose_proxy_and_worker_agree() -> None:
    services = compose()["services"]
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    config = settings.load(parser.parse_args(services["proxy"]["command"][1:]), {})
    words = shlex.split(services["worker"]["command"][0])
    engine = msgspec.json.decode(words[words.index("--config") + 1], type=EngineConfig)
    data_dir = words[words.index("--data-dir") + 1]
    assert (config.worker.mode, config.worker.socket) == ("attach", words[words.index("--socket") + 1])
    assert engine.model_path.startswith(f"{data_dir}/models/smollm2/")
    assert engine.kv_disk_mb > 0
    assert str(engine.kv_dir).startswith(f"{data_dir}/")
    assert words[words.index("exec") + 1 :][:4] == ["python", "-m", "magnitude_engine.main", "watch"]
    shared = [set(services[name]["volumes"]) for name in ("proxy", "worker")]
    assert set.intersection(*shared) == {"socket:/run/magnitude"}


def test_the_build_context_holds_the_packages_alone() -> None:
    lines = (helm.ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert kept == {"pyproject.toml", "README.md", "LICENSE", "proxy", "engine", "kernels"}
    assert all((helm.ROOT / name).exists() for name in kept)

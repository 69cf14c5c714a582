"""The README's example of an agent's pod, rendered by the real helm as a chart that depends on this one."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from magnitude_proxy import settings
from magnitude_proxy.config import ProxyConfig
from testkit import helm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODERN = ("--kube-version", "1.29.0")
OWN_UPSTREAM = """
magnitude:
  server: {enabled: false}
  sidecar:
    enabled: true
    port: 8080
    upstreams:
      - {name: vllm, url: "http://vllm:8000/v1", keySecret: {name: vllm-key, key: token}}
  store:
    existingSecret: {name: store-url}
"""
WITH_SERVER = """
magnitude:
  auth: {existingSecret: magnitude-keys}
  sidecar: {enabled: true, keySecret: {name: agent-key}}
"""


@pytest.fixture
def agent_chart(tmp_path: Path) -> Path:
    """A chart whose one template is the README's example and whose one dependency is the chart under test."""
    chart = tmp_path / "agent"
    (chart / "templates").mkdir(parents=True)
    shutil.copytree(helm.CHART, chart / "charts" / "magnitude")
    (chart / "Chart.yaml").write_text(
        "apiVersion: v2\nname: agent\nversion: 1.0.0\ndependencies:\n  - {name: magnitude, version: '>=0'}\n", "utf-8"
    )
    readme = (helm.CHART / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    (chart / "templates" / "agent.yaml").write_text(example, "utf-8")
    return chart


def with_values(chart: Path, text: str) -> Path:
    values = chart.parent / "values.yaml"
    values.write_text(text, "utf-8")
    return values


def agent_pod(objects: list[Any]) -> Any:
    return helm.one(objects, "Deployment", "agent")["spec"]["template"]["spec"]


def sidecar_settings(objects: list[Any], folder: Path) -> ProxyConfig:
    """Returns what the product makes of the sidecar's arguments and ConfigMap."""
    (sidecar,) = agent_pod(objects)["initContainers"]
    config = folder / "magnitude.toml"
    (name,) = [v["configMap"]["name"] for v in agent_pod(objects)["volumes"] if "configMap" in v]
    config.write_text(helm.one(objects, "ConfigMap", name)["data"]["magnitude.toml"], "utf-8")
    arguments = [a.replace("/etc/magnitude/config/magnitude.toml", str(config)) for a in sidecar["args"][1:]]
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(arguments), {"MAGNITUDE_PORT": "tcp://10.96.0.9:8000"})


def test_the_sidecar_is_native_and_on_loopback(agent_chart: Path, tmp_path: Path) -> None:
    objects = helm.render(agent_chart, with_values(agent_chart, OWN_UPSTREAM), *MODERN)
    assert {found["kind"] for found in objects} == {"Deployment", "ConfigMap"}
    (sidecar,) = agent_pod(objects)["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["securityContext"]["readOnlyRootFilesystem"] is True
    config = sidecar_settings(objects, tmp_path)
    assert (config.listen.host, config.listen.port, config.worker.mode) == ("127.0.0.1", 8080, "none")
    assert "127.0.0.1:8080/health/live" in sidecar["startupProbe"]["exec"]["command"][2]
    (store,) = sidecar["env"]
    assert store["valueFrom"]["secretKeyRef"] == {"name": "store-url", "key": "url"}


def test_every_mount_of_the_sidecar_has_its_volume(agent_chart: Path, tmp_path: Path) -> None:
    objects = helm.render(agent_chart, with_values(agent_chart, OWN_UPSTREAM), *MODERN)
    pod = agent_pod(objects)
    (sidecar,) = pod["initContainers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in sidecar["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    (upstream,) = sidecar_settings(objects, tmp_path).upstreams
    secret = volumes[mounts[str(Path(str(upstream.key_file)).parent)]]["secret"]
    assert secret["secretName"] == "vllm-key"
    assert secret["items"] == [{"key": "token", "path": "key"}]


def test_without_upstreams_it_speaks_to_the_releases_own_service(agent_chart: Path, tmp_path: Path) -> None:
    objects = helm.render(agent_chart, with_values(agent_chart, WITH_SERVER), *MODERN, "--namespace", "agents")
    (upstream,) = sidecar_settings(objects, tmp_path).upstreams
    service = helm.one(objects, "Service", f"{helm.RELEASE}-magnitude")
    port = service["spec"]["ports"][0]["port"]
    assert upstream.url == f"http://{service['metadata']['name']}.agents.svc:{port}/v1"
    assert upstream.key_file is not None


@pytest.mark.parametrize("kubernetes", ["1.29", "1.33"])
def test_kubernetes_schemas_accept_the_agents_pod(agent_chart: Path, tmp_path: Path, kubernetes: str) -> None:
    values = with_values(agent_chart, WITH_SERVER)
    rendered = helm.template(agent_chart, values, *MODERN)
    assert rendered.status == 0, rendered.text
    outcome = helm.validate(rendered.text, kubernetes, tmp_path)
    assert outcome.status == 0, outcome.text
    assert "deployment/agent" in outcome.text


def test_an_older_cluster_is_refused_with_the_reason(agent_chart: Path) -> None:
    outcome = helm.template(agent_chart, with_values(agent_chart, OWN_UPSTREAM), "--kube-version", "1.28.9")
    assert outcome.status != 0
    assert "needs Kubernetes 1.29" in outcome.text


def test_a_forgotten_switch_is_named(agent_chart: Path) -> None:
    outcome = helm.template(
        agent_chart, with_values(agent_chart, WITH_SERVER), *MODERN, "--set", "magnitude.sidecar.enabled=false"
    )
    assert outcome.status != 0
    assert "sidecar.enabled is false" in outcome.text

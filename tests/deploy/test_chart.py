"""The chart as the real helm renders it: accepted by lint and by Kubernetes' schemas, safe, and true to the product."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnitude_engine.config import EngineConfig
from magnitude_proxy import settings
from magnitude_proxy.config import KV_DISK_MB, Limits, ProxyConfig
from magnitude_proxy.keyfile import configured_keys
from testkit import helm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = f"{helm.RELEASE}-magnitude"
DEFAULT, GPU, PROXY_ONLY = helm.VALUES
MAJORS: tuple[helm.HelmMajor, ...] = ("4", "3")
KUBERNETES = ("1.29", "1.33")
each_mode = pytest.mark.parametrize("values", helm.VALUES, ids=lambda path: path.stem)


def pod_specs(objects: list[Any]) -> Iterator[Any]:
    for found in objects:
        if found["kind"] == "Pod":
            yield found["spec"]
        elif found["kind"] in ("StatefulSet", "Deployment"):
            yield found["spec"]["template"]["spec"]


def server_pod(objects: list[Any]) -> Any:
    return helm.one(objects, "StatefulSet", NAME)["spec"]["template"]["spec"]


def container(pod: Any, name: str) -> Any:
    (found,) = [c for c in pod["containers"] if c["name"] == name]
    return found


def load_settings(args: list[str], toml: str, folder: Path) -> ProxyConfig:
    """Returns what the product makes of a container's arguments, with the mounted files put into `folder`."""
    config, keys = folder / "magnitude.toml", folder / "keys"
    config.write_text(toml, "utf-8")
    keys.write_text("sk-test default\n", "utf-8")
    mounted = {"/etc/magnitude/config/magnitude.toml": config, "/etc/magnitude/keys/keys": keys}
    for path, local in mounted.items():
        args = [argument.replace(path, str(local)) for argument in args]
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(args[1:]), {})


def server_settings(objects: list[Any], folder: Path) -> ProxyConfig:
    toml = helm.one(objects, "ConfigMap", NAME)["data"]["magnitude.toml"]
    return load_settings(container(server_pod(objects), "proxy")["args"], toml, folder)


def engine_arguments(worker: Any) -> tuple[EngineConfig, str]:
    """Returns the worker's settings and socket from its command line."""
    words = [*worker["command"], *worker.get("args", [])]
    (text,) = [w.removeprefix("--config=") for w in words if w.removeprefix("--config=").startswith("{")]
    (socket,) = [w.removeprefix("--socket=") for w in words if w.endswith(".sock")]
    return msgspec.json.decode(text, type=EngineConfig), socket


@pytest.mark.parametrize("major", MAJORS)
@each_mode
def test_lint_accepts_each_mode(values: Path, major: helm.HelmMajor) -> None:
    outcome = helm.lint(values, major=major)
    assert outcome.status == 0, outcome.text
    assert "[WARNING]" not in outcome.text


@each_mode
def test_both_helm_versions_render_the_same(values: Path) -> None:
    assert helm.render(helm.CHART, values, major="4") == helm.render(helm.CHART, values, major="3")


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@each_mode
def test_kubernetes_schemas_accept_each_mode(values: Path, kubernetes: str, tmp_path: Path) -> None:
    rendered = helm.template(helm.CHART, values)
    outcome = helm.validate(rendered.text, kubernetes, tmp_path)
    assert outcome.status == 0, outcome.text
    passed = outcome.text.count(" passed for resource ")
    assert passed == len(helm.render(helm.CHART, values)) > 0
    assert "WARN" not in outcome.text


def test_the_schema_check_sees_an_unknown_field(tmp_path: Path) -> None:
    rendered = helm.template(helm.CHART, DEFAULT).text.replace("failureThreshold:", "failureTreshold:")
    outcome = helm.validate(rendered, "1.33", tmp_path)
    assert outcome.status != 0
    assert "failureTreshold" in outcome.text


@each_mode
def test_the_product_reads_the_settings_of_the_chart(values: Path, tmp_path: Path) -> None:
    objects = helm.render(helm.CHART, values)
    proxy = container(server_pod(objects), "proxy")
    config = server_settings(objects, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in proxy["ports"]}
    assert ports["http"] == config.listen.port
    assert ports["admin"] == config.listen.admin_port
    assert {config.listen.host, config.listen.admin_host} == {"0.0.0.0"}, "the kubelet probes both listeners"
    assert len(configured_keys(config.keys, config.key_file, config.upstreams)) == 1
    mounts = {mount["mountPath"]: mount for mount in proxy["volumeMounts"]}
    assert str(Path(config.data_dir).parent) in mounts
    for upstream in config.upstreams:
        if upstream.key_file:
            assert mounts[str(Path(upstream.key_file).parent)]["readOnly"]


def test_settings_in_values_arrive_in_the_product(tmp_path: Path) -> None:
    config = server_settings(helm.render(helm.CHART, PROXY_ONLY), tmp_path)
    assert config.worker.mode == "none"
    assert config.listen.max_body_bytes == 33_554_432
    assert (config.retry.budget_ratio, config.retry.budget_min) == (0.1, 5)
    assert config.limits == Limits(max_iterations=200, max_seconds=7200.5, tokens_per_day=5_000_000)
    assert config.telemetry.otlp_endpoint == "http://collector.monitoring.svc:4318/v1/traces"
    first, second = config.upstreams
    assert (first.name, first.first_token_s, first.key_file) == ("vllm", 20, None)
    assert first.models == {"*": "meta-llama/Llama-3.3-70B-Instruct"}
    assert (second.name, second.url) == ("hosted", "https://api.example.com/v1")


def test_awkward_text_in_values_arrives_unchanged(tmp_path: Path) -> None:
    names = {'a "quoted" <b>&': "c\\d", "ü": "日本"}
    models = json.dumps(names)
    objects = helm.render(
        helm.CHART, PROXY_ONLY, "--set-json", f'upstreams=[{{"name":"u","url":"http://u/v1","models":{models}}}]'
    )
    (upstream,) = server_settings(objects, tmp_path).upstreams
    assert upstream.models == names


@pytest.mark.parametrize("values", [DEFAULT, GPU], ids=lambda path: path.stem)
def test_proxy_and_worker_share_user_and_socket(values: Path, tmp_path: Path) -> None:
    objects = helm.render(helm.CHART, values)
    pod = server_pod(objects)
    proxy, worker = container(pod, "proxy"), container(pod, "worker")
    users = {c["securityContext"]["runAsUser"] for c in (proxy, worker)}
    assert users == {pod["securityContext"]["fsGroup"]}
    config = server_settings(objects, tmp_path)
    _, socket = engine_arguments(worker)
    assert (config.worker.mode, config.worker.socket) == ("attach", socket)
    for one in (proxy, worker):
        (mount,) = [m for m in one["volumeMounts"] if m["name"] == "socket"]
        # A folder of the worker's own inside the mount: the mount itself belongs to root and is open to the group.
        assert Path(socket).parent.parent == Path(mount["mountPath"])
        assert not mount.get("readOnly")
    (volume,) = [v for v in pod["volumes"] if v["name"] == "socket"]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_the_worker_pulls_the_model_that_it_serves() -> None:
    worker = container(server_pod(helm.render(helm.CHART, DEFAULT)), "worker")
    engine, _ = engine_arguments(worker)
    name, data_dir = worker["command"][3:5]
    assert engine.model_path.startswith(f"{data_dir}/models/{name}/")
    assert engine.threads == 2
    assert "exec python -m magnitude_engine.main watch" in worker["command"][2]


def test_the_gpu_worker_has_its_settings_and_one_request() -> None:
    objects = helm.render(helm.CHART, GPU)
    pod = server_pod(objects)
    worker = container(pod, "worker")
    engine, _ = engine_arguments(worker)
    assert (engine.profile, engine.kv_memory_mb, engine.max_batch_size) == ("native", 32_768, 64)
    assert engine.threads == 8, "7500m rounded up"
    assert [c["name"] for c in pod["containers"] if "nvidia.com/gpu" in c["resources"]["limits"]] == ["worker"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert worker["command"][:3] == ["python", "-m", "magnitude_engine.main"]
    (models,) = [m for m in worker["volumeMounts"] if m["name"] == "models"]
    assert engine.model_path.startswith(models["mountPath"])


def test_cached_pages_lie_in_the_data_volume() -> None:
    pod = server_pod(helm.render(helm.CHART, DEFAULT))
    worker = container(pod, "worker")
    engine, _ = engine_arguments(worker)
    (mount,) = [m for m in worker["volumeMounts"] if m["name"] == "data"]
    assert engine.kv_disk_mb == KV_DISK_MB
    assert Path(str(engine.kv_dir)).is_relative_to(mount["mountPath"])
    assert not mount.get("readOnly")
    off = container(server_pod(helm.render(helm.CHART, DEFAULT, "--set", "worker.engine.kv_disk_mb=0")), "worker")
    assert engine_arguments(off)[0].kv_disk_mb == 0


def test_explicit_threads_win_over_the_cpu_limit() -> None:
    objects = helm.render(helm.CHART, DEFAULT, "--set", "worker.engine.threads=0")
    engine, _ = engine_arguments(container(server_pod(objects), "worker"))
    assert engine.threads == 0


def test_proxy_only_has_no_trace_of_a_worker() -> None:
    pod = server_pod(helm.render(helm.CHART, PROXY_ONLY))
    assert [c["name"] for c in pod["containers"]] == ["proxy"]
    assert "socket" not in {volume["name"] for volume in pod["volumes"]}


@each_mode
def test_every_container_is_hardened(values: Path) -> None:
    for pod in pod_specs(helm.render(helm.CHART, values)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "a link variable such as MAGNITUDE_PORT would be read as a setting"
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod)
        for volume in pod.get("volumes", []):
            assert "hostPath" not in volume
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": "not an emptyDir"})
        for one in [*pod["containers"], *pod.get("initContainers", [])]:
            context = one["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert "memory" in one["resources"]["limits"]
            assert not one["image"].endswith(":latest")


@each_mode
def test_secrets_are_only_referenced(values: Path) -> None:
    objects = helm.render(helm.CHART, values)
    assert "Secret" not in {found["kind"] for found in objects}
    for found in objects:
        text = json.dumps(found)
        # A URL may carry a password only as a reference to the environment, never in a ConfigMap.
        assert re.findall(r"://[^/\s\"]*:([^/@\s\"]+)@", text) in ([], ["$(VALKEY_PASSWORD)"])
        if found["kind"] == "ConfigMap":
            assert "PASSWORD" not in text
            assert "@" not in text


@each_mode
def test_the_worker_outlives_the_proxys_streams(values: Path) -> None:
    pod = server_pod(helm.render(helm.CHART, values))
    waits = {c["name"]: int(c["lifecycle"]["preStop"]["exec"]["command"][1]) for c in pod["containers"]}
    assert waits.get("worker", 99) > waits["proxy"] + 10
    assert pod["terminationGracePeriodSeconds"] > waits["proxy"] + 10


@each_mode
def test_selectors_find_the_pods_they_are_for(values: Path) -> None:
    objects = helm.render(helm.CHART, values)
    labels = {
        found["metadata"]["name"]: set(found["spec"]["template"]["metadata"]["labels"].items())
        for found in objects
        if found["kind"] == "StatefulSet"
    }
    for found in objects:
        spec = found.get("spec", {})
        if found["kind"] == "Service":
            selector = spec["selector"]
        elif found["kind"] == "NetworkPolicy":
            selector = spec["podSelector"]["matchLabels"]
        elif found["kind"] in ("PodDisruptionBudget", "StatefulSet"):
            selector = spec["selector"]["matchLabels"]
        else:
            continue
        owner = f"{NAME}-valkey" if found["metadata"]["name"].endswith("-valkey") else NAME
        assert [name for name, have in labels.items() if set(selector.items()) <= have] == [owner]
    assert helm.one(objects, "StatefulSet", NAME)["spec"]["serviceName"] == f"{NAME}-peers"
    assert helm.one(objects, "Service", f"{NAME}-peers")["spec"]["clusterIP"] == "None"


def test_the_network_policy_opens_the_listeners_and_blocks_metadata_addresses() -> None:
    policy = helm.one(helm.render(helm.CHART, PROXY_ONLY), "NetworkPolicy", NAME)["spec"]
    api, metrics = policy["ingress"]
    assert [p["port"] for p in api["ports"]] == [8000]
    assert [p["port"] for p in metrics["ports"]] == [8001]
    blocks = [peer["ipBlock"] for rule in policy["egress"] for peer in rule.get("to", [])]
    assert "169.254.0.0/16" in next(b["except"] for b in blocks if b["cidr"] == "0.0.0.0/0")


def test_the_bundled_store_is_reached_with_the_password_of_its_secret() -> None:
    objects = helm.render(helm.CHART, PROXY_ONLY)
    service = helm.one(objects, "Service", f"{NAME}-valkey")
    proxy = container(server_pod(objects), "proxy")
    variables = {variable["name"]: variable for variable in proxy["env"]}
    port = service["spec"]["ports"][0]["port"]
    assert variables["MAGNITUDE_REDIS_URL"]["value"] == f"redis://:$(VALKEY_PASSWORD)@{NAME}-valkey:{port}/0"
    valkey = container(helm.one(objects, "StatefulSet", f"{NAME}-valkey")["spec"]["template"]["spec"], "valkey")
    theirs = {variable["name"]: variable for variable in valkey["env"]}
    assert variables["VALKEY_PASSWORD"]["valueFrom"] == theirs["REDISCLI_AUTH"]["valueFrom"]
    assert valkey["args"][-2:] == ["--requirepass", "$(REDISCLI_AUTH)"]


def test_a_changed_setting_restarts_the_pods() -> None:
    def checksum(*arguments: str) -> str:
        found = helm.one(helm.render(helm.CHART, DEFAULT, *arguments), "StatefulSet", NAME)
        return str(found["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum()
    assert checksum() != checksum("--set", "proxy.deadlines.progress_s=2")

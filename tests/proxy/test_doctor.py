"""The doctor's judgements on given machines, and its checks against real sockets, servers and files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from magnitude_engine.config import EngineConfig
from magnitude_proxy.config import ListenConfig, ProxyConfig, StoreConfig, UpstreamConfig, WorkerConfig
from magnitude_proxy.setup import doctor, hardware
from magnitude_proxy.setup.doctor import Finding, Report
from magnitude_proxy.setup.hardware import Machine, Torch
from testkit.server import Reply, ScriptedServer, scripted

CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9B14
flags\t\t: fpu avx2 avx512f avx512_bf16 lm

processor\t: 1
model name\t: Another
flags\t\t: fpu amx_bf16
"""


def machine(**change: object) -> Machine:
    base = Machine(2.0, "A CPU", ("AVX2", "AVX-512", "AVX-512 bf16"), 16_000, 8_000, ())
    return base._replace(**change)  # type: ignore[arg-type]


def config(data: Path, model: str = "smollm2", kv_memory_mb: int = 2048) -> ProxyConfig:
    engine = EngineConfig(model_path=model, kv_memory_mb=kv_memory_mb)
    return ProxyConfig(data_dir=str(data), worker=WorkerConfig(model=model, engine=engine))


def test_cpuinfo_is_read_from_the_first_processor() -> None:
    assert hardware.parse_cpuinfo(CPUINFO) == ("AMD EPYC 9B14", ("AVX2", "AVX-512", "AVX-512 bf16"))
    assert hardware.parse_cpuinfo("Features\t: fp asimd bf16\n") == ("", ("NEON", "bf16"))
    assert hardware.parse_cpuinfo("") == ("", ())


def test_limits_of_a_container_count() -> None:
    assert hardware.parse_meminfo("MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\n") == (2, 1)
    assert hardware.parse_limit("max\n") is None
    assert hardware.parse_limit("1048576\n") == 1048576
    assert hardware.usable_cores(8, "150000 100000\n") == 1.5
    assert hardware.usable_cores(8, "max 100000\n") == 8.0
    assert hardware.usable_cores(2, "") == 2.0


@pytest.mark.parametrize(
    ("change", "level", "todo"),
    [
        ({}, "ok", ""),
        ({"instructions": ("AVX2",)}, "slow", "bf16"),
        ({"instructions": ()}, "slow", "AVX2"),
        ({"cores": 1.0}, "slow", "2 cores"),
    ],
)
def test_cpus_are_judged(change: dict[str, object], level: str, todo: str) -> None:
    finding = doctor.judge_cpu(machine(**change))
    assert finding.level == level
    assert todo in finding.todo


def test_memory_is_judged_against_model_and_cache(tmp_path: Path) -> None:
    assert doctor.judge_memory(machine(), config(tmp_path)).level == "ok"
    tight = doctor.judge_memory(machine(memory_free=1000), config(tmp_path))
    assert (tight.level, tight.fatal) == ("slow", False)
    assert "--kv-memory-mb 453" in tight.todo
    plain = config(tmp_path)
    assert plain.worker.engine is not None
    engine = msgspec.structs.replace(plain.worker.engine, kv_host_mb=10**6)
    tiered = msgspec.structs.replace(plain, worker=msgspec.structs.replace(plain.worker, engine=engine))
    assert doctor.judge_memory(machine(), tiered).level == "slow"
    none = doctor.judge_memory(machine(memory_free=50), config(tmp_path))
    assert (none.level, none.fatal) == ("missing", True)


def test_python_torch_packages_and_gpus_are_judged() -> None:
    assert doctor.judge_python((3, 11, 7), 0).level == "ok"
    assert doctor.judge_python((3, 11, 7), 1).fatal
    assert doctor.judge_python((3, 10, 2), 0).fatal
    assert doctor.judge_torch(Torch(version="2.13.0", threads=2)).level == "ok"
    assert doctor.judge_torch(Torch(problem="libcudart.so: cannot open")).fatal
    assert doctor.judge_torch(Torch()).fatal
    assert "magnitude-runtime[engine]" in doctor.judge_engine(("torch", "gguf")).todo
    assert doctor.judge_gpu(machine(), Torch(gpus=("H200",))).level == "ok"
    assert "PyTorch build" in doctor.judge_gpu(machine(gpus=("H200",)), Torch(version="2.13.0+cpu")).todo
    assert doctor.judge_gpu(machine(), Torch(version="2.13.0")).level == "slow"
    for slow in (doctor.judge_gpu(machine(), Torch()), doctor.judge_cpu(machine(instructions=("AVX2",)))):
        assert slow.todo
        assert "nothing is needed" not in slow.todo


def test_the_verdict_needs_a_route(tmp_path: Path) -> None:
    fine, fatal = Finding(area="x", level="ok", found=""), Finding(area="x", level="missing", found="", fatal=True)
    upstream = Finding(area="upstream a", level="ok", found="")
    without = ProxyConfig(data_dir=str(tmp_path), worker=WorkerConfig(mode="none"))
    assert doctor.can_serve(config(tmp_path), [fine])
    assert not doctor.can_serve(config(tmp_path), [fine, fatal])
    assert not doctor.can_serve(without, [fine])
    assert doctor.can_serve(without, [fine, upstream])


def test_models_are_found_pulled_or_damaged(tmp_path: Path) -> None:
    absent = doctor.check_model(config(tmp_path))
    assert (absent.level, absent.fatal) == ("missing", False)
    assert "magnitude pull smollm2" in absent.todo
    path = tmp_path / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert "damaged" in doctor.check_model(config(tmp_path)).found
    assert doctor.check_model(config(tmp_path, str(path))).level == "ok"
    assert doctor.check_model(config(tmp_path, str(tmp_path / "none.gguf"))).fatal


def test_ports_in_use_are_found(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        findings = doctor.check_ports(
            ProxyConfig(data_dir=str(tmp_path), listen=ListenConfig(port=taken, admin_port=0))
        )
    assert [(f.area, f.level, f.fatal) for f in findings] == [("port", "in use", True), ("admin port", "ok", False)]
    assert f"127.0.0.1:{taken} has a listener already" in findings[0].found
    assert findings[0].todo == "choose another with --port, or stop what listens there"


def test_a_port_in_use_is_told_from_what_is_missing(tmp_path: Path) -> None:
    fine = Finding(area="engine", level="ok", found="")
    taken = Finding(area="port", level="in use", found="", fatal=True)
    lacking = Finding(area="torch", level="missing", found="", fatal=True)
    without = ProxyConfig(data_dir=str(tmp_path), worker=WorkerConfig(mode="none"))
    ends = [
        doctor.to_table(doctor.judge(settings, findings)).splitlines()[-1]
        for settings, findings in (
            (config(tmp_path), [fine, taken]),
            (config(tmp_path), [lacking, taken]),
            (config(tmp_path), [lacking]),
            (without, [fine, taken]),
            (config(tmp_path), [fine]),
        )
    ]
    assert ends == [
        "magnitude serve cannot start on these ports.",
        "magnitude serve cannot work here yet.",
        "magnitude serve cannot work here yet.",
        "magnitude serve cannot work here yet.",
        "magnitude serve can work here.",
    ]


def test_folders_are_checked_where_they_will_be_made(tmp_path: Path) -> None:
    found = doctor.check_folder(ProxyConfig(data_dir=str(tmp_path / "a" / "b")))
    assert (found.level, "can be made" in found.found) == ("ok", True)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert doctor.check_folder(ProxyConfig(data_dir=str(tmp_path / "file"))).fatal


def test_a_worker_to_attach_to_must_listen(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    attached = ProxyConfig(data_dir=str(tmp_path), worker=WorkerConfig(mode="attach", socket=path))
    assert doctor.check_socket(attached).fatal
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(path)
        worker.listen()
        assert doctor.check_socket(attached).level == "ok"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as running:
        yield running


@pytest.mark.thorough
async def test_upstreams_are_asked_with_their_key(server: ScriptedServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-up\n")
    upstream = UpstreamConfig(name="a", url=server.base_url, key_file=str(key))
    assert (await doctor.check_upstream(upstream)).level == "ok"
    assert server.asked[-1].headers["Authorization"] == "Bearer sk-up"
    server.play("GET /v1/models", Reply({}, 401))
    assert "--upstream-key-file" in (await doctor.check_upstream(upstream)).todo
    server.play("GET /v1/models", Reply({}, 500))
    assert "answers 500" in (await doctor.check_upstream(upstream)).found
    key.unlink()
    assert (await doctor.check_upstream(upstream)).fatal


@pytest.mark.thorough
async def test_an_upstream_that_is_not_there_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    finding = await doctor.check_upstream(UpstreamConfig(name="a", url=url))
    assert (finding.level, finding.fatal) == ("missing", False)
    assert url in finding.found


async def test_stores_are_checked_without_showing_passwords() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    finding = await doctor.check_store(StoreConfig(url=f"redis://user:hidden@{address}/0"))
    assert finding.level == "missing"
    assert address in finding.found
    assert "hidden" not in finding.found
    assert (await doctor.check_store(StoreConfig(url="none"))).level == "slow"
    assert (await doctor.check_store(StoreConfig())).found.startswith("embedded ")


async def test_a_store_that_answers_tells_its_version() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=_play_redis, args=(listener, b"# Server\r\nredis_version:6.2.1\r\n"))
        answering.start()
        finding = await doctor.check_store(StoreConfig(url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0"))
        answering.join(10)
    assert (finding.level, "version 6.2.1" in finding.found) == ("missing", True)


def _play_redis(listener: socket.socket, info: bytes) -> None:
    """Answers one connection: INFO with `info`, everything else with OK."""
    connection, _ = listener.accept()
    with connection:
        while request := connection.recv(4096):
            for _ in range(request.count(b"*") or 1):
                bulk = b"$%d\r\n%s\r\n" % (len(info), info)
                connection.sendall(bulk if b"INFO" in request else b"+OK\r\n")


def test_the_table_says_what_to_do() -> None:
    findings = (
        Finding(area="cpu", level="ok", found="fine"),
        Finding(area="model", level="missing", found="not there", todo="pull it"),
    )
    assert doctor.to_table(Report(can_serve=True, findings=findings)) == (
        "ok      cpu    fine\nmissing model  not there\n               → pull it\n\nmagnitude serve can work here.\n"
    )


@pytest.mark.slow
def test_the_command_reports_on_this_machine_as_json(tmp_path: Path) -> None:
    ended = run_doctor("--json", "--data-dir", str(tmp_path), "--port", "0")
    report = msgspec.json.decode(ended.stdout, type=Report)
    assert {"python", "cpu", "memory", "engine", "torch", "gpu", "model", "store", "port"} <= {
        finding.area for finding in report.findings
    }
    assert ended.returncode == (0 if report.can_serve else 1)


@pytest.mark.slow
def test_the_command_works_without_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "import importlib.util as util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'torch' else found(name, package)\n"
    )
    ended = run_doctor("--json", "--data-dir", str(tmp_path / "data"), "--port", "0", path=tmp_path)
    report = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert {
        "area": "torch",
        "level": "missing",
        "found": "not installed",
        "todo": doctor.RIGHT_ENGINE,
        "fatal": True,
    } in (report["findings"])


def run_doctor(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = (sys.executable, "-m", "magnitude_proxy.main", "doctor", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)

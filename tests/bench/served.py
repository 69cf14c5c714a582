"""The running product with the real model: first tokens of cached prompts, many sessions at once, and its memory.

    python tests/bench/served.py [--parts first,together,memory] [--rounds 9] [--sessions 32] [--tokens 4000]

`first`: milliseconds from the request to the first streamed token where the whole prompt is cached, by its length.
`together`: tokens per second of eight sessions that decode at once, against one alone, speculation off; with contexts
of their own of 512 tokens, and with 2,000 tokens in common. `memory`: resident MiB of all processes of the product,
idle and after `--sessions` sessions of `--tokens` tokens, whose contexts have nothing in common.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_engine.config import default_data_dir
from testkit.model import SMOLLM2
from testkit.serve import Server, children, lend_model, serving

FIRST = (500, 2000, 6000)
TOGETHER, ANSWER = 8, 64
WORDS = ("river", "stone", "cloud", "apple", "seven", "green", "under", "light", "paper", "north", "music", "table")


class Timed(NamedTuple):
    """One answer: seconds from the request to its first token and to its end, and the tokens of prompt and answer."""

    first: float
    last: float
    prompt: int
    cached: int
    tokens: int


def words(count: int, seed: int) -> str:
    """Returns text of about `count` tokens that no other seed gives."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


async def ask(client: aiohttp.ClientSession, prompt: str, tokens: int) -> Timed:
    """Returns how long an answer of exactly so many tokens took."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = 0.0
    usage: dict[str, Any] = {}
    async with client.post("completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if not first and event["choices"] and event["choices"][0]["text"]:
                first = time.perf_counter() - began
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Timed(first, time.perf_counter() - began, usage["prompt_tokens"], cached, usage["completion_tokens"])


async def first(client: aiohttp.ClientSession, rounds: int) -> None:
    """Prints the first tokens of cached prompts."""
    print("| prompt | cached | first token, ms | least | most |\n|---|---|---|---|---|")
    for count in FIRST:
        prompt = words(count, count)
        await ask(client, prompt, 1)
        taken = [await ask(client, prompt, 2) for _ in range(rounds)]
        ms = sorted(1000 * each.first for each in taken)
        print(f"| {taken[0].prompt} | {taken[0].cached} | {statistics.median(ms):.1f} | {ms[0]:.1f} | {ms[-1]:.1f} |")


async def together(client: aiohttp.ClientSession, rounds: int) -> None:
    """Prints what eight sessions give together, against one."""
    print("| contexts | one alone, tokens/s | eight, tokens/s | ratio |\n|---|---|---|---|")
    common = words(2000, 1)
    for name, prompts in {
        "512 tokens each": [words(512, 10 + n) for n in range(TOGETHER)],
        "2,000 in common, 64 each": [f"{common} {words(64, 30 + n)}" for n in range(TOGETHER)],
    }.items():
        for prompt in prompts:
            await ask(client, prompt, 1)
        alone, at_once = [], []
        for _ in range(rounds):
            alone.append(_rate([await ask(client, prompts[0], ANSWER)]))
            at_once.append(_rate(await asyncio.gather(*(ask(client, prompt, ANSWER) for prompt in prompts))))
        one, eight = statistics.median(alone), statistics.median(at_once)
        print(f"| {name} | {one:.0f} | {eight:.0f} | {eight / one:.2f} |")


def _rate(answers: Sequence[Timed]) -> float:
    """Returns tokens per second between the first token of all and the last."""
    tokens = sum(answer.tokens - 1 for answer in answers)
    return tokens / (max(answer.last for answer in answers) - min(answer.first for answer in answers))


async def memory(client: aiohttp.ClientSession, server: Server, sessions: int, tokens: int) -> None:
    """Prints resident memory, idle and with many long sessions."""
    await ask(client, "hello", 2)
    print(f"idle: {_resident(server.process.pid):.0f} MiB")
    for number in range(sessions):
        answer = await ask(client, words(tokens, 1000 + number), 2)
        print(f"\r{number + 1} sessions of {answer.prompt} tokens: {_resident(server.process.pid):.0f} MiB", end="")
    print()


def _resident(pid: int) -> float:
    """Returns the MiB that a process and all below it hold, shared pages counted once per process."""
    status = Path(f"/proc/{pid}/status").read_text()
    own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return own / 1024 + sum(_resident(child) for child in children(pid))


async def run(options: argparse.Namespace) -> None:
    """Starts the product and runs the parts."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        lend_model(data, default_data_dir() / "models" / "smollm2" / SMOLLM2)
        with serving(Path(folder), "--speculation", "false") as server:
            limit = aiohttp.ClientTimeout(total=900)
            async with aiohttp.ClientSession(base_url=f"{server.base_url}/", timeout=limit) as client:
                await ask(client, "hello", 8)
                for part in options.parts.split(","):
                    if part == "first":
                        await first(client, options.rounds)
                    elif part == "together":
                        await together(client, options.rounds)
                    else:
                        await memory(client, server, options.sessions, options.tokens)


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="first,together,memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4000)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""What explaining cache misses costs: microseconds per step of a 6,000-token prompt, by what became of it.

python tests/bench/misses.py [--tokens 6000] [--rounds 200]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from magnitude_engine import api
from magnitude_engine.explain.cause import Told
from magnitude_engine.explain.finding import find, goes_on, told
from magnitude_engine.explain.overlap import common, pack, unpack


def prompt(tokens: int, time_of_day: str, tools: int = 20) -> tuple[api.ChatInput, list[int]]:
    """Returns a conversation of 20 messages, and ids that change where its text does."""
    draw = random.Random(1)
    texts = ["".join(chr(97 + draw.randrange(26)) for _ in range(tokens * 4 // 20)) for _ in range(20)]
    messages = [api.Message(role="system", content=f"The time is {time_of_day}. {texts[0]}")]
    messages += [api.Message(role="tool" if n % 2 else "assistant", content=text) for n, text in enumerate(texts[1:])]
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "x" * 40} for n in range(8)}}
    definitions = tuple(api.Tool(name=f"tool_{n}", description="y" * 200, parameters=schema) for n in range(tools))
    ids = [draw.randrange(40_000) for _ in range(tokens)]
    ids[40:48] = [ord(c) for c in time_of_day]
    return api.ChatInput(messages=tuple(messages), tools=definitions), ids


def read(ids: bytes, start: int, stop: int) -> str:
    return "".join(chr(i % 128) for i in unpack(ids, start, stop))


def cases(tokens: int) -> dict[str, Callable[[], object]]:
    """Returns what is timed."""
    chat, ids = prompt(tokens, "03:37:15")
    later, other_ids = prompt(tokens, "03:38:02")
    before, now, moved = told(chat, pack(ids[:-200])), told(chat, pack(ids)), told(later, pack(other_ids))
    draw = random.Random(2)
    foreign = Told(pack(draw.randrange(40_000) for _ in range(tokens)), tokens, later.messages, moved.tools)

    def miss(one: Told, other: Told) -> Callable[[], object]:
        return lambda: find(one, other, common(one.ids, other.ids), read)

    return {
        "taking a prompt in": lambda: told(chat, pack(ids)),
        "it goes on: compared": lambda: goes_on(now, before) and find(before, now, before.prompt, read),
        "a time differs": miss(before, moved),
        "tools in another order": miss(before, moved._replace(messages=chat.messages, tools=now.tools[::-1])),
        "nothing in common": miss(before, foreign),
    }


def main() -> None:
    """Prints the median of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    for name, work in cases(given.tokens).items():
        took = []
        for _ in range(given.rounds):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        print(f"{name:24} {statistics.median(took) * 1e6:8.0f} µs")


if __name__ == "__main__":
    main()

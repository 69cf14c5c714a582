"""What grammars cost: compiling, masks, forced tokens, forks and drafts, on public schemas with valid instances.

python tests/bench/grammar.py --model PATH [--schemas ../shared/data/schemas/public.jsonl]

Each schema stands as the arguments of one tool in a required call; its valid instances are followed token by token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompiledGrammar, GrammarCompiler
from magnitude_engine.decode.grammar.spec import JsonObject, JsonSchema, Spec, ToolCalls
from magnitude_engine.errors import RequestError
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.template import HERMES
from magnitude_engine.model.tokenizer import Tokenizer, from_gguf

SCHEMAS = Path(__file__).resolve().parents[3] / "shared" / "data" / "schemas" / "public.jsonl"
Result = TypeVar("Result")
DRAFT = 8
TALK = "Let me look at the files first, then I will write the answer that you asked for.\n" * 4


class Times:
    """Seconds by name."""

    def __init__(self) -> None:
        self._held: dict[str, list[float]] = defaultdict(list)

    def measure(self, name: str, act: Callable[[], Result]) -> Result:
        """Runs `act` and keeps how long it took."""
        began = time.perf_counter()
        result = act()
        self._held[name].append(time.perf_counter() - began)
        return result

    def table(self) -> str:
        """Returns one line per name: count, mean, p50, p99 and the longest, in microseconds."""
        lines = ["| what | n | mean | p50 | p99 | max |", "|---|---|---|---|---|---|"]
        for name, seconds in self._held.items():
            ordered = sorted(seconds)
            p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
            figures = (statistics.fmean(ordered), statistics.median(ordered), p99, ordered[-1])
            lines.append(f"| {name} | {len(ordered)} | " + " | ".join(f"{s * 1e6:,.0f}" for s in figures) + " |")
        return "\n".join(lines)


def follow(grammar: CompiledGrammar, tokens: list[int], times: Times, kind: str) -> tuple[int, int]:
    """Follows `tokens` as decoding does; returns how many were forced, and how many there were."""
    state, at, forced = grammar.begin(), 0, 0
    while at < len(tokens):
        run = times.measure(f"{kind}: forced tokens", state.forced)
        for token in run:
            state.accept(token)
        at += len(run)
        forced += len(run)
        if at >= len(tokens):
            break
        times.measure(f"{kind}: mask", state.mask)
        draft = tokens[at : at + DRAFT]
        times.measure(f"{kind}: masks of {DRAFT} drafted tokens", lambda d=draft: state.masks(d))  # type: ignore[misc]
        if at % 16 == 0:
            times.measure(f"{kind}: fork", state.fork)
        state.accept(tokens[at])
        at += 1
    return forced, len(tokens)


def as_call(schema: Any, name: str) -> ToolCalls:
    """Returns a required call of one tool with this schema."""
    return ToolCalls(tools=(api.Tool(name=name, parameters=schema),), format=HERMES, mode="required", parallel=False)


def compiled(compiler: GrammarCompiler, spec: Spec, times: Times, name: str) -> CompiledGrammar | None:
    """Returns the grammar, or None where it is refused."""
    try:
        return times.measure(name, lambda: compiler.compile(spec))
    except RequestError:
        return None


def run(tokenizer: Tokenizer, path: Path) -> None:
    """Prints the figures."""
    times, compiler = Times(), GrammarCompiler(tokenizer)
    times.measure("start: compiler with its helper", lambda: compiler.compile(JsonObject()))
    forced = total = refused = checked = 0
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        if compiled(compiler, JsonSchema(schema=row["schema"]), times, "compile: schema as response") is None:
            refused += 1
            continue
        if not isinstance(row["schema"], dict) or row["schema"].get("type") != "object":
            continue
        grammar = compiled(compiler, as_call(row["schema"], "act"), times, "compile: tool call")
        if grammar is None:
            refused += 1
            continue
        checked += grammar.check is not None
        compiled(compiler, as_call(row["schema"], "act"), times, "compile: again")
        for test in (t for t in row["tests"] if t["valid"]):
            arguments = json.dumps(test["data"], ensure_ascii=False)
            text = f'{HERMES.begin}\n{{"name": "act", "arguments": {arguments}}}\n{HERMES.end}'
            tokens = tokenizer.encode(text)
            if len(grammar.begin().masks(tokens).allowed) == len(tokens):
                part, whole = follow(grammar, tokens, times, "call")
                forced, total = forced + part, total + whole
    auto = ToolCalls(tools=(api.Tool(name="act", parameters={"type": "object"}),), format=HERMES)
    follow(compiler.compile(auto), tokenizer.encode(TALK), times, "free text")
    compiler.close()
    print("Microseconds\n")
    print(times.table())
    print(f"\nforced: {forced} of {total} tokens ({forced / max(total, 1):.1%}); refused {refused}, checked {checked}")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemas", type=Path, default=SCHEMAS)
    options = parser.parse_args()
    run(from_gguf(GgufFile.open(options.model)), options.schemas)


if __name__ == "__main__":
    main()

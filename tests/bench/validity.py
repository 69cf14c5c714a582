"""Whether what a model is made to write is valid: tool calls on recorded agents' tools, answers to public schemas.

python tests/bench/validity.py --model PATH [--parts tools schemas] [--draws 1] [--cap 128] [--every 1]

`tools`: each distinct tool set of the public traces, with its session's last question; calls required, left to the
model, and left to the model when it has just written the marker that begins one. `schemas`: one answer to each public
schema at temperature 1.5, at most 512 tokens. Everything that is complete is validated with jsonschema.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import torch
from jsonschema.validators import validator_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_engine import api
from magnitude_engine.config import EngineConfig
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel, load_model
from testkit.engine import Recorder, generate
from testkit.traces import public_traces
from testkit.validity import WAYS, Asked, Judged, Size, ask, judge, tool_sets

SCHEMAS = Path(__file__).resolve().parents[3] / "shared" / "data" / "schemas" / "public.jsonl"


def answers(engine: Engine, requests: Sequence[api.Generate]) -> list[Recorder]:
    """Returns the answers of an engine that runs, in order; after an interrupt as far as they are complete."""
    told = [Recorder() for _ in requests]
    for request, recorder in zip(requests, told, strict=True):
        engine.submit(request, recorder)
    with suppress(KeyboardInterrupt):
        while (open_ := sum(not recorder.done for recorder in told)) > 0:
            print(f"{open_:4d} answers to go", end="\r", file=sys.stderr, flush=True)
            time.sleep(1)
    return told


def measure_tools(engine: Engine, model: LoadedModel, options: argparse.Namespace) -> None:
    """Prints a table by source and way to call."""
    size = Size(options.keep, options.draws, options.cap, options.described)
    traces = tool_sets(public_traces())[:: options.every]
    asked = [each for way in WAYS for trace in traces for each in ask(trace, model, (way,), size)]
    rows: dict[tuple[str, str], list[tuple[Asked, Judged]]] = defaultdict(list)
    for each, told in zip(asked, answers(engine, [each.request for each in asked]), strict=True):
        if not told.done:
            continue
        found = judge(each, told, model.prompts.tool_format.begin)
        if told.failed is not None:
            print(f"REFUSED {each.source}, {each.way}: {told.failed.code}: {told.failed.message[:200]}")
        rows[each.source, each.way].append((each, found))
        rows["all", each.way].append((each, found))
    _print(rows)


def _print(rows: dict[tuple[str, str], list[tuple[Asked, Judged]]]) -> None:
    print("| source | calls | tool sets | answers | complete calls | valid | cut off | answer_invalid | other errors |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (source, way), found in sorted(rows.items(), key=lambda row: (row[0][0] == "all", row[0])):
        judged = [each for _, each in found]
        sets, calls = len({asked.trace for asked, _ in found}), sum(each.calls for each in judged)
        invalid = sum(each.refused == "answer_invalid" for each in judged)
        others = sum(bool(each.refused) for each in judged) - invalid
        valid = calls - sum(len(each.wrong) for each in judged)
        figures = (sets, len(found), calls, valid, sum(each.cut for each in judged), invalid, others)
        print(f"| {source} | {way} | " + " | ".join(map(str, figures)) + " |")
    total = [each for (source, _), found in rows.items() if source == "all" for _, each in found]
    tokens, forced = sum(each.tokens for each in total), sum(each.forced for each in total)
    print(f"\n{tokens} tokens, {forced / max(tokens, 1):.0%} forced")
    for problem in (problem for each in total for problem in each.wrong):
        print("INVALID", problem)


def measure_schemas(engine: Engine, options: argparse.Namespace) -> None:
    """Prints how many answers to public schemas are valid."""
    counts: Counter[str] = Counter()
    lines = SCHEMAS.read_text("utf-8").splitlines()[:: options.every]
    schemas = [json.loads(line)["schema"] for line in lines]
    for schema, told in zip(schemas, answers(engine, [_formatted(schema) for schema in schemas]), strict=True):
        counts[_verdict(schema, told) if told.done else "not awaited"] += 1
    print(dict(counts))


def _formatted(schema: Any) -> api.Generate:
    chat = api.ChatInput(messages=(api.Message(role="user", content="Give me an example as JSON."),))
    sampling = api.Sampling(temperature=1.5, seed=1)
    wanted = api.JsonSchemaFormat(schema=schema)
    return generate(chat, sampling=sampling, max_tokens=512, ignore_eos=False, format=wanted)


def _verdict(schema: Any, told: Recorder) -> str:
    if told.failed is not None:
        return told.failed.code
    if told.finish().reason == "length":
        return "cut off"
    judge: Any = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    return "valid" if judge.is_valid(json.loads(told.text())) else "INVALID"


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["tools"], choices=["tools", "schemas"])
    parser.add_argument("--profile", default="packed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=int, default=200, help="tokens of the last question")
    parser.add_argument("--described", action="store_true", help="with the descriptions of tools in the prompt")
    parser.add_argument("--draws", type=int, default=1, help="the first is greedy, the others at temperature 1")
    parser.add_argument("--cap", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--every", type=int, default=1, help="only every n-th tool set or schema")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = EngineConfig(model_path=str(options.model), profile=options.profile, kv_memory_mb=1024, max_waiting=4096)
    model = load_model(config)
    engine = Engine(model, config)
    engine.start()
    began = time.monotonic()
    if "tools" in options.parts:
        measure_tools(engine, model, options)
    if "schemas" in options.parts:
        measure_schemas(engine, options)
    print(f"{time.monotonic() - began:.0f} s")
    engine.close()


if __name__ == "__main__":
    main()

"""Runs the engine in this process: warm-up, a session of two steps, and branches of it.

usage: python in_process.py   after `magnitude pull smollm2`; MAGNITUDE_MODEL names the model to use instead
"""

from __future__ import annotations

from typing import Any

from magnitude import AgentConfig, MagnitudeEngine

CONFIG = AgentConfig(
    model="meta-llama/Meta-Llama-3-70B-Instruct",
    enable_hierarchical_cache=True,
    max_parallel_branches=8,
    optimization_level="aggressive",
)
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What an encyclopaedia says of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 16}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    with MagnitudeEngine(CONFIG) as engine:
        engine.register_tools([LOOK_UP])
        engine.warmup()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is worth seeing in Paris?"}]
        asked: dict[str, Any] = {"session_id": "example", "tools": [LOOK_UP], "temperature": 0.0, "max_tokens": 48}
        step = engine.chat(messages, tool_choice="required", **asked)
        call = step["tool_calls"][0]
        print("call:", call["function"]["name"], call["function"]["arguments"])
        messages += [
            {"role": "assistant", "content": step["text"], "tool_calls": step["tool_calls"]},
            {"role": "tool", "tool_call_id": call["id"], "content": "the Louvre and the Seine"},
        ]
        with engine.branches("example") as branches:
            for seed, branch in enumerate(branches.fork(3)):
                said = branch.chat(messages, tools=[LOOK_UP], tool_choice="none", max_tokens=24, seed=seed)
                branch.score(-len(said["text"]))
            best = branches.best()
            branches.select(best)
        answer = engine.chat(messages, tool_choice="none", **asked)
        print("answer:", answer["text"])
        print("cached tokens:", answer["usage"]["prompt_tokens_details"]["cached_tokens"])


if __name__ == "__main__":
    main()

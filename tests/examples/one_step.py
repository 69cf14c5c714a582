"""Sets a client up, checks what it talks to, and takes one optimised step.

usage: python one_step.py   with `magnitude serve` running, or MAGNITUDE_ENDPOINT set
"""

from __future__ import annotations

import asyncio

from magnitude_engine import AgentRuntimeConfig, MagnitudeClient

CONFIG = AgentRuntimeConfig(
    max_batch_size=32,
    enable_predictive_caching=True,
    speculative_decoding_enabled=True,
    draft_model_path="magnitude-1b-instruct-draft",
    target_model_path="meta-llama/Llama-3.3-70B-Instruct",
    optimization_target="latency_and_cost",
)


async def main() -> None:
    client = MagnitudeClient(config=CONFIG)
    health = await client.verify_runtime_health()
    print(f"{health.model} is {health.status}; speculation {health.speculation}, cache {health.cache}")
    for warning in health.warnings:
        print("note:", warning)
    step = await client.generate_optimized(
        session_id="example-one-step",
        prompt="Goal: say which city is the capital of France\nObservation: none yet\nThought:",
        temperature=0.0,
        max_tokens=48,
        stop_sequences=["</tool_call>", "Observation:"],
        track_feedback=True,
    )
    print(step["text"])
    print(step["finish_reason"], step["route"], step["usage"]["completion_tokens"])


if __name__ == "__main__":
    asyncio.run(main())

"""litellm's SDK: an agent of two tool calls over Chat Completions and over Anthropic's Messages, and Responses.

usage: python litellm_sdk.py BASE_URL
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from weather import QUESTION, Station

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def step(streamed: bool, **asked: Any) -> Any:
    """Asks once; a stream is put together by litellm itself."""
    if not streamed:
        return litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks, messages=asked["messages"])


def loop(model: str, api_base: str, streamed: bool) -> None:
    """The model must call the tool twice, and must answer then."""
    station = Station()
    system = f"You compare the weather. {model} {streamed}"
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    for choice in ("required", "required", "none"):
        answer = step(
            streamed,
            model=model,
            api_base=api_base,
            api_key="any",
            messages=messages,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=64,
            max_retries=0,
        )
        assert answer.usage.completion_tokens > 0
        assert answer.usage.prompt_tokens > 60
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            said = station.read(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert len(station.asked) == 2
    assert message.content


def main(base_url: str) -> None:
    litellm.telemetry = False
    loops = 0
    for model, api_base in (("openai/smollm2", base_url), ("anthropic/smollm2", base_url.removesuffix("/v1"))):
        for streamed in (False, True):
            loop(model, api_base, streamed)
            loops += 1
    asked = {"model": "openai/smollm2", "api_base": base_url, "api_key": "any", "temperature": 0}
    answer = litellm.responses(**asked, input="What is the capital of France?", max_output_tokens=24)
    assert answer.usage.output_tokens > 0
    assert "Paris" in answer.output[0].content[0].text
    print(json.dumps({"loops": loops}))


if __name__ == "__main__":
    main(sys.argv[1])

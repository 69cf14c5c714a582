"""openai-agents: an agent of two tool calls over Chat Completions and over Responses, and an answer of a type.

usage: python openai_agents.py BASE_URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
    RunResultStreaming,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from weather import QUESTION, Station

GREEDY = ModelSettings(temperature=0, max_tokens=64, include_usage=True, parallel_tool_calls=False)


class Town(BaseModel):
    """What the model is made to answer."""

    name: str = Field(max_length=12)
    big: bool


async def ended(run: RunResult | RunResultStreaming) -> str:
    """Waits for the end of a run and returns its final answer."""
    if isinstance(run, RunResultStreaming):
        kinds = {event.type async for event in run.stream_events()}
        assert "raw_response_event" in kinds
    requests = run.context_wrapper.usage
    assert requests.requests == 3
    assert requests.output_tokens > 0
    assert isinstance(run.final_output, str)
    return run.final_output


async def loop(model: Model, streamed: bool) -> None:
    """The model must call the tool twice, and must answer then."""
    station = Station()

    @function_tool
    def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
        """Current weather of a city."""
        said = station.read(city)
        if len(station.asked) == 2:
            agent.model_settings.tool_choice = "none"
        return said

    agent = Agent(
        name="traveller",
        instructions=f"You compare the weather. {type(model).__name__} {streamed}",
        model=model,
        model_settings=GREEDY.resolve(ModelSettings(tool_choice="required")),
        tools=[get_weather],
        reset_tool_choice=False,
    )
    run = Runner.run_streamed(agent, QUESTION) if streamed else await Runner.run(agent, QUESTION)
    assert await ended(run)
    assert len(station.asked) == 2


async def main(base_url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=120)
    loops = 0
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="smollm2", openai_client=client)
        for streamed in (False, True):
            await loop(model, streamed)
            loops += 1
        typed = Agent(name="namer", instructions=kind.__name__, model=model, model_settings=GREEDY, output_type=Town)
        town = (await Runner.run(typed, "Name a town.")).final_output_as(Town, raise_if_incorrect_type=True)
        assert town.name
    print(json.dumps({"loops": loops}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

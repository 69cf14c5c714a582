"""pydantic-ai: an agent of two tool calls that ends in a type, over Chat Completions and over Responses.

usage: python pydantic_agent.py BASE_URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from weather import QUESTION, Station


class Comparison(BaseModel):
    """Which of two cities is the warmer one."""

    warmer: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


@dataclass
class Turns(AbstractCapability[Station]):
    """Two steps call the tool, the third one ends the run."""

    def get_model_settings(self) -> Callable[[RunContext[Station]], ModelSettings]:
        """Returns the settings of a step."""

        def settings(context: RunContext[Station]) -> ModelSettings:
            wanted = "get_weather" if len(context.deps.asked) < 2 else "final_result"
            return ModelSettings(tool_choice=[wanted])

        return settings


async def loop(model: OpenAIChatModel | OpenAIResponsesModel, streamed: bool) -> None:
    """The model must call the tool twice, then give the result of its type."""
    agent = Agent(
        model,
        deps_type=Station,
        output_type=Comparison,
        instructions=f"You compare the weather. {type(model).__name__} {streamed}",
        model_settings=ModelSettings(temperature=0, max_tokens=64, parallel_tool_calls=False),
        capabilities=[Turns()],
        retries=0,
    )

    @agent.tool
    def get_weather(context: RunContext[Station], city: Annotated[str, Field(max_length=12)]) -> str:
        """Current weather of a city."""
        return context.deps.read(city)

    station = Station()
    if streamed:
        async with agent.run_stream(QUESTION, deps=station) as run:
            output = await run.get_output()
            usage = run.usage
    else:
        result = await agent.run(QUESTION, deps=station)
        output, usage = result.output, result.usage
    assert isinstance(output, Comparison)
    assert len(station.asked) == 2
    assert usage.requests == 3
    assert usage.output_tokens > 0


async def main(base_url: str) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="any")
    chat, responses = OpenAIChatModel("smollm2", provider=provider), OpenAIResponsesModel("smollm2", provider=provider)
    runs = ((chat, False), (chat, True), (responses, True))
    for model, streamed in runs:
        await loop(model, streamed)
    greedy = ModelSettings(temperature=0, max_tokens=64)
    typed = Agent(chat, output_type=NativeOutput(Comparison), model_settings=greedy, retries=0)
    assert isinstance((await typed.run("Paris has 11 degrees, Rome 12.")).output, Comparison)
    print(json.dumps({"loops": len(runs)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

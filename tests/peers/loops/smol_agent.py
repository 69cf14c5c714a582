"""smolagents: its tool-calling agent with its own prompts, streamed and not.

usage: python smol_agent.py BASE_URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

from smolagents import LogLevel, OpenAIServerModel, Tool, ToolCallingAgent
from weather import QUESTION, Station


def named(tool: str) -> dict[str, Any]:
    """Returns the choice of one tool."""
    return {"type": "function", "function": {"name": tool}}


class GetWeather(Tool):
    """The tool, which settles what the next step calls."""

    name = "get_weather"
    description = "Current weather of a city"
    inputs = {"city": {"type": "string", "description": "its name", "enum": ["Paris", "Rome"]}}  # noqa: RUF012
    output_type = "string"

    def __init__(self, station: Station, model: OpenAIServerModel) -> None:
        super().__init__()
        self.station = station
        self.model = model

    def forward(self, city: str) -> str:
        """Returns the weather of a city."""
        said = self.station.read(city)
        if len(self.station.asked) == 2:
            self.model.kwargs["tool_choice"] = named("final_answer")
        return said


def main(base_url: str) -> None:
    for streamed in (False, True):
        station = Station()
        model = OpenAIServerModel(
            "smollm2",
            api_base=base_url,
            api_key="any",
            client_kwargs={"max_retries": 0, "timeout": 120},
            temperature=0,
            max_tokens=256,
            tool_choice=named("get_weather"),
        )
        agent = ToolCallingAgent(
            [GetWeather(station, model)],
            model,
            stream_outputs=streamed,
            verbosity_level=LogLevel.ERROR,
            max_steps=3,
            return_full_result=True,
        )
        result = agent.run(f"{QUESTION} {streamed}")
        assert result.state == "success", result
        assert result.output
        assert len(station.asked) == 2
        assert result.token_usage is not None
        assert result.token_usage.output_tokens > 0
    # Its console leaves the last line open.
    print("\n" + json.dumps({"loops": 2}))


if __name__ == "__main__":
    main(sys.argv[1])

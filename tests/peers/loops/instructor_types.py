"""instructor: an agent whose steps are types, in its modes; a validation that fails once, and partial answers.

usage: python instructor_types.py BASE_URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from weather import QUESTION, Station

SESSION = "x-magnitude-session"


class GetWeather(BaseModel):
    """Current weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)


class Comparison(BaseModel):
    """Which of two cities is the warmer one."""

    model_config = ConfigDict(extra="forbid")
    warmer: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


class Doubted(Comparison):
    """A comparison that is believed when it is made the second time."""

    @field_validator("warmer")
    @classmethod
    def twice(cls, value: str, info: ValidationInfo) -> str:
        """Refuses the first answer of a request."""
        answers: list[str] = (info.context or {})["answers"]
        answers.append(value)
        if len(answers) == 1:
            raise ValueError("are you sure? Answer again")
        return value


def loop(client: Any, mode: instructor.Mode) -> None:
    """Two calls, each of the type of the tool, then the answer of its type."""
    station = Station()
    messages: list[Any] = [{"role": "system", "content": f"Mode {mode.value}."}, {"role": "user", "content": QUESTION}]
    plain: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 64, "max_retries": 0}
    for _ in range(2):
        call, raw = client.chat.completions.create_with_completion(
            response_model=GetWeather, messages=messages, **plain
        )
        assert raw.usage.completion_tokens > 0
        messages += [
            {"role": "assistant", "content": call.model_dump_json()},
            {"role": "user", "content": station.read(call.city)},
        ]
    answer = client.chat.completions.create(response_model=Comparison, messages=messages, **plain)
    assert isinstance(answer, Comparison)
    assert len(station.asked) == 2


def main(base_url: str) -> None:
    modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
    for mode in modes:
        # Each type is a tool of its own here, so that the steps have nothing in common by which they are recognised.
        sdk = OpenAI(
            base_url=base_url, api_key="any", max_retries=0, timeout=120, default_headers={SESSION: mode.value}
        )
        client = instructor.from_openai(sdk, mode=mode)
        loop(client, mode)
        asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 64}
        answers: list[str] = []
        doubted = client.chat.completions.create(
            response_model=Doubted,
            messages=[{"role": "user", "content": f"Paris has 11 degrees, Rome 12. {mode.value}"}],
            max_retries=1,
            context={"answers": answers},
            **asked,
        )
        assert len(answers) == 2
        assert doubted.warmer == answers[1]
        *_, last = client.chat.completions.create_partial(
            response_model=Comparison, messages=[{"role": "user", "content": "Paris has 11 degrees."}], **asked
        )
        assert last.warmer
        assert isinstance(last.degrees, int)
    print(json.dumps({"loops": len(modes)}))


if __name__ == "__main__":
    main(sys.argv[1])

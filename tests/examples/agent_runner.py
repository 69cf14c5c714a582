"""An agent of at most ten iterations: it thinks, looks, and stops at its end mark.

usage: python agent_runner.py   with `magnitude serve` running, or MAGNITUDE_ENDPOINT set
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from magnitude_engine import AgentRuntimeConfig, MagnitudeClient

END = "FINAL_ANSWER:"
FACTS = {"paris": "Paris has 2.1 million inhabitants", "rome": "Rome has 2.8 million inhabitants"}


@dataclass
class AgentRunner:
    """Works on one goal in one session.

    Attributes:
        limit: iterations after which it gives up.
        thoughts: what the model said, by iteration.
    """

    client: MagnitudeClient
    goal: str
    limit: int = 10
    session_id: str = field(default_factory=lambda: f"runner-{uuid.uuid4()}")
    thoughts: list[str] = field(default_factory=list)

    async def run(self) -> str | None:
        """Returns the answer; None when the limit is reached without one."""
        prompt = f"Goal: {self.goal}\nAnswer with {END} when you know.\nObservation: nothing yet\nThought:"
        for _ in range(self.limit):
            step = await self.client.generate_optimized(
                session_id=self.session_id,
                prompt=prompt,
                temperature=0.0,
                max_tokens=24,
                stop_sequences=["Observation:"],
                track_feedback=True,
            )
            thought = step["text"].strip()
            self.thoughts.append(thought)
            if END in thought:
                return thought.partition(END)[2].strip()
            prompt += f" {thought}\nObservation: {self.look(thought)}\nThought:"
        return None

    def look(self, thought: str) -> str:
        """Returns what is known of the first city that a thought names."""
        found = [FACTS[city] for city in FACTS if city in thought.lower()]
        return found[0] if found else "nothing is known of that; name a city"


async def main() -> None:
    runner = AgentRunner(MagnitudeClient(config=AgentRuntimeConfig(optimization_target="latency")), "the larger city")
    answer = await runner.run()
    report = await runner.client.session(runner.session_id).report()
    print(f"answer: {answer}")
    print(f"iterations: {len(runner.thoughts)}, steps of the session: {report.steps}")


if __name__ == "__main__":
    asyncio.run(main())

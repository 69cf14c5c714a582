"""An agent of OpenHands with a shell: `python openhands_agent.py BASE_URL MODEL TASK`."""

from __future__ import annotations

import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

base_url, model, task = sys.argv[1:]
agent = Agent(
    llm=LLM(usage_id="agent", model=f"openai/{model}", base_url=base_url, api_key="any"),
    tools=[Tool(name=TerminalTool.name)],
)
conversation = Conversation(agent=agent, workspace=".")
conversation.send_message(task)
conversation.run()

"""The headers by which agents say which session a request belongs to, and what else they tell of it.

Names are in lower case. Not in the table, since they name no session: `x-session-token` of llm-d (a server of its
choice), `x-llm-d-inference-fairness-id` (a customer), `x-client-request-id` (by OpenAI's own definition one request).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

MAX_DURATIONS = 32
MAX_DURATIONS_CHARS = 4096
LONGEST_TOOL_MS = 7 * 86_400_000


class Client(NamedTuple):
    """How one kind of agent names its session; the first header that is present counts.

    Attributes:
        branch: names a sub-agent within the session; the session's own id names the first agent.
        parent: names the session of the agent that started this one as a sub-agent, where no branch does.
    """

    source: str
    session: tuple[str, ...]
    branch: str = ""
    parent: str = ""


CLIENTS: tuple[Client, ...] = (
    Client("claude-code", ("x-claude-code-session-id",), branch="x-claude-code-agent-id"),
    Client("codex", ("session_id", "session-id", "thread-id"), "thread-id", "x-codex-parent-thread-id"),
    Client("x-session-id", ("x-session-id",), parent="x-parent-session-id"),
    Client("x-session-affinity", ("x-session-affinity",), parent="x-parent-session-id"),
    Client("dynamo", ("x-dynamo-session-id",), parent="x-dynamo-parent-session-id"),
    Client("amp", ("x-amp-thread-id",)),
    Client("grok", ("x-grok-conv-id",)),
    Client("qwen-code", ("x-qwen-code-session-id",)),
    Client("litellm", ("x-litellm-trace-id",)),
)

FINAL = "x-dynamo-session-final"
REQUEST_CLASS = "x-claude-code-request-class"
TOOL_DURATIONS = "x-claude-code-prev-tool-durations"
# Calls beside the conversation: they neither go on from its last step nor are gone on from.
AUXILIARY = "auxiliary"
ASIDE = (AUXILIARY, "compaction")
# Offers tools in every step of a conversation; without tools it asks for a title or a summary.
_ALWAYS_TOOLS = "opencode/"


def aside(present: Mapping[str, str], *, tools: bool) -> str | None:
    """Returns the class of a call that an agent makes beside its conversation, None for a step of it.

    Claude Code tells it: `auxiliary` for titles and the like, `compaction` for the summary of a long history. Of
    OpenCode a request without `tools` is auxiliary.
    """
    told = present.get(REQUEST_CLASS, "").lower()
    if told in ASIDE:
        return told
    return AUXILIARY if not tools and present.get("user-agent", "").startswith(_ALWAYS_TOOLS) else None


def tool_seconds(present: Mapping[str, str]) -> dict[str, float]:
    """Returns how long the tools of the last step ran, by name; of several calls of one tool the longest.

    Claude Code tells it in milliseconds, names percent-encoded: `Bash=742;Read=9`. What cannot be read is left out.
    """
    told = present.get(TOOL_DURATIONS, "")
    found: dict[str, float] = {}
    if not told or len(told) > MAX_DURATIONS_CHARS:
        return found
    for entry in told.split(";")[:MAX_DURATIONS]:
        name, _, value = entry.strip().rpartition("=")
        tool = unquote(name).strip()
        if tool and value.isascii() and value.isdecimal() and len(value) < 12 and int(value) <= LONGEST_TOOL_MS:
            found[tool] = max(found.get(tool, 0.0), int(value) / 1000)
    return found

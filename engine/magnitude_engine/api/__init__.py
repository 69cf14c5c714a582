"""The nouns that proxy and worker share, and the frames they exchange.

Everything here is a frozen msgspec struct and needs neither torch nor the proxy. A request is one `Generate`;
its answer is a stream of `Event`s, the same vocabulary whether a worker or an upstream server produced it and
whether the client speaks Chat Completions, Responses or Messages:

    Started → Progress* → (Delta | Finished)* → Completed
                       ↘ Failed (at any point; nothing follows)

On the unix socket each frame is a 4-byte big-endian length and a msgpack map (`encode_frame`, `FrameReader`).
Frames of one request carry its `request` id and `epoch`; a receiver drops frames whose epoch is not the one it
waits for, so that late frames of a lost attempt cannot reach a client.
"""

from __future__ import annotations

from magnitude_engine.api.cache import (
    CacheReport,
    CacheRun,
    SessionUse,
    TierUse,
)
from magnitude_engine.api.commands import (
    PROTOCOL_VERSION,
    Cancel,
    Command,
    Count,
    EndSession,
    Expect,
    Generate,
    Hello,
    Inspect,
    Preferences,
    Probe,
    Register,
    Resume,
    Sampling,
    ToolEvent,
)
from magnitude_engine.api.conversation import (
    ChatInput,
    FinishReason,
    Format,
    Frozen,
    Input,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    Message,
    RegexFormat,
    Role,
    TextInput,
    TokenInput,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from magnitude_engine.api.events import (
    AnswerEvent,
    Completed,
    Delta,
    Event,
    Failed,
    Finished,
    ModelCard,
    Progress,
    ProposerUse,
    Registered,
    RegisteredTool,
    Started,
    Status,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
    Welcome,
)
from magnitude_engine.api.frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    encode_frame,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "AnswerEvent",
    "CacheReport",
    "CacheRun",
    "Cancel",
    "ChatInput",
    "Command",
    "Completed",
    "Count",
    "Delta",
    "EndSession",
    "Event",
    "Expect",
    "Failed",
    "FinishReason",
    "Finished",
    "Format",
    "FrameReader",
    "Frozen",
    "Generate",
    "Hello",
    "Input",
    "Inspect",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "LarkFormat",
    "Message",
    "ModelCard",
    "Preferences",
    "Probe",
    "Progress",
    "ProposerUse",
    "RegexFormat",
    "Register",
    "Registered",
    "RegisteredTool",
    "Resume",
    "Role",
    "Sampling",
    "SessionUse",
    "Started",
    "Status",
    "TextInput",
    "TierUse",
    "TokenInput",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolEvent",
    "ToolMode",
    "TopLogprob",
    "Usage",
    "Welcome",
    "encode_frame",
]

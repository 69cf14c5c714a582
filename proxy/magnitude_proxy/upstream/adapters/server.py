"""What is known of one upstream server: its kind and the few facts of it that decide what it is told."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from magnitude_proxy.config import UpstreamKind

NAMES: dict[UpstreamKind, str] = {
    "openai": "plain OpenAI",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "trtllm": "TensorRT-LLM",
    "tgi": "TGI",
    "dynamo": "Dynamo",
    "magnitude": "Magnitude",
}
# How a server orders requests: not at all, a lower number first, or a higher one.
Order = Literal["none", "low_first", "high_first"]
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class Server(NamedTuple):
    """One server.

    Attributes:
        version: its numbers; empty where it does not say, which counts as new.
        slots: how many sequences a llama.cpp server holds; None where it does not say.
        order: how SGLang orders requests.
        keeps_sessions: SGLang's cache knows sessions.
    """

    kind: UpstreamKind = "openai"
    version: tuple[int, ...] = ()
    slots: int | None = None
    order: Order = "none"
    keeps_sessions: bool = False

    def older_than(self, *version: int) -> bool:
        """True when its version is known and lower."""
        return bool(self.version) and self.version < version

    def words(self) -> str:
        """Returns its name and version for a reader."""
        return " ".join([NAMES[self.kind], *([".".join(map(str, self.version))] if self.version else [])])


def read_version(text: object) -> tuple[int, ...]:
    """Returns the numbers of a version such as `0.32.0rc1`; nothing for anything else."""
    found = _NUMBERS.search(text) if isinstance(text, str) else None
    return tuple(int(part) for part in found.groups("0")) if found else ()

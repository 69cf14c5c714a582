"""What servers of each kind answer to the questions that recognise them.

Those of llama.cpp and vLLM were recorded from llama-server b11434 and vLLM 0.32.0 and shortened; the others are written
from the servers' own sources and documentation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from magnitude_proxy.config import UpstreamKind
from magnitude_proxy.upstream.adapters.recognise import Ask, Reply
from magnitude_proxy.upstream.adapters.server import Server


class Recorded(NamedTuple):
    """One server: who owns its models, what further paths answer, and what it must be recognised as."""

    owner: str
    pages: dict[str, Any]
    known: Server
    software: str = "uvicorn"


SERVERS: dict[UpstreamKind, Recorded] = {
    "openai": Recorded("system", {}, Server()),
    "vllm": Recorded("vllm", {"/version": {"version": "0.32.0"}}, Server("vllm", (0, 32, 0))),
    "sglang": Recorded(
        "sglang",
        {
            "/server_info": {
                "model_path": "m",
                "version": "0.5.6",
                "enable_priority_scheduling": True,
                "schedule_low_priority_values_first": False,
                "enable_session_radix_cache": True,
                "internal_states": [{}],
            }
        },
        Server("sglang", (0, 5, 6), order="high_first", keeps_sessions=True),
    ),
    "llamacpp": Recorded(
        "llamacpp",
        {"/props": {"total_slots": 4, "model_path": "m.gguf", "endpoint_slots": True, "modalities": {"vision": False}}},
        Server("llamacpp", slots=4),
        "llama.cpp",
    ),
    "trtllm": Recorded("tensorrt_llm", {"/version": {"version": "1.4.0rc2"}}, Server("trtllm", (1, 4, 0))),
    "tgi": Recorded(
        "m", {"/info": {"model_id": "m", "max_total_tokens": 4096, "version": "3.3.5"}}, Server("tgi", (3, 3, 5))
    ),
    "dynamo": Recorded(
        "nvidia",
        {"/health": {"status": "healthy", "endpoints": ["dyn://dynamo.backend.generate"], "instances": [{}]}},
        Server("dynamo"),
    ),
    "magnitude": Recorded("u0", {}, Server("magnitude"), "magnitude"),
}


def asking(recorded: Recorded, asked: list[str] | None = None) -> Ask:
    """Returns what asks a recorded server at `http://h/v1`; the URLs are added to `asked`."""

    async def ask(url: str) -> Reply | None:
        if asked is not None:
            asked.append(url)
        path = url.removeprefix("http://h")
        entry = {"id": "m", "object": "model", "created": 1, "owned_by": recorded.owner}
        page = {"object": "list", "data": [entry]} if path == "/v1/models" else recorded.pages.get(path)
        return Reply(404 if page is None else 200, recorded.software, msgspec.json.encode(page))

    return ask

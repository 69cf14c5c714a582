"""The adapters: for each kind of server what it understands, what it lacks, and under which names.

Read from vLLM 0.32, SGLang 0.5.6, llama.cpp b11434, TensorRT-LLM 1.4, TGI 3.3 and Dynamo 1.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from magnitude_proxy.config import UpstreamKind
from magnitude_proxy.upstream.adapters import forms, tell
from magnitude_proxy.upstream.adapters.forms import FORM_FIELDS, Writer
from magnitude_proxy.upstream.adapters.server import Server
from magnitude_proxy.upstream.adapters.tell import Teller

SAMPLING = frozenset({"top_k", "min_p", "ignore_eos"})
# Beyond OpenAI's fields, these decide what the answer is.
EXTENDED = SAMPLING | FORM_FIELDS
# OpenAI's fields that no open server knows: they would answer as if these were not there.
_HOSTED = frozenset({"functions", "function_call", "audio", "modalities", "web_search_options"})
_TOKENS = {"max_completion_tokens": "max_tokens"}
_OPENAI_HINTS = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """One kind of server.

    Attributes:
        fields: fields beyond OpenAI's that it understands under their own names; `response_format` where its
            completions know it too.
        write: how it is asked for a form of the answer.
        tell: what it is told about whom a request is for.
        lacks: fields of OpenAI's that it ignores although they change the answer.
        drops: fields that change no answer and that it refuses.
        renames: fields that it knows by another name only.
        own_format: its `response_format` differs from OpenAI's.
        whole_top_k: the value of `top_k` that keeps the whole vocabulary; None where -1 does.
    """

    fields: frozenset[str] = frozenset()
    write: Writer = forms.plain
    tell: Teller = tell.nothing
    lacks: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    renames: Mapping[str, str] = field(default_factory=dict)
    own_format: bool = False
    whole_top_k: int | None = None


ADAPTERS: dict[UpstreamKind, Adapter] = {
    "openai": Adapter(),
    "vllm": Adapter(
        fields=SAMPLING | {"structured_outputs", "response_format"},
        write=forms.structured,
        tell=tell.vllm,
        lacks=_HOSTED | {"best_of"},
    ),
    "sglang": Adapter(
        fields=SAMPLING | {"response_format"},
        write=forms.sglang,
        tell=tell.sglang,
        lacks=_HOSTED | {"best_of"},
    ),
    "llamacpp": Adapter(
        fields=SAMPLING,
        write=forms.llamacpp,
        tell=tell.llamacpp,
        lacks=_HOSTED | {"best_of", "suffix"},
        whole_top_k=0,
    ),
    "trtllm": Adapter(
        fields=SAMPLING | {"response_format"},
        write=forms.trtllm,
        tell=tell.trtllm,
        lacks=_HOSTED | {"parallel_tool_calls", "suffix"},
        drops=_OPENAI_HINTS | {"metadata", "store", "service_tier"},
        renames=_TOKENS,
        whole_top_k=0,
    ),
    "tgi": Adapter(
        write=forms.tgi,
        lacks=_HOSTED | {"parallel_tool_calls", "logit_bias", "presence_penalty", "n", "best_of", "suffix", "echo"},
        renames=_TOKENS,
        own_format=True,
    ),
    "dynamo": Adapter(
        fields=SAMPLING,
        write=forms.guided,
        tell=tell.dynamo,
        lacks=_HOSTED,
        drops=_OPENAI_HINTS,
    ),
    "magnitude": Adapter(fields=EXTENDED | {"response_format"}, tell=tell.magnitude),
}
_OLD_VLLM = Adapter(
    fields=SAMPLING | {"response_format"}, write=forms.guided, tell=tell.vllm, lacks=ADAPTERS["vllm"].lacks
)


def adapter(server: Server) -> Adapter:
    """Returns the adapter of a server; vLLM had other fields for the form of an answer before 0.11."""
    if server.kind == "vllm" and server.older_than(0, 11):
        return _OLD_VLLM
    return ADAPTERS[server.kind]

"""Settings of the engine and of the published client: frozen, composed, checked once.

`EngineConfig` starts a worker; `AgentRuntimeConfig` is what a program tells the server through
`MagnitudeClient`. Both reject unknown fields. Nothing here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from magnitude_engine.errors import ConfigError

Profile = Literal["reference", "packed", "native"]
OptimizationLevel = Literal["off", "balanced", "aggressive"]
OptimizationTarget = Literal["latency", "cost", "latency_and_cost"]

PAGE_TOKENS = 16


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker process serves and how much it may use."""

    model_path: Annotated[str, Meta(description="GGUF file or folder with safetensors and tokenizer.json")]
    model_name: Annotated[str, Meta(description="name under which the model is listed")] = "default"
    profile: Annotated[Profile | None, Meta(description="numeric profile; default packed on CPU, native on GPU")] = None
    optimization_level: Annotated[OptimizationLevel, Meta(description="off computes every prompt anew")] = "balanced"
    speculation: Annotated[bool, Meta(description="draft tokens and verify them; never changes what is said")] = True
    draft_model_path: (
        Annotated[
            str, Meta(min_length=1, description="a smaller model of the same vocabulary that drafts; file or folder")
        ]
        | None
    ) = None
    context_length: Annotated[int, Meta(ge=16, description="shorten the model's context")] | None = None
    kv_memory_mb: Annotated[int, Meta(ge=1, description="memory for keys and values, MiB")] = 2048
    kv_host_mb: Annotated[int, Meta(ge=0, description="host memory for pages off the device, MiB; 0: none")] = 0
    kv_disk_mb: Annotated[int, Meta(ge=0, description="disk space for cached pages, MiB; 0: none")] = 0
    kv_dir: Annotated[str, Meta(min_length=1, description="folder of the disk tier")] | None = None
    max_batch_size: Annotated[int, Meta(ge=1, le=1024, description="sequences decoded together")] = 32
    max_waiting: Annotated[int, Meta(ge=0, le=100_000, description="requests queued before 429")] = 256
    prefill_chunk: Annotated[int, Meta(ge=1, le=65_536, description="prompt tokens computed per step")] = 256
    threads: Annotated[int, Meta(ge=0, le=1024, description="CPU threads; 0 means all cores")] = 0
    max_n: Annotated[int, Meta(ge=1, le=1024, description="choices per request")] = 16

    @property
    def draft_kv_mb(self) -> int:
        """Memory for the draft model's keys and values, MiB."""
        return max(1, self.kv_memory_mb // 8)

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted: neither switched off nor excluded by `optimization_level`."""
        return self.speculation and self.optimization_level != "off"


class AgentRuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client expects and prefers; sent as `magnitude.config` with each request.

    Attributes:
        max_batch_size: most sequences decoded together; can only lower what the server allows.
        enable_predictive_caching: tool-time prefill and read-ahead for this client's sessions.
        speculative_decoding_enabled: speculation for this client's requests.
        draft_model_path: the draft the client expects: a name, a path or a hub id.
        target_model_path: the model the client expects.
        optimization_target: the routing objective.
    """

    max_batch_size: int | None = None
    enable_predictive_caching: bool | None = None
    speculative_decoding_enabled: bool | None = None
    draft_model_path: str | None = None
    target_model_path: str | None = None
    optimization_target: OptimizationTarget | None = None

    def __post_init__(self) -> None:
        size = self.max_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"max_batch_size must be a whole number of at least 1, not {size!r}", param="max_batch_size"
            )
        if self.optimization_target not in (None, "latency", "cost", "latency_and_cost"):
            raise ConfigError(
                "optimization_target must be 'latency', 'cost' or 'latency_and_cost', "
                f"not {self.optimization_target!r}",
                param="optimization_target",
            )


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine inside the caller's own process is set up; nothing here changes what a model says.

    Attributes:
        model: a pulled name, a GGUF file or a model folder; the variable MAGNITUDE_MODEL overrides it.
        enable_hierarchical_cache: keep cached pages in slower memory too, in the sizes that `MagnitudeEngine` is
            given; on disk they outlive the process, in the user's data folder, readable by the user only.
        max_parallel_branches: most open branches of a session.
        optimization_level: `off` computes every prompt anew: nothing is kept between requests, in no tier, and nothing
            is computed ahead. `balanced` reuses what is cached, uses the tiers, and computes registered tools, the
            beginning of a session's next prompt and the output of running tools ahead, while nothing else runs.
            `aggressive` selects the same as `balanced`.
    """

    model: str = "smollm2"
    enable_hierarchical_cache: bool = True
    max_parallel_branches: int = 8
    optimization_level: OptimizationLevel = "balanced"

    def __post_init__(self) -> None:
        branches = self.max_parallel_branches
        if isinstance(branches, bool) or not isinstance(branches, int) or not 1 <= branches <= 1024:
            raise ConfigError(
                f"max_parallel_branches must be a whole number from 1 to 1024, not {branches!r}",
                param="max_parallel_branches",
            )
        if self.optimization_level not in ("off", "balanced", "aggressive"):
            raise ConfigError(
                f"optimization_level must be 'off', 'balanced' or 'aggressive', not {self.optimization_level!r}",
                param="optimization_level",
            )
        if not isinstance(self.enable_hierarchical_cache, bool):
            raise ConfigError(
                f"enable_hierarchical_cache must be True or False, not {self.enable_hierarchical_cache!r}",
                param="enable_hierarchical_cache",
            )
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, not {self.model!r}", param="model")


def cache_folder(config: EngineConfig) -> Path:
    """Returns the folder of the disk tier."""
    return Path(config.kv_dir) if config.kv_dir else default_data_dir() / "kv" / "default"


def default_data_dir() -> Path:
    """Returns MAGNITUDE_DATA_DIR, else `magnitude` under the user's XDG data folder."""
    explicit = os.environ.get("MAGNITUDE_DATA_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "magnitude"

"""A Llama-family folder as Hugging Face publishes it: config.json, *.safetensors (sharded too), tokenizer.json."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from magnitude_engine.errors import ModelUnsupported
from magnitude_engine.model.tokenizer import Tokenizer, from_json
from magnitude_engine.model.weights import LayerWeights, LlamaConfig

_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM"})
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SAMPLES = 64
_SAMPLE_BYTES = 4096
Described = TypeVar("Described")


class RopeScaling(msgspec.Struct):
    """Llama 3's frequency scaling; other types are refused."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class HubConfig(msgspec.Struct):
    """The fields of config.json that decide the computation."""

    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    rope_parameters: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    def rope(self) -> RopeScaling:
        """Returns the scaling, under either of its names."""
        return self.rope_parameters or self.rope_scaling or RopeScaling()

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end an answer."""
        ends = self.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


class TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that matter; a token is text or an object with `content`."""

    chat_template: str | list[dict[str, str]] | None = None
    eos_token: str | dict[str, Any] | None = None


class FolderLlama:
    """The weights of a folder."""

    def __init__(self, folder: Path) -> None:
        """Reads the configuration and finds every tensor's file.

        Raises:
            ModelUnsupported: a missing or damaged file, or a model that the decoder would compute wrongly.
        """
        self.folder = folder
        self.hub = _read(folder / "config.json", HubConfig)
        _refuse(folder, self.hub)
        c = self.hub
        self.config = LlamaConfig(
            layers=c.num_hidden_layers,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads or c.num_attention_heads,
            head_dim=c.head_dim or c.hidden_size // c.num_attention_heads,
            hidden=c.hidden_size,
            ffn=c.intermediate_size,
            vocab=c.vocab_size,
            context=min(c.max_position_embeddings, c.sliding_window or c.max_position_embeddings),
            epsilon=c.rms_norm_eps,
            rope_base=c.rope_theta or c.rope().rope_theta or 10_000.0,
        )
        self.weight_dtype = _DTYPES.get(c.dtype or c.torch_dtype or "", torch.bfloat16)
        self._files = sorted(folder.glob("*.safetensors"))
        self._where: dict[str, Path] = {}
        for path in self._files:
            try:
                with safe_open(path, framework="pt") as opened:
                    self._where |= dict.fromkeys(opened.keys(), path)
            except (SafetensorError, OSError) as error:
                raise ModelUnsupported(f"{path} cannot be read: {error}; fetch the model again") from error

    def layer(self, index: int) -> LayerWeights:
        """Returns the weights of one layer."""
        c, prefix = self.config, f"model.layers.{index}."
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def weight(name: str, *shape: int) -> torch.Tensor:
            return self._tensor(f"{prefix}{name}.weight", shape)

        return LayerWeights(
            attention_norm=weight("input_layernorm", c.hidden),
            q=weight("self_attn.q_proj", q_rows, c.hidden),
            k=weight("self_attn.k_proj", kv_rows, c.hidden),
            v=weight("self_attn.v_proj", kv_rows, c.hidden),
            out=weight("self_attn.o_proj", c.hidden, q_rows),
            ffn_norm=weight("post_attention_layernorm", c.hidden),
            gate=weight("mlp.gate_proj", c.ffn, c.hidden),
            up=weight("mlp.up_proj", c.ffn, c.hidden),
            down=weight("mlp.down_proj", c.hidden, c.ffn),
        )

    def embedding(self) -> torch.Tensor:
        """Returns the token embeddings."""
        return self._tensor("model.embed_tokens.weight", (self.config.vocab, self.config.hidden))

    def final_norm(self) -> torch.Tensor:
        """Returns the weight of the last norm."""
        return self._tensor("model.norm.weight", (self.config.hidden,))

    def head(self) -> torch.Tensor | None:
        """Returns the output matrix, or None where the embeddings serve."""
        if self.hub.tie_word_embeddings:
            return None
        return self._tensor("lm_head.weight", (self.config.vocab, self.config.hidden))

    def rope_factors(self) -> torch.Tensor | None:
        """Returns Llama 3's frequency divisors where the model scales them."""
        scaling = self.hub.rope()
        if (scaling.rope_type or scaling.type) != "llama3":
            return None
        c = self.config
        frequency = c.rope_base ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0, 1)
        return 1 / ((1 - kept) / scaling.factor + kept)

    def tokenizer(self) -> Tokenizer:
        """Returns the folder's tokenizer."""
        ends = self.hub.end_ids()
        named = _optional(self.folder / "tokenizer_config.json", TokenizerConfig).eos_token
        text = named.get("content") if isinstance(named, dict) else named
        return from_json(self.folder / "tokenizer.json", ends, self.hub.bos_token_id, text)

    def template(self) -> str:
        """Returns the chat template's source, empty where there is none."""
        alone = self.folder / "chat_template.jinja"
        if alone.is_file():
            return alone.read_text("utf-8")
        found = _optional(self.folder / "tokenizer_config.json", TokenizerConfig).chat_template
        if isinstance(found, list):
            return next((entry.get("template", "") for entry in found if entry.get("name") == "default"), "")
        return found or ""

    def fingerprint(self) -> str:
        """Returns a SHA-256 (hex) over the configuration and samples of every file, their headers among them."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self._files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for index in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        path = self._where.get(name)
        if path is None:
            raise ModelUnsupported(f"{self.folder} has no tensor {name}; a shard is missing, fetch the model again")
        with safe_open(path, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        if tuple(found.shape) != shape or not found.is_floating_point():
            raise ModelUnsupported(
                f"{path}: tensor {name} is {found.dtype} {tuple(found.shape)}, expected floating point {shape}"
            )
        return found


def _refuse(folder: Path, hub: HubConfig) -> None:
    """Raises ModelUnsupported for what the decoder would compute wrongly."""
    architecture = next(iter(hub.architectures), "none")
    scaling = hub.rope().rope_type or hub.rope().type or "default"
    kv_heads = hub.num_key_value_heads or hub.num_attention_heads
    problem = None
    if architecture not in _ARCHITECTURES:
        problem = f"architecture {architecture!r} (Llama and Mistral are)"
    elif scaling not in ("default", "llama3"):
        problem = f"rope scaling {scaling!r}"
    elif hub.attention_bias or hub.mlp_bias:
        problem = "a bias in linear layers"
    elif hub.num_attention_heads < 1 or kv_heads < 1 or hub.num_attention_heads % kv_heads:
        problem = f"{hub.num_attention_heads} query heads over {kv_heads} key heads"
    if problem:
        raise ModelUnsupported(f"{folder}: not supported: {problem}; use another model of the Llama family")


def _read(path: Path, kind: type[Described]) -> Described:
    """Returns a JSON file as a struct; raises ModelUnsupported naming the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ModelUnsupported(f"{path} is missing; the folder is not a complete model, fetch it again") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnsupported(f"{path} cannot be used: {error}; fetch the model again") from error


def _optional(path: Path, kind: type[Described]) -> Described:
    """Returns a JSON file as a struct, its defaults where there is no file."""
    return _read(path, kind) if path.is_file() else kind()

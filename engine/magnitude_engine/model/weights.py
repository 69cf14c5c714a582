"""What a checkpoint of the Llama family holds, and how GGUF names it.

A `Checkpoint` gives its matrices one layer at a time, so that loading needs one layer's memory beside the result.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import torch

from magnitude_engine.errors import ModelUnsupported
from magnitude_engine.model.gguf import Blocks, GgufFile

Matrix: TypeAlias = torch.Tensor | Blocks


class LlamaConfig(NamedTuple):
    """The sizes and constants of a model; `ffn` is the width of the gated feed-forward part."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    context: int
    epsilon: float
    rope_base: float


class LayerWeights(NamedTuple):
    """One layer; matrices are [out, in], q and k rows in half-split rotary order."""

    attention_norm: torch.Tensor
    q: Matrix
    k: Matrix
    v: Matrix
    out: Matrix
    ffn_norm: torch.Tensor
    gate: Matrix
    up: Matrix
    down: Matrix


class Checkpoint(Protocol):
    """A model's weights, read on demand.

    Attributes:
        weight_dtype: the type in which unquantised matrices are stored.
    """

    config: LlamaConfig
    weight_dtype: torch.dtype

    def layer(self, index: int) -> LayerWeights:
        """Returns the weights of one layer."""

    def embedding(self) -> Matrix:
        """Returns the token embeddings, [vocab, hidden]."""

    def final_norm(self) -> torch.Tensor:
        """Returns the weight of the last norm, [hidden]."""

    def head(self) -> Matrix | None:
        """Returns the output matrix, [vocab, hidden]; None where the embeddings serve."""

    def rope_factors(self) -> torch.Tensor | None:
        """Returns divisors of the rotary frequencies, [head_dim / 2], where the model scales them."""


def dense(matrix: Matrix) -> torch.Tensor:
    """Returns the matrix as float32."""
    return matrix.dense() if isinstance(matrix, Blocks) else matrix.float()


class GgufLlama:
    """The `llama` architecture in a GGUF file (Llama, Mistral, SmolLM2, TinyLlama)."""

    weight_dtype = torch.bfloat16

    def __init__(self, file: GgufFile) -> None:
        """Raises ModelUnsupported for another architecture or an unusual variant."""
        architecture = file.text("general.architecture")
        if architecture != "llama":
            raise ModelUnsupported(
                f"{file.path}: architecture {architecture!r} is not supported yet ('llama' is: Llama, Mistral, SmolLM2)"
            )
        if file.integer("llama.expert_count", 0):
            raise ModelUnsupported(f"{file.path}: mixture-of-experts models are not supported; use a dense one")
        self._file = file
        self.config = _gguf_config(file)

    def layer(self, index: int) -> LayerWeights:
        """Returns the weights of one layer."""
        c = self.config
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def matrix(name: str, rows: int, columns: int) -> Matrix:
            return self._file.tensor(f"blk.{index}.{name}.weight", (rows, columns))

        return LayerWeights(
            attention_norm=self._vector(f"blk.{index}.attn_norm.weight"),
            q=_halves(matrix("attn_q", q_rows, c.hidden), c.heads),
            k=_halves(matrix("attn_k", kv_rows, c.hidden), c.kv_heads),
            v=matrix("attn_v", kv_rows, c.hidden),
            out=matrix("attn_output", c.hidden, q_rows),
            ffn_norm=self._vector(f"blk.{index}.ffn_norm.weight"),
            gate=matrix("ffn_gate", c.ffn, c.hidden),
            up=matrix("ffn_up", c.ffn, c.hidden),
            down=matrix("ffn_down", c.hidden, c.ffn),
        )

    def embedding(self) -> Matrix:
        """Returns the token embeddings."""
        return self._file.tensor("token_embd.weight", (self.config.vocab, self.config.hidden))

    def final_norm(self) -> torch.Tensor:
        """Returns the weight of the last norm."""
        return self._vector("output_norm.weight")

    def head(self) -> Matrix | None:
        """Returns the output matrix, or None where the embeddings serve."""
        if "output.weight" not in self._file.tensors:
            return None
        return self._file.tensor("output.weight", (self.config.vocab, self.config.hidden))

    def rope_factors(self) -> torch.Tensor | None:
        """Returns Llama 3's frequency divisors where the file has them."""
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        return self._file.dense("rope_freqs.weight", (self.config.head_dim // 2,))

    def _vector(self, name: str) -> torch.Tensor:
        return self._file.dense(name, (self.config.hidden,))


def _gguf_config(file: GgufFile) -> LlamaConfig:
    """Reads the sizes and refuses what the decoder would compute wrongly."""
    heads = file.integer("llama.attention.head_count")
    hidden = file.integer("llama.embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelUnsupported(f"{file.path} has no tensor token_embd.weight; the file is incomplete")
    if heads < 1 or hidden % heads:
        raise ModelUnsupported(f"{file.path}: {heads} attention heads do not divide the width {hidden}")
    head_dim = file.integer("llama.attention.key_length", hidden // heads)
    config = LlamaConfig(
        layers=file.integer("llama.block_count"),
        heads=heads,
        kv_heads=file.integer("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden=hidden,
        ffn=file.integer("llama.feed_forward_length"),
        vocab=embedding.shape[0],
        context=file.integer("llama.context_length"),
        epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
        rope_base=file.number("llama.rope.freq_base", 10_000.0),
    )
    scaling = file.text("llama.rope.scaling.type", "none")
    rotary = file.integer("llama.rope.dimension_count", head_dim)
    problem = None
    if scaling != "none" and file.number("llama.rope.scaling.factor", 1.0) != 1.0:
        problem = f"rope scaling {scaling!r}"
    elif rotary != head_dim:
        problem = f"rotary dimension {rotary} beside a head of {head_dim}"
    elif config.kv_heads < 1 or heads % config.kv_heads:
        problem = f"{heads} query heads over {config.kv_heads} key heads"
    elif any(name.endswith("attn_q.bias") for name in file.tensors):
        problem = "attention biases"
    if problem:
        raise ModelUnsupported(f"{file.path}: {problem} is not supported; use another model of the Llama family")
    return config


def _halves(matrix: Matrix, heads: int) -> Matrix:
    """Undoes GGUF's interleaving of rotary pairs: row (2 i + j) of a head goes to row (i + j * head_dim / 2)."""
    rows = (matrix.codes if isinstance(matrix, Blocks) else matrix).shape[0]
    order = torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
    return matrix.rows(order) if isinstance(matrix, Blocks) else matrix[order]

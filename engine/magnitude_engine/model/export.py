"""Writes a model as the folder that Hugging Face's libraries read, so that other servers can serve the same weights.

    python -m magnitude_engine.model.export MODEL.gguf FOLDER

Quantised weights are written as bfloat16 of the values that they stand for: what a server computes from them differs
from `packed` only by rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from magnitude_engine.errors import MagnitudeError, ModelUnsupported
from magnitude_engine.model import tokenizer as tokenizers
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.weights import Checkpoint, GgufLlama, LlamaConfig, Matrix, dense


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """config.json."""

    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    model_type: str = "llama"
    hidden_act: str = "silu"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_id: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str = "bfloat16"


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True):
    """tokenizer_config.json."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_max_length: int
    chat_template: str
    eos_token: str | None
    bos_token: str | None
    clean_up_tokenization_spaces: bool = False


def export(path: Path, folder: Path) -> None:
    """Writes the GGUF file at `path` to `folder`, which is made; what was there is overwritten.

    Raises:
        ModelUnsupported: the file cannot be read, or scales its rotary frequencies.
    """
    file = GgufFile.open(path)
    checkpoint, tokenizer = GgufLlama(file), tokenizers.from_gguf(file)
    if checkpoint.rope_factors() is not None:
        raise ModelUnsupported(f"{path}: scaled rotary frequencies cannot be exported; use the model's own folder")
    write(checkpoint, tokenizer, file.text("tokenizer.chat_template", ""), folder)


def write(checkpoint: Checkpoint, tokenizer: tokenizers.Tokenizer, template: str, folder: Path) -> None:
    """Writes a model to `folder`, which is made; `template` is its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    special = [None if token is None else tokenizer.token_text(token) for token in (tokenizer.eos_id, tokenizer.bos_id)]
    words = TokenizerFile(
        model_max_length=checkpoint.config.context,
        chat_template=template,
        eos_token=special[0],
        bos_token=special[1],
    )
    _write(folder / "tokenizer_config.json", words)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), "utf-8")
    ends = sorted(tokenizer.eos_ids, key=lambda token: (token != tokenizer.eos_id, token))
    tied = checkpoint.head() is None
    save_file(dict(_tensors(checkpoint)), folder / "model.safetensors", metadata={"format": "pt"})
    # Last, since a folder with it counts as complete.
    _write(folder / "config.json", _model_file(checkpoint.config, tuple(ends), tokenizer.bos_id, tied))


def _model_file(config: LlamaConfig, ends: tuple[int, ...], bos_id: int | None, tied: bool) -> ModelFile:
    return ModelFile(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        rms_norm_eps=config.epsilon,
        max_position_embeddings=config.context,
        rope_theta=config.rope_base,
        tie_word_embeddings=tied,
        eos_token_id=ends,
        bos_token_id=bos_id,
    )


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every weight under Hugging Face's name for it, in bfloat16."""
    yield "model.embed_tokens.weight", _half(checkpoint.embedding())
    yield "model.norm.weight", _half(checkpoint.final_norm())
    head = checkpoint.head()
    if head is not None:
        yield "lm_head.weight", _half(head)
    for index in range(checkpoint.config.layers):
        weights = checkpoint.layer(index)
        named = {
            "input_layernorm": weights.attention_norm,
            "self_attn.q_proj": weights.q,
            "self_attn.k_proj": weights.k,
            "self_attn.v_proj": weights.v,
            "self_attn.o_proj": weights.out,
            "post_attention_layernorm": weights.ffn_norm,
            "mlp.gate_proj": weights.gate,
            "mlp.up_proj": weights.up,
            "mlp.down_proj": weights.down,
        }
        for name, matrix in named.items():
            yield f"model.layers.{index}.{name}.weight", _half(matrix)


def _half(matrix: Matrix) -> torch.Tensor:
    return dense(matrix).to(torch.bfloat16).contiguous()


def _write(path: Path, record: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the export; returns the exit status, 2 with one line on stderr where it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m magnitude_engine.model.export", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file of the Llama family")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write")
    options = parser.parse_args(arguments)
    try:
        export(options.model, options.folder)
    except (MagnitudeError, OSError) as problem:
        sys.stderr.write(f"export: {problem}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

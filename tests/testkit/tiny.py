"""A random model of the Llama family that loads in milliseconds, with a byte-level tokenizer and a ChatML template."""

from __future__ import annotations

import math
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from magnitude_engine.config import EngineConfig, Profile
from magnitude_engine.model.export import write
from magnitude_engine.model.loader import LoadedModel, Placement, Source, assemble
from magnitude_engine.model.tokenizer import SpecialTokens, Tokenizer
from magnitude_engine.model.weights import LayerWeights, LlamaConfig

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = (
    "Ġ t",
    "h e",
    "i n",
    "r e",
    "o n",
    "Ġ a",
    "Ġt he",
    "e r",
    "n d",
    "Ġ s",
    "u s",
    "us er",
    "o l",
    "to ol",
    "t o",
)
TINY_VOCAB = 256 + len(_MERGES) + len(SPECIAL)


def tiny_tokenizer() -> Tokenizer:
    """Returns a tokenizer of all bytes, a few merges and three special tokens (ids 0, 1, 2)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in sorted(_MERGES, key=len))]
    texts = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(backend, SpecialTokens(frozenset({0, 1, 2}), frozenset({0, 2}), 1), byte_level=True)


class RandomLlama:
    """A checkpoint with weights drawn from `seed`."""

    def __init__(self, config: LlamaConfig, seed: int, weight_dtype: torch.dtype) -> None:
        self.config = config
        self.weight_dtype = weight_dtype
        self._seed = seed

    def layer(self, index: int) -> LayerWeights:
        """Returns the weights of one layer."""
        c = self.config
        draw = torch.Generator().manual_seed(self._seed * 1000 + index + 1)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=draw) * (1.5 / math.sqrt(columns))

        return LayerWeights(
            attention_norm=1 + 0.1 * torch.randn(c.hidden, generator=draw),
            q=matrix(c.heads * c.head_dim, c.hidden),
            k=matrix(c.kv_heads * c.head_dim, c.hidden),
            v=matrix(c.kv_heads * c.head_dim, c.hidden),
            out=matrix(c.hidden, c.heads * c.head_dim),
            ffn_norm=1 + 0.1 * torch.randn(c.hidden, generator=draw),
            gate=matrix(c.ffn, c.hidden),
            up=matrix(c.ffn, c.hidden),
            down=matrix(c.hidden, c.ffn),
        )

    def embedding(self) -> torch.Tensor:
        """Returns the token embeddings."""
        draw = torch.Generator().manual_seed(self._seed * 1000)
        return torch.randn(self.config.vocab, self.config.hidden, generator=draw)

    def final_norm(self) -> torch.Tensor:
        """Returns the weight of the last norm."""
        return torch.full((self.config.hidden,), 0.3)

    def head(self) -> None:
        """The embeddings serve."""

    def rope_factors(self) -> None:
        """Frequencies are not scaled."""


def tiny_model(
    vocab_size: int = TINY_VOCAB,
    layers: int = 2,
    context: int = 2048,
    seed: int = 0,
    profile: Profile = "reference",
    weight_dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    """Returns a model with 4 query and 2 key heads of 8; `weight_dtype` matters to `native` only.

    Ids past the tokenizer's own (`TINY_VOCAB`) have logits but no text.
    """
    if vocab_size < TINY_VOCAB:
        raise ValueError(f"vocab_size must be at least {TINY_VOCAB}")
    config = _config(vocab_size, layers, context)
    source = Source(RandomLlama(config, seed, weight_dtype), tiny_tokenizer(), CHATML, f"tiny-{seed}-{layers}")
    settings = EngineConfig(model_path="tiny", model_name="tiny", profile=profile, kv_memory_mb=1)
    place = Placement(profile, torch.device("cpu"), context)
    return assemble(settings, source, place, lambda fraction: None)


def tiny_folder(folder: Path) -> Path:
    """Writes a tiny model as a folder that `magnitude serve --model` takes; returns the folder."""
    checkpoint = RandomLlama(_config(TINY_VOCAB, 2, 2048), 0, torch.float32)
    write(checkpoint, tiny_tokenizer(), CHATML, folder)
    return folder


def _config(vocab: int, layers: int, context: int) -> LlamaConfig:
    return LlamaConfig(
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=32,
        ffn=64,
        vocab=vocab,
        context=context,
        epsilon=1e-5,
        rope_base=10_000.0,
    )

"""What loading refuses, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from magnitude_engine.api import ChatInput, Message
from magnitude_engine.config import EngineConfig
from magnitude_engine.errors import ConfigError, ModelDoesNotFit, ModelNotFound, ModelUnsupported
from magnitude_engine.model.loader import available_memory, load_model
from magnitude_engine.model.weights import GgufLlama
from testkit.tiny import TINY_VOCAB, tiny_model, tiny_tokenizer

TOKENS, _ = zip(*sorted(tiny_tokenizer().backend.get_vocab().items(), key=lambda item: item[1]), strict=True)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}


def write_model(path: Path, kind: str = "Q4_1", architecture: str = "llama", **changes: Any) -> EngineConfig:
    """Writes a one-layer model; `changes` replace metadata (dots as underscores), None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**METADATA, **changes}.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", list(TOKENS))
    writer.add_array("tokenizer.ggml.token_type", [3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_array("tokenizer.ggml.merges", ["h e", "i n"])
    draw = np.random.default_rng(1)
    quantised = gguf.GGMLQuantizationType[kind]
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    for name, shape in {**{f"blk.0.{n}": s for n, s in shapes.items()}, "token_embd": (TINY_VOCAB, HIDDEN)}.items():
        values = draw.standard_normal(shape).astype(np.float32) / 8
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return EngineConfig(model_path=str(path), profile="reference", kv_memory_mb=1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_weight_type_loads_in_every_profile(kind: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "m.gguf", kind)
    for profile in ("reference", "packed", "native"):
        fractions: list[float] = []
        settings = EngineConfig(model_path=config.model_path, profile=profile, kv_memory_mb=1)
        model = load_model(settings, fractions.append)
        assert fractions == [1.0]
        assert model.card.profile == model.runner.profile == profile
        assert model.card.vocab_size == TINY_VOCAB
        assert model.card.context_length == model.runner.shape.context == 256
        assert len(model.card.weights_hash) == len(model.card.tokenizer_hash) == 64
        assert model.prompts.encode(ChatInput(messages=(Message(role="user", content="he"),)))[0] == 1
        assert model.tokenizer.eos_ids == {0, 2}


def test_rotary_pairs_are_put_back(tmp_path: Path) -> None:
    from magnitude_engine.model.gguf import GgufFile

    write_model(tmp_path / "m.gguf", "F32")
    file = GgufFile.open(tmp_path / "m.gguf")
    stored = file.dense("blk.0.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN))
    found = GgufLlama(file).layer(0).q
    expected = stored.view(HEADS, HEAD_DIM // 2, 2, HIDDEN).transpose(1, 2).reshape(HEADS * HEAD_DIM, HIDDEN)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported.*safetensors"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.chat_template": None}, "no chat template"),
        ({"llama.block_count": None}, "llama.block_count must be a whole number"),
        ({"llama.rope.dimension_count": 8}, "rotary dimension 8"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.head_count": 5}, "5 attention heads do not divide"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads over 3"),
        ({"llama.block_count": 2}, "no tensor blk.1.attn_norm.weight"),
        ({"llama.feed_forward_length": 128}, r"blk.0.ffn_gate.weight has shape \(96, 64\), expected \(128, 64\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_engine_cannot_serve_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelUnsupported, match=message):
        load_model(config)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    config = write_model(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ModelUnsupported, match="architecture 'mamba' is not supported"):
        load_model(config)


def test_a_missing_file_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="magnitude pull smollm2"):
        load_model(EngineConfig(model_path=str(tmp_path / "absent.gguf")))


def test_a_model_that_does_not_fit_says_both_numbers(tmp_path: Path) -> None:
    config = write_model(tmp_path / "m.gguf")
    huge = EngineConfig(model_path=config.model_path, kv_memory_mb=1 << 30)
    with pytest.raises(ModelDoesNotFit, match=r"needs about 107374\d+ MiB .* \d+ MiB are available"):
        load_model(huge)


def test_the_context_can_only_shrink(tmp_path: Path) -> None:
    config = write_model(tmp_path / "m.gguf")
    shorter = EngineConfig(model_path=config.model_path, profile="reference", kv_memory_mb=1, context_length=32)
    assert load_model(shorter).runner.shape.context == 32
    longer = EngineConfig(model_path=config.model_path, profile="reference", kv_memory_mb=1, context_length=512)
    with pytest.raises(ConfigError, match="512 is more than this model's 256") as caught:
        load_model(longer)
    assert caught.value.param == "context_length"


def test_free_memory_is_a_sane_figure() -> None:
    assert 1 << 20 < available_memory(torch.device("cpu")) < 1 << 50


def test_the_tiny_model_is_itself_every_time() -> None:
    assert tiny_model(seed=3).card == tiny_model(seed=3).card
    with pytest.raises(ValueError, match="at least"):
        tiny_model(vocab_size=10)

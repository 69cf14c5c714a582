"""What loading refuses, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from magnitude_engine.api import ChatInput, Message
from magnitude_engine.config import EngineConfig
from magnitude_engine.errors import ConfigError, ModelDoesNotFit, ModelNotFound, ModelUnsupported
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.loader import available_memory, load_model
from magnitude_engine.model.safetensors import FolderLlama
from magnitude_engine.model.weights import GgufLlama, LlamaConfig
from testkit.steps import Walk, in_chunks
from testkit.tiny import CHATML, TINY_VOCAB, RandomLlama, tiny_model, tiny_tokenizer

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


@pytest.mark.thorough
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


def write_folder(folder: Path, checkpoint: RandomLlama, **changes: Any) -> EngineConfig:
    """Writes a random model as Hugging Face would, in two shards."""
    c = checkpoint.config
    tensors = {"model.embed_tokens.weight": checkpoint.embedding(), "model.norm.weight": checkpoint.final_norm()}
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    ffn = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = ("input_layernorm", *attention, "post_attention_layernorm", *ffn)
    shards = [tensors, {}]
    for index in range(c.layers):
        for name, weight in zip(names, checkpoint.layer(index), strict=True):
            shards[index % 2][f"model.layers.{index}.{name}.weight"] = torch.as_tensor(weight).contiguous()
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"model-{index}.safetensors")
    described = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "vocab_size": c.vocab,
        "rms_norm_eps": c.epsilon,
        "max_position_embeddings": c.context,
        "rope_theta": c.rope_base,
        "tie_word_embeddings": True,
        "eos_token_id": [2],
        "bos_token_id": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_bytes(msgspec.json.encode({**described, **changes}))
    (folder / "tokenizer.json").write_text(tiny_tokenizer().backend.to_str(), "utf-8")
    (folder / "tokenizer_config.json").write_bytes(
        msgspec.json.encode({"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}})
    )
    return EngineConfig(model_path=str(folder), profile="reference", kv_memory_mb=1)


def tiny_config() -> LlamaConfig:
    return LlamaConfig(2, 4, 2, 8, 32, 64, TINY_VOCAB, 2048, 1e-5, 10_000.0)


@pytest.mark.thorough
def test_a_folder_computes_what_its_weights_say(tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path, RandomLlama(tiny_config(), 0, torch.float32)))
    expected = tiny_model()
    ids = list(range(10, 40))
    found, same = (in_chunks(m.runner, m.runner.allocate_cache(2), Walk(ids, (0, 1)), [30]) for m in (model, expected))
    assert torch.equal(found, same)
    chat = ChatInput(messages=(Message(role="user", content="the tool"),))
    assert model.prompts.encode(chat) == expected.prompts.encode(chat)
    assert model.tokenizer.eos_id == 2


def test_llama_3_scaling_keeps_fast_frequencies_and_divides_slow_ones(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write_folder(tmp_path, RandomLlama(tiny_config(), 0, torch.float32), rope_scaling=scaling)
    factors = FolderLlama(tmp_path).rope_factors()
    assert factors is not None
    # Turns within 64 positions: 10.2, 1.02, 0.102, 0.0102: kept, almost divided, divided, divided.
    assert factors[0] == 1
    assert 7 < factors[1] < 8
    assert factors[2:].tolist() == [8, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"attention_bias": True}, "a bias"),
        ({"num_key_value_heads": 3}, "4 query heads over 3"),
        ({"hidden_size": "wide"}, r"config\.json cannot be used: .*hidden_size"),
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2"),
        ({"intermediate_size": 65}, r"expected floating point \(65, 32\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_folder_lacks_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = write_folder(tmp_path, RandomLlama(tiny_config(), 0, torch.float32), **changes)
    with pytest.raises(ModelUnsupported, match=message):
        load_model(config)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"config\.json is missing"):
        load_model(EngineConfig(model_path=str(tmp_path)))

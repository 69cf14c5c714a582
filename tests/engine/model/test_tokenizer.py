"""Text to ids and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.errors import ModelUnsupported
from magnitude_engine.model.tokenizer import from_json
from testkit.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("<|im_end>{} \n'tsé€😀")))


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(TEXT)
def test_bytes_of_the_ids_are_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == text
    assert not TOKENIZER.special_ids & set(ids)


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "<|endoftext|><|im_end|>"])
def test_special_text_stays_text(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))).decode() == text
    assert TOKENIZER.special_ids & set(TOKENIZER.encode_markup(text))


def test_markup_makes_special_tokens_between_text() -> None:
    ids = TOKENIZER.encode_markup("<|im_start|>user\nhi<|im_end|>\n")
    assert ids == [1, *TOKENIZER.encode("user\nhi"), 2, *TOKENIZER.encode("\n")]


def test_special_tokens_have_names_but_no_bytes() -> None:
    assert TOKENIZER.token_bytes(2) == b""
    assert TOKENIZER.token_text(2) == "<|im_end|>"
    assert TOKENIZER.token_text(TOKENIZER.encode("é")[0]) == "�"
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 5) == b""
    assert TOKENIZER.token_bytes(-1) == b""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        TOKENIZER.encode("a\ud800b")


def test_the_fingerprint_is_stable_and_follows_the_specials() -> None:
    assert tiny_tokenizer().fingerprint == TOKENIZER.fingerprint


def test_a_tokenizer_json_gives_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.backend.to_str(), "utf-8")
    other = from_json(path, (2,), 1)
    text = "the user in <|im_end|> 123 é😀"
    assert other.encode(text) == TOKENIZER.encode(text)
    assert other.eos_ids == {0, 2}
    assert [other.token_bytes(t) for t in range(50)] == [TOKENIZER.token_bytes(t) for t in range(50)]


def test_byte_fallback_tokens_are_exact_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3, "▁": 4, "a": 5}
    vocabulary |= {f"<0x{b:02X}>": 6 + b for b in range(256)}
    description = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": c,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, c in enumerate(["<unk>", "<s>", "</s>"])
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": ["▁ a"],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description), "utf-8")
    tokenizer = from_json(path, (2,), 1)
    ids = tokenizer.encode("a a€")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "a a€"
    assert tokenizer.token_bytes(3) == b" a"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_json_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, "utf-8")
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json cannot be read"):
        from_json(path, (), None)

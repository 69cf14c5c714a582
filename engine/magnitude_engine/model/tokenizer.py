"""Text to token ids and back, exactly: byte-level BPE from a GGUF file or from a tokenizer.json.

Special-token text inside ordinary text stays text (`encode`); only `encode_markup`, which reads a template's
output, recognises it. Token bytes are exact, so that text can be cut at any token boundary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from magnitude_engine.errors import ModelUnsupported
from magnitude_engine.model.gguf import GgufFile

_CONTROL_TYPES = frozenset({2, 3})
_USER_DEFINED = 4
# Llama 3's and Qwen 2's cut into words; %s is the form of numbers.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Control tokens that end an answer whatever the file declares (llama.cpp treats them so too).
_END_NAMES = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>"}
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class SpecialTokens(NamedTuple):
    """The ids with a meaning of their own; `eos_id` is the one that templates name."""

    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None = None


class Tokenizer:
    """Thread-safe.

    Attributes:
        vocab_size: ids are 0..vocab_size-1; the model's logits may have more columns.
        eos_ids: ids that end an answer; `eos_id` is the one that templates name.
        special_ids: control tokens, never made from ordinary text.
        fingerprint: SHA-256 (hex) of everything that decides ids.
        backend: the library's tokenizer, for those who need its JSON form.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens, byte_level: bool) -> None:
        backend.encode_special_tokens = True
        self.backend = backend
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = special.eos_ids
        self.eos_id = special.eos_id
        self.bos_id = special.bos_id
        self.special_ids = special.special_ids
        self.special_texts: dict[str, int] = {
            text: token
            for token in sorted(special.special_ids)
            if len(text := backend.id_to_token(token) or "") > 1  # One character could not be told from text.
        }
        described = f"{sorted(special.special_ids)} {sorted(special.eos_ids)} {special.bos_id}"
        self.fingerprint = hashlib.sha256((backend.to_str() + described).encode()).hexdigest()
        alternatives = sorted(map(re.escape, self.special_texts), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(alternatives) if alternatives else r"(?!)")
        added = {token: str(entry.content) for token, entry in backend.get_added_tokens_decoder().items()}
        texts = {token: text for text, token in backend.get_vocab(with_added_tokens=True).items()} | added
        exact = _byte_level if byte_level else _byte_fallback
        self._bytes = tuple(
            b"" if t in self.special_ids else texts[t].encode() if t in added else exact(texts.get(t, ""))
            for t in range(self.vocab_size)
        )
        # A normalizer may join up to four characters into one before they are counted.
        self._longest = max(map(len, self._bytes)) * (1 if backend.normalizer is None else 4)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ordinary text; raises UnicodeEncodeError for lone surrogates."""
        text.encode()
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def fewest(self, characters: int) -> int:
        """Returns the least number of ids that ordinary text of so many characters can have."""
        return -(-characters // max(1, self._longest))

    def encode_markup(self, text: str) -> list[int]:
        """Returns the ids of a template's output: special-token text becomes special tokens."""
        ids: list[int] = []
        at = 0
        for match in self.special_pattern.finditer(text):
            ids += self.encode(text[at : match.start()])
            ids.append(self.special_texts[match[0]])
            at = match.end()
        return ids + self.encode(text[at:])

    def token_bytes(self, token: int) -> bytes:
        """Returns the exact bytes the token adds to the text; empty for special tokens and ids without a token."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        """Returns the token for display: special tokens by name, invalid UTF-8 as U+FFFD."""
        if token in self.special_ids:
            return str(self.backend.id_to_token(token))
        return self.token_bytes(token).decode("utf-8", errors="replace")


def from_gguf(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Raises:
        ModelUnsupported: a tokenizer model or pre-tokenizer that the engine does not have.
    """
    model = file.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelUnsupported(
            f"{file.path}: tokenizer model {model!r} is not supported in GGUF files (byte-level BPE, 'gpt2', is); "
            "use the model's safetensors folder with its tokenizer.json"
        )
    tokens = file.texts("tokenizer.ggml.tokens")
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in file.texts("tokenizer.ggml.merges"))]
    pre = file.text("tokenizer.ggml.pre", "default")
    vocabulary = {text: index for index, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelUnsupported(f"{file.path}: the vocabulary names a token twice; convert the model again")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    _set_pre_tokenizer(backend, pre, file.path)
    types = file.integers("tokenizer.ggml.token_type")
    special = [t for t, kind in enumerate(types) if kind in _CONTROL_TYPES]
    backend.add_special_tokens([AddedToken(tokens[t], normalized=False, special=True) for t in special])
    backend.add_tokens(
        [AddedToken(tokens[t], normalized=False) for t, kind in enumerate(types) if kind == _USER_DEFINED]
    )
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    declared = [file.integer(key) for key in keys if key in file.metadata]
    eos = frozenset({*declared} | {t for t in special if tokens[t] in _END_NAMES})
    bos = file.integer("tokenizer.ggml.bos_token_id") if "tokenizer.ggml.bos_token_id" in file.metadata else None
    end = declared[0] if declared else None
    return Tokenizer(backend, SpecialTokens(frozenset(special) | eos, eos, bos, end), byte_level=True)


def from_json(path: Path, ends: Sequence[int], bos_id: int | None, eos_text: str | None = None) -> Tokenizer:
    """Builds the tokenizer of a tokenizer.json; `ends` are the ids that end an answer, `eos_text` its usual end.

    Raises:
        ModelUnsupported: unreadable, or neither byte-level nor with byte fallback.
    """
    try:
        source = path.read_text("utf-8")
        backend = tokenizers.Tokenizer.from_str(source)
        description = msgspec.json.decode(source, type=_Description)
    except Exception as error:  # The library raises plain Exception for every defect of the file.
        raise ModelUnsupported(f"{path} cannot be read as a tokenizer: {error}; fetch the model again") from error
    byte_level = b'"ByteLevel"' in bytes(description.decoder)
    if not byte_level and not description.model.byte_fallback:
        raise ModelUnsupported(f"{path}: only byte-level tokenizers and those with byte fallback are supported")
    backend.no_padding()
    backend.no_truncation()
    added = {t: entry for t, entry in backend.get_added_tokens_decoder().items() if entry.special}
    special = frozenset(added) | {*ends}
    all_ends = frozenset({*ends} | {t for t, entry in added.items() if entry.content in _END_NAMES})
    named = None if eos_text is None else backend.token_to_id(eos_text)
    end = named if named is not None else next(iter(ends), None)
    return Tokenizer(backend, SpecialTokens(special, all_ends, bos_id, end), byte_level)


class _Model(msgspec.Struct):
    byte_fallback: bool | None = None


class _Description(msgspec.Struct):
    model: _Model
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def _set_pre_tokenizer(backend: tokenizers.Tokenizer, pre: str, path: Path) -> None:
    """Sets how text is cut before merging, by llama.cpp's name for it."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cut: pre_tokenizers.PreTokenizer
    if pre in ("smollm", "starcoder", "refact", "command-r"):
        cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    elif pre in ("gpt-2", "default"):
        cut = gpt2
    elif pre in ("llama-bpe", "llama3", "llama-v3"):
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % r"\p{N}{1,3}"), "isolated"), level])
    elif pre == "qwen2":
        backend.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % r"\p{N}"), "isolated"), level])
    else:
        raise ModelUnsupported(
            f"{path}: pre-tokenizer {pre!r} is not supported (smollm, gpt-2, default, llama-bpe and qwen2 are); "
            "use the model's safetensors folder with its tokenizer.json"
        )
    backend.pre_tokenizer = cut
    backend.decoder = decoders.ByteLevel()


def _byte_level(text: str) -> bytes:
    """Returns the bytes that a byte-level token stands for."""
    try:
        return text.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    """Returns the bytes of a token that is text, with a block character for each space, or one byte's name."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-in for each byte, inverted: code point → byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {b: b for b in printable} | {256 + i: b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()

"""The model's tokens as the grammar library sees them.

Ordinary text never becomes a special token here, whatever it spells: the bytes of special tokens are marked as
theirs, and text is encoded with special tokens off, so an enum member may hold `<|im_end|>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import llguidance
import tokenizers

from magnitude_engine.api import Frozen


class GrammarTokenizer(Protocol):
    """What of a tokenizer is needed; `magnitude_engine.model.tokenizer.Tokenizer` has it."""

    vocab_size: int
    eos_ids: frozenset[int]
    eos_id: int | None
    bos_id: int | None
    special_ids: frozenset[int]
    special_texts: dict[str, int]
    fingerprint: str
    backend: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ordinary text."""

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token adds to the text."""


class Vocabulary(Frozen, frozen=True, kw_only=True):
    """A tokenizer in a form that crosses a process boundary.

    Attributes:
        backend: the `tokenizers` library's JSON.
        tokens: bytes by id; those of special tokens are their names.
        eos: ids that end an answer, the usual one first.
        columns: width of the model's logits; ids from `len(tokens)` on are never allowed.
    """

    backend: str
    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    eos: tuple[int, ...]
    bos: int | None
    columns: int


def describe(tokenizer: GrammarTokenizer, columns: int | None = None) -> Vocabulary:
    """Returns the vocabulary of `tokenizer` for logits of `columns` (default: its own size).

    Raises:
        ValueError: no token ends an answer, or `columns` is less than there are tokens.
    """
    size = tokenizer.vocab_size
    if not tokenizer.eos_ids:
        raise ValueError("a grammar needs a token that ends the answer; this tokenizer declares none")
    if columns is not None and columns < size:
        raise ValueError(f"logits of {columns} columns cannot hold {size} tokens")
    names = {token: text.encode() for text, token in tokenizer.special_texts.items()}
    first = tokenizer.eos_id if tokenizer.eos_id in tokenizer.eos_ids else None
    rest = sorted(tokenizer.eos_ids - {first})
    return Vocabulary(
        backend=tokenizer.backend.to_str(),
        tokens=tuple(names.get(t) or tokenizer.token_bytes(t) for t in range(size)),
        special=tuple(sorted(tokenizer.special_ids)),
        eos=tuple(rest if first is None else [first, *rest]),
        bos=tokenizer.bos_id,
        columns=columns or size,
    )


def own_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Returns the encoder of ordinary text that the vocabulary's JSON describes."""
    backend = tokenizers.Tokenizer.from_str(vocabulary.backend)
    backend.encode_special_tokens = True
    backend.no_padding()
    backend.no_truncation()

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def library_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> Any:
    """Returns the `llguidance.LLTokenizer`; takes about a second for large vocabularies."""
    wrapped = llguidance.TokenizerWrapper(_Source(vocabulary, encode))
    return llguidance.LLTokenizer(wrapped, eos_token=list(vocabulary.eos))


class _Source:
    """The attributes that `TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.bos_token_id = vocabulary.bos
        # A token without text is never allowed.
        self.tokens = vocabulary.tokens + (b"",) * (vocabulary.columns - len(vocabulary.tokens))
        self.special_token_ids = list(vocabulary.special)
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        # The library tries bytes first and takes the exception as the sign that text is wanted.
        if not isinstance(text, str):
            raise TypeError("this tokenizer reads text, not bytes")
        return self._encode(text)

"""One compiler and one validator for all tests here, so that their processes start once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from magnitude_engine.decode.grammar.compiler import GrammarCompiler
from magnitude_engine.decode.grammar.validate import Validator
from magnitude_engine.model.tokenizer import Tokenizer
from testkit.tiny import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of bytes and a few merges."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """A compiler with its helper process."""
    made = GrammarCompiler(tokenizer)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="session")
def validator() -> Iterator[Validator]:
    """A validator with its helper process."""
    made = Validator()
    made.start()
    yield made
    made.close()

"""A sequence's place in its grammar: forced runs, drafts, forks and steps back, against plain masked decoding."""

from __future__ import annotations

import functools

import llguidance
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.decode.grammar.compiler import GrammarCompiler
from magnitude_engine.decode.grammar.spec import Regex
from magnitude_engine.decode.grammar.state import GrammarState
from magnitude_engine.decode.grammar.tokens import describe, library_tokenizer
from magnitude_engine.draft.tree import merge
from magnitude_engine.errors import GrammarFailure
from magnitude_engine.model.tokenizer import Tokenizer
from testkit.drafting import chain
from testkit.grammar import CASES, Case, Walker, allowed, spec, written

SCHEMAS = {case.name: case.schema for case in CASES}
CAP = 96


def best(mask: torch.Tensor, logits: torch.Tensor) -> int:
    """Returns the allowed token with the highest logit."""
    tokens = allowed(mask)
    return tokens[int(logits[torch.tensor(tokens)].argmax())]


def noise(seed: int, position: int, vocab: int) -> torch.Tensor:
    """Logits of one position."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed * 10_007 + position))


def plain(state: GrammarState, tokenizer: Tokenizer, seed: int) -> list[int]:
    """Decodes token by token under the mask."""
    output: list[int] = []
    while len(output) < CAP:
        token = best(state.mask(), noise(seed, len(output), tokenizer.vocab_size))
        state.accept(token)
        output.append(token)
        if token in tokenizer.eos_ids:
            break
    return output


def forwarded(state: GrammarState, tokenizer: Tokenizer, seed: int) -> tuple[list[int], int]:
    """Decodes with forced runs appended as they are; also returns how many tokens were forced."""
    output: list[int] = []
    skipped = 0
    while len(output) < CAP:
        run = state.forced()
        for token in run:
            state.accept(token)
        output += run
        skipped += len(run)
        if len(output) >= CAP:
            break
        token = best(state.mask(), noise(seed, len(output), tokenizer.vocab_size))
        state.accept(token)
        output.append(token)
        if token in tokenizer.eos_ids:
            break
    return output[:CAP], skipped


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_runs_change_nothing(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(spec(SCHEMAS[name]))
    for seed in range(3):
        once = plain(grammar.begin(), tokenizer, seed)
        assert forwarded(grammar.begin(), tokenizer, seed)[0] == once


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forced_runs_are_canonical_and_the_only_choice(
    case: Case, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for instance in case.valid:
        state, at = compiler.compile(spec(case.schema)).begin(), 0
        canonical = tokenizer.encode(written(instance))
        while at < len(canonical):
            run = state.forced() or canonical[at : at + 1]
            assert list(run) == canonical[at : at + len(run)]
            for token in run:
                assert len(run) == 1 or allowed(state.mask()) == [token]
                state.accept(token)
            at += len(run)


def test_the_mask_is_reused_and_follows_the_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(Regex(pattern="ab")).begin()
    first = state.mask()
    kept = first.clone()
    assert state.mask() is first
    state.accept(tokenizer.encode("a")[0])
    assert state.mask() is first
    assert not torch.equal(first, kept)


def test_a_forbidden_token_is_refused_and_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(Regex(pattern="ab")).begin()
    for wrong in (tokenizer.encode("b")[0], 0, 1, -1, 10**9):
        with pytest.raises(GrammarFailure, match="not allowed"):
            state.accept(wrong)
    for token in tokenizer.encode("ab"):
        state.accept(token)
    assert (state.may_end, state.ended, state.forced()) == (True, True, ())


def test_the_end_of_the_answer(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(Regex(pattern="a+")).begin()
    a, end = tokenizer.encode("a")[0], min(tokenizer.eos_ids)
    assert (state.may_end, state.ended) == (False, False)
    with pytest.raises(GrammarFailure):
        state.accept(end)
    state.accept(a)
    assert (state.may_end, state.ended) == (True, False)
    state.accept(end)
    assert (state.may_end, state.ended, state.forced()) == (True, True, ())
    assert set(allowed(state.mask())) == set(tokenizer.eos_ids)


@pytest.fixture(scope="module")
def brittle(tokenizer: Tokenizer) -> GrammarState:
    """A state whose pattern goes over the library's limits after some tens of tokens."""
    library = library_tokenizer(describe(tokenizer), tokenizer.encode)
    limits = llguidance.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    grammar = llguidance.LLMatcher.grammar_from_regex("x{60}(a|b)*a(a|b){14}c")
    matcher = llguidance.LLMatcher(library, grammar, log_level=0, limits=limits)
    state = GrammarState(matcher, (tokenizer.vocab_size + 31) // 32, tokenizer.eos_ids)
    for token in tokenizer.encode("x" * 50):
        state.accept(token)
    return state


def take(state: GrammarState, tokens: list[int]) -> None:
    """Accepts tokens."""
    for token in tokens:
        state.accept(token)


def test_what_becomes_too_complex_on_the_way_is_a_typed_error(brittle: GrammarState, tokenizer: Tokenizer) -> None:
    state, tokens = brittle.fork(), tokenizer.encode("x" * 10 + "ab" * 40)
    with pytest.raises(GrammarFailure, match=r"too complex.*simplify"):
        take(state, tokens)
    for ask in (state.mask, state.forced, lambda: state.may_end, lambda: state.masks(tokens)):
        with pytest.raises(GrammarFailure, match="too complex"):
            ask()


def test_a_draft_ends_where_the_grammar_becomes_too_complex(brittle: GrammarState, tokenizer: Tokenizer) -> None:
    state, tokens = brittle.fork(), tokenizer.encode("x" * 10 + "ab" * 40)
    nodes = state.masks(tokens).allowed
    assert nodes == tuple(range(len(nodes)))
    assert len(nodes) < len(tokens)


def test_drafts_are_cut_where_the_masks_cut_them(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(spec({"enum": ["the tool", "the user"]}))
    good = tokenizer.encode('"the tool"')
    state = grammar.begin()
    assert state.masks([]).allowed == ()
    masks, nodes = state.masks([*good, 2])
    assert nodes == tuple(range(len(good) + 1))
    follow = grammar.begin()
    for row, token in zip(masks, good, strict=False):
        assert torch.equal(row, follow.mask())
        follow.accept(token)
    assert set(allowed(masks[len(good)])) == set(allowed(masks[-1])) == set(tokenizer.eos_ids)
    # The same text in other tokens is what the mask forbids where the tokens are forced.
    split = [token for letter in '"the tool"' for token in tokenizer.encode(letter)]
    assert split != good
    cut = len(state.masks(split).allowed)
    assert cut == next(i for i, token in enumerate(split) if good[i] != token)
    assert state.masks([*good[:3], 0, *good[3:]]).allowed == (0, 1, 2)
    assert torch.equal(state.mask(), grammar.begin().mask())


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(SCHEMAS)), seed=st.integers(0, 10**6))
def test_forks_and_drafts_are_exact(
    data: st.DataObject, name: str, seed: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(spec(SCHEMAS[name]))
    walker = Walker(tokenizer, seed)
    state, path = grammar.begin(), list[int]()
    for _ in range(data.draw(st.integers(1, 8))):
        move = data.draw(st.sampled_from(["walk", "fork", "draft"]))
        if move == "walk":
            path += walker.walk(state, data.draw(st.integers(1, 8)))
        elif move == "fork":
            other = state.fork()
            for _ in walker.walk(state, 5):
                pass
            state = other
        else:
            ways = [list(walker.walk(state.fork(), 5)) for _ in range(3)]
            draft = functools.reduce(
                merge, [chain(w + data.draw(st.lists(st.integers(0, 250), max_size=2))) for w in ways]
            )
            masks, nodes = state.masks(draft.tokens, draft.parents)
            for node in range(-1, len(draft)):
                follow, legal = state.fork(), True
                for token in (draft.tokens[above] for above in draft.path(node)):
                    legal = legal and token in allowed(follow.mask())
                    if legal:
                        follow.accept(token)
                assert legal == (node < 0 or node in nodes)
                assert not legal or torch.equal(masks[node + 1], follow.mask())
    fresh = grammar.begin()
    for token in path:
        fresh.accept(token)
    assert torch.equal(fresh.mask(), state.mask())
    assert fresh.forced() == state.forced()
    assert (fresh.may_end, fresh.ended) == (state.may_end, state.ended)

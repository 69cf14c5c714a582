"""The simulated caches: equal, page for page, to a cache that scans all its pages; the guard between two of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.kv.pool import IntegrityError
from magnitude_engine.kv.retention import Candidate
from magnitude_engine.kv.sessions import SessionKey
from magnitude_engine.kv.shadow import FEWEST_ACCESSES, WINDOW, Access, Contest, Shadow
from testkit.page_cache import PageCache, chain, found

A, B, C, D = (SessionKey("t", name, "main") for name in "abcd")
# Few contents, so that chains often share a beginning and often part from each other.
CHAINS = st.lists(st.sampled_from("xy"), max_size=7).map(chain)
ACCESSES = st.lists(st.tuples(st.sampled_from([A, B, C]), CHAINS), max_size=60)


def first(candidates: Sequence[Candidate], now: float) -> int:
    """The least recently used."""
    return 0


def whim(key: SessionKey | None, last_used: float, now: float) -> float:
    """A next use that has nothing to do with anything, but is always the same."""
    return random.Random(repr((key, last_used))).choice([0.0, 1.0, 2.0, 3.0])


def by_whim(candidates: Sequence[Candidate], now: float) -> int:
    """The farthest next use, the first of equals."""
    scores = [whim(c.session, c.last_used, now) for c in candidates]
    return scores.index(max(scores))


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(ACCESSES, st.integers(0, 12), st.booleans())
def test_a_shadow_holds_what_a_cache_of_single_pages_holds(
    accesses: list[tuple[SessionKey, list[bytes]]], pages: int, learned: bool
) -> None:
    shadow = Shadow(pages, whim if learned else None)
    cache = PageCache(pages, by_whim if learned else first)
    for now, (key, digests) in enumerate(accesses):
        assert shadow.access(key, digests, now) == cache.access(key, digests, now)
        shadow.check_integrity()
        assert len(shadow) == len(cache.held) <= pages
        for _, other in accesses:
            held = next((i for i, digest in enumerate(other) if digest not in cache.held), len(other))
            assert found(shadow, other) == held


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(ACCESSES, st.integers(1, 12), st.lists(st.tuples(st.integers(0, 59), st.sampled_from([A, B, C])), max_size=20))
def test_nothing_else_goes_while_a_doomed_leaf_is_held(
    accesses: list[tuple[SessionKey, list[bytes]]], pages: int, dooms: list[tuple[int, SessionKey]]
) -> None:
    shadow = Shadow(pages, whim)
    for now, (key, digests) in enumerate(accesses):
        before = {run: run.doomed for run in shadow._order}
        shadow.access(key, digests, now)
        shadow.check_integrity()
        others_gone = [run for run, doomed in before.items() if not doomed and run not in shadow._order]
        # A run that was joined with the next one is not in the order either, but its pages are held.
        if any(run.parent is not None and run.parent.children.get(run.digests[0]) is None for run in others_gone):
            assert not shadow._doomed
        for at, doomed_key in dooms:
            if at == now:
                shadow.doom(doomed_key)
                shadow.check_integrity()


def test_pages_go_from_the_end_of_the_least_recently_used_chain() -> None:
    shadow = Shadow(5)
    shadow.access(A, chain("sab"), 1.0)
    shadow.access(B, chain("scd"), 2.0)
    assert shadow.access(A, chain("saef"), 3.0) == 2
    assert [found(shadow, chain(text)) for text in ("sab", "scd", "saef")] == [2, 2, 4]


def test_a_chain_longer_than_the_cache_is_held_as_far_as_it_goes() -> None:
    shadow = Shadow(3)
    shadow.access(A, chain("xyz"), 1.0)
    assert shadow.access(A, chain("abcdef"), 2.0) == 0
    assert (found(shadow, chain("abcdef")), len(shadow)) == (3, 3)


def test_a_growing_session_stays_one_run_also_after_it_lost_a_suffix() -> None:
    shadow = Shadow(40, whim)
    text = "s"
    for step in range(30):
        shadow.access(A, chain([*text, ("written", step)]), float(step))
        shadow.doom(A, chain([*text, ("written", step)])[-1])
        text += "p"
    shadow.access(B, chain(range(15)), 40.0)
    assert shadow.access(A, chain(text), 41.0) == 30 - 5
    shadow.check_integrity()
    assert len(shadow._order) == 2


def test_a_doomed_suffix_goes_first_and_what_is_shared_stays() -> None:
    shadow = Shadow(8, lambda key, last_used, now: now - last_used)
    shadow.access(A, chain("sabc"), 1.0)
    shadow.access(B, chain("sde"), 2.0)
    shadow.access(C, chain("f"), 3.0)
    shadow.doom(B)
    shadow.access(D, chain("ghij"), 4.0)
    assert [found(shadow, chain(text)) for text in ("sabc", "sde", "f", "ghij")] == [3, 1, 1, 4]


def test_what_several_used_is_not_doomed_with_them() -> None:
    shadow = Shadow(7, lambda key, last_used, now: now - last_used)
    shadow.access(C, chain("f"), 0.0)
    shadow.access(A, chain("sabc"), 1.0)
    shadow.access(B, chain("sde"), 2.0)
    shadow.doom(A)
    shadow.doom(B)
    shadow.access(D, chain("ghijkl"), 4.0)
    assert [found(shadow, chain(text)) for text in ("sabc", "sde", "f", "ghijkl")] == [1, 1, 0, 6]


def test_a_doomed_page_is_next_when_nothing_depends_on_it() -> None:
    shadow = Shadow(6, lambda key, last_used, now: now - last_used)
    shadow.access(C, chain("f"), 0.0)
    shadow.access(A, chain("scd"), 1.0)
    shadow.access(A, chain("sab"), 2.0)
    shadow.doom(A)
    shadow.access(B, chain("ghijk"), 3.0)
    assert [found(shadow, chain(text)) for text in ("f", "s", "ghijk")] == [1, 0, 5]
    shadow.check_integrity()


def test_one_step_is_doomed_without_the_others() -> None:
    shadow = Shadow(5, lambda key, last_used, now: now - last_used)
    shadow.access(A, chain("scd"), 1.0)
    shadow.access(A, chain("sab"), 2.0)
    shadow.doom(A, chain("sab")[-1])
    shadow.access(B, chain("gh"), 3.0)
    assert [found(shadow, chain(text)) for text in ("scd", "sab", "gh")] == [3, 1, 2]


def test_what_is_used_again_is_not_doomed_any_longer() -> None:
    shadow = Shadow(4, lambda key, last_used, now: now - last_used)
    shadow.access(A, chain("ab"), 1.0)
    shadow.access(B, chain("cd"), 2.0)
    shadow.doom(B)
    shadow.access(B, chain("cd"), 3.0)
    shadow.access(C, chain("e"), 4.0)
    assert [found(shadow, chain(text)) for text in ("ab", "cd")] == [1, 2]


def test_integrity_errors_are_found() -> None:
    shadow = Shadow(4)
    shadow.access(A, chain("ab"), 1.0)
    shadow._held += 1
    with pytest.raises(IntegrityError, match="3 pages are counted"):
        shadow.check_integrity()


def test_the_better_policy_takes_over_and_gives_back() -> None:
    contest = Contest()
    for _ in range(FEWEST_ACCESSES - 1):
        contest.note(Access(10, learned=2, lru=8))
    assert contest.policy == "learned"
    contest.note(Access(10, learned=2, lru=8))
    assert (contest.policy, contest.learned_hit_rate, contest.lru_hit_rate) == ("lru", 0.2, 0.8)
    for _ in range(WINDOW):
        contest.note(Access(10, learned=9, lru=3))
    assert (contest.policy, contest.learned_hit_rate, contest.lru_hit_rate) == ("learned", 0.9, 0.3)


def test_a_small_margin_flips_nothing() -> None:
    contest = Contest()
    for _ in range(2 * WINDOW):
        contest.note(Access(1000, learned=500, lru=504))
        assert contest.policy == "learned"


def test_a_few_large_differences_are_no_evidence() -> None:
    contest = Contest()
    for number in range(2 * WINDOW):
        better, worse = (900, 0) if number % 16 else (0, 900)
        contest.note(Access(1000, *((worse, better) if number % 8 == 0 else (900, 900))))
        assert contest.policy == "learned"
    for _ in range(7):
        contest.note(Access(1000, learned=0, lru=900))
        assert contest.policy == "learned"
    assert contest.lru_hit_rate > contest.learned_hit_rate + 0.02

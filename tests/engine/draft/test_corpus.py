"""A tenant's past runs: what is held, what goes, and that nobody else's is found."""

from __future__ import annotations

import random
import threading
from array import array

import pytest

from magnitude_engine.draft.corpus import SHORTEST_RUN, CorpusLimits, RunCorpus

SMALL = CorpusLimits(tokens=1_000)


def run_of(seed: int, length: int = 99) -> list[int]:
    """Returns a run of its own tokens."""
    return [1_000 * seed + at for at in range(length)]


def held(corpus: RunCorpus) -> list[int]:
    """Returns the seeds of the runs, least recently used first."""
    return [run[0] // 1_000 for run in corpus.runs()]


def test_a_run_is_followed_to_its_end_and_no_further() -> None:
    corpus = RunCorpus(SMALL, [run_of(1), run_of(2)])
    tree = corpus.propose([7, 8, *run_of(1)[:95]], 16, 16)
    assert list(tree.tokens) == run_of(1)[95:]
    assert corpus.propose([5], 8, 8).tokens == ()


def test_the_bound_is_kept_and_the_least_recently_used_go_first() -> None:
    corpus = RunCorpus(SMALL)
    for seed in range(1, 11):
        corpus.add(run_of(seed))
    assert held(corpus) == list(range(1, 11))
    assert len(corpus) == 1_000
    corpus.propose(run_of(1)[:20], 1, 1)
    corpus.add(run_of(2))
    corpus.add(run_of(11))
    assert held(corpus) == [6, 7, 8, 9, 10, 1, 2, 11][-7:]
    assert corpus.propose(run_of(1)[:20], 2, 2).tokens == (1_020, 1_021)
    assert corpus.propose(run_of(3)[:20], 2, 2).tokens == ()


def test_a_short_match_does_not_keep_a_run() -> None:
    corpus = RunCorpus(SMALL, [run_of(1), run_of(2)])
    corpus.matches(run_of(1)[:3])
    assert held(corpus) == [1, 2]
    corpus.matches(run_of(1)[:4])
    assert held(corpus) == [2, 1]


def test_an_equal_run_is_held_once() -> None:
    corpus = RunCorpus(SMALL, [run_of(1), run_of(2), run_of(1)])
    assert held(corpus) == [2, 1]
    assert len(corpus) == 200


def test_of_a_long_run_the_end_is_held_and_a_short_one_is_not() -> None:
    corpus = RunCorpus(SMALL, [run_of(1, 900), run_of(2, SHORTEST_RUN - 1)])
    assert [list(run) for run in corpus.runs()] == [run_of(1, 900)[-250:]]


@pytest.mark.thorough
@pytest.mark.parametrize("limits", [CorpusLimits(20_000, 400_000), CorpusLimits(700, 10**9), CorpusLimits(9, 9)])
def test_memory_stays_within_both_limits(limits: CorpusLimits) -> None:
    rng = random.Random(3)
    corpus = RunCorpus(limits)
    for seed in range(300):
        corpus.add(run_of(seed, rng.choice((8, 9, 40, 700))))
        assert len(corpus) <= limits.tokens
        assert corpus.nbytes <= max(limits.bytes, 4_096)
    assert (len(corpus) > 0) == (limits.most_tokens > 4 * SHORTEST_RUN)


def test_a_wrong_token_is_refused_and_nothing_changes() -> None:
    corpus = RunCorpus(SMALL, [run_of(1)])
    with pytest.raises(ValueError, match="token id -4"):
        corpus.add([*run_of(2), -4])
    assert held(corpus) == [1]


def test_one_tenants_words_are_never_another_ones_draft() -> None:
    canary = [70_001, 70_002, 70_003, 70_004, 70_005, 70_006, 70_007, 70_008, 70_009]
    mine, others = RunCorpus(SMALL, [canary]), RunCorpus(SMALL, [run_of(1)])
    assert mine.propose(canary[:3], 4, 4).tokens == tuple(canary[3:7])
    for end in range(1, len(canary)):
        assert others.propose(canary[:end], 16, 16).tokens == ()


def test_the_order_of_events_alone_decides_what_is_held() -> None:
    def filled() -> RunCorpus:
        rng = random.Random(4)
        corpus = RunCorpus(SMALL)
        for _ in range(60):
            corpus.add(run_of(rng.randrange(30), 90))
            corpus.matches(run_of(rng.randrange(30), 90)[:20])
        return corpus

    one, two = filled(), filled()
    assert one.runs() == two.runs()
    for seed in range(30):
        assert one.propose(run_of(seed)[:9], 8, 8) == two.propose(run_of(seed)[:9], 8, 8)


@pytest.mark.thorough
def test_looking_up_while_another_thread_adds() -> None:
    corpus = RunCorpus(SMALL)
    done = threading.Event()

    def add() -> None:
        for seed in range(150):
            corpus.add(run_of(seed % 15))
        done.set()

    writer = threading.Thread(target=add)
    writer.start()
    looked = 0
    while not done.is_set() or not looked:
        for seed in range(15):
            drafted = corpus.propose(run_of(seed)[:12], 4, 4).tokens
            assert drafted in ((), tuple(run_of(seed)[12:16]))
        looked += 1
    writer.join()
    assert all(run == array("i", run_of(run[0] // 1_000)) for run in corpus.runs())

"""When a proposer that computes is considered."""

from __future__ import annotations

from magnitude_engine.draft.turn import PATIENCE, PERIOD, Turn


def test_it_rests_where_nothing_comes_of_it_and_returns_at_once_when_something_does() -> None:
    turn, known = Turn(), True
    for _ in range(PATIENCE):
        assert turn.considers
        assert turn.watches
        turn.take(drafted=False)
    considered = watched = 0
    for _ in range(10 * PERIOD):
        # Whoever is considered knows how sure the model was of the token before.
        assert not turn.considers or known
        considered += turn.considers
        watched += turn.watches
        known = turn.watches
        turn.take(drafted=False)
    assert (considered, watched) == (10, 20)
    while not turn.considers:
        turn.take(drafted=False)
    turn.take(drafted=True)
    assert turn.considers

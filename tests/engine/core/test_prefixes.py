"""Which prefix a sequence shares with others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_engine.prefixes import Prefixes
from testkit.scheduling import chain_of


def test_the_longest_prefix_in_common_names_the_group() -> None:
    prefixes = Prefixes()
    a, b, c, alone = (b"p", b"q", b"a"), (b"p", b"q", b"b"), (b"p", b"c"), (b"x", b"y")
    for chain in (a, b, c, alone, ()):
        prefixes.enter(chain)
    assert [prefixes.group(chain) for chain in (a, b, c, alone, ())] == [b"q", b"q", b"p", None, None]
    prefixes.leave(b)
    assert prefixes.group(a) == b"p"


@pytest.mark.thorough
@given(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=6))
def test_groups_are_those_of_a_comparison_of_all_pairs_and_nothing_stays_behind(pages: list[list[int]]) -> None:
    chains = [chain_of((*(page for page in each for _ in range(16)), 7)) for each in pages]
    prefixes = Prefixes()
    for chain in chains:
        prefixes.enter(chain)
    for index, chain in enumerate(chains):
        others = {name for i, other in enumerate(chains) if i != index for name in other}
        assert prefixes.group(chain) == next((name for name in reversed(chain) if name in others), None)
    for chain in chains:
        prefixes.leave(chain)
    assert not len(prefixes)

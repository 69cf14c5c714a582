"""The radix tree: what is found, what is shared, what is taken out first."""

from __future__ import annotations

import pytest

from magnitude_engine.kv.pool import IntegrityError
from magnitude_engine.kv.radix import RadixTree, common_prefix

A, B, C = tuple(range(16)), tuple(range(16, 32)), tuple(range(32, 48))


def put(tree: RadixTree, tenant: str, *pages: tuple[tuple[int, ...], int]) -> None:
    """Places the pages of one sequence."""
    node = tree.begin(tenant)
    for ids, page in pages:
        node = tree.place(node, ids, page).node
    tree.offer(node.page)


def evicted(tree: RadixTree, leased: frozenset[int] = frozenset()) -> list[int]:
    """Takes everything out, in order."""
    order = []
    while (node := tree.pop_unused(leased.__contains__)) is not None:
        order.append(node.page)
        tree.check_integrity()
    return order


@pytest.mark.parametrize(("a", "b", "expected"), [([], [], 0), ([1, 2], [1, 2, 3], 2), (A, (*A[:7], 99, *A[8:]), 7)])
def test_common_prefix(a: list[int], b: list[int], expected: int) -> None:
    assert common_prefix(a, b) == expected


def test_the_longest_prefix_is_found_among_many_children() -> None:
    tree = RadixTree()
    for number in range(100):
        put(tree, "t", (A, 0), ((*B[:8], number * 2, 5), number + 1))
    for number in range(100):
        found = tree.match("t", (*A, *B[:8], number * 2, 5, 6))
        assert found.partial is not None
        assert ([n.page for n in found.full], found.partial.page, found.common) == ([0], number + 1, 10)
        assert tree.match("t", (*A, *B[:8], number * 2 + 1, 5)).common == 8
    assert tree.match("t", (*A, 999)).partial is None
    assert tree.match("u", A).full == ()


def test_the_longer_of_two_leaves_serves_both() -> None:
    tree = RadixTree()
    root = tree.begin("t")
    short = tree.place(root, A[:5], 0)
    longer = tree.place(root, A[:9], 1)
    assert (longer.added, longer.superseded) == (True, short.node)
    assert tree.place(root, A[:7], 2).node is longer.node
    assert tree.place(root, A, 1).node is longer.node
    assert (len(tree), longer.node.ids) == (1, A)
    tree.check_integrity()


def test_leaves_go_first_and_the_least_recently_used_before_others() -> None:
    tree = RadixTree()
    put(tree, "t", (A, 0), (B, 1), (C[:3], 2))
    put(tree, "t", (A, 0), (C, 3))
    put(tree, "u", (A, 4))
    tree.match("t", (*A, *B))
    assert evicted(tree, frozenset({3, 0})) == [2, 4, 1]
    tree.offer(3)
    assert evicted(tree) == [3, 0]
    assert len(tree) == 0


def test_a_match_is_a_use() -> None:
    tree = RadixTree()
    for number in range(4):
        put(tree, "t", ((*A[:12], number), number))
    tree.match("t", (*A[:12], 1))
    tree.match("t", (*A[:12], 0))
    assert evicted(tree) == [2, 3, 1, 0]


def test_removal_takes_what_depends_on_it() -> None:
    tree = RadixTree()
    put(tree, "t", (A, 0), (B, 1), (C, 2))
    put(tree, "t", (A, 0), (C, 3))
    node = tree.at(1)
    assert node is not None
    assert [n.page for n in tree.remove(node)] == [1, 2]
    assert tree.remove(node) == []
    tree.check_integrity()
    assert evicted(tree) == [3, 0]


def test_superseded_leaves_do_not_pile_up() -> None:
    tree = RadixTree()
    for number in range(1000):
        put(tree, "t", ((number, 1), 0))
        put(tree, "t", ((number, 1, 2), 1))
        tree.remove(tree.match("t", (number, 1, 2)).partial)  # type: ignore[arg-type]
    assert len(tree._unused) < 100


def test_a_page_in_two_nodes_is_found() -> None:
    tree = RadixTree()
    put(tree, "t", (A, 0))
    put(tree, "u", (A, 0))
    with pytest.raises(IntegrityError, match="two nodes"):
        tree.check_integrity()

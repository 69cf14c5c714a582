"""Attention against its definition in float64, over random layouts of pages, prompts and draft trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.attention import Attention, GroupedAttention, SplitAttention
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.model.cascade import Rules
from magnitude_engine.model.fused import FusedAttention, Workspace
from magnitude_engine.model.paged import PagedAttention

pytestmark = pytest.mark.thorough

HEADS, KV_HEADS, HEAD_DIM, PAGES = 6, 2, 8, 700
EDGES = (1, 15, 16, 17, 4096)


def fused(convert: bool) -> FusedAttention:
    return FusedAttention(HEADS // KV_HEADS, KV_HEADS, HEAD_DIM, convert, Rules(), Workspace())


class Layout:
    """Sequences over pages of one cache, handed out as the test says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.free = list(range(PAGES))
        self.sequences: list[tuple[list[int], int, int, tuple[int, ...]]] = []

    def pages(self, tokens: int, runs: int) -> list[int]:
        """Returns pages in `runs` runs of ascending ids, or one by one in random order where that is 0."""
        count = -(-tokens // PAGE_TOKENS)
        if runs == 0:
            return [self.free.pop(self.random.randrange(len(self.free))) for _ in range(count)]
        cuts = sorted(self.random.sample(range(1, count), min(runs, count) - 1)) if count > 1 else []
        parts = [self.free[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
        del self.free[:count]
        return [page for part in reversed(parts) for page in part]

    def add(
        self,
        context: int,
        count: int = 1,
        runs: int = 1,
        prefix: Sequence[int] = (),
        parents: tuple[int, ...] = (),
    ) -> None:
        own = self.pages(context - len(prefix) * PAGE_TOKENS, runs)
        self.sequences.append(([*prefix, *own], context, count, parents))

    def tree(self, nodes: int) -> tuple[int, ...]:
        """Returns the parents of a tree of so many nodes, in order of depth."""
        parents = [-1, -1]
        while len(parents) < nodes:
            parents.append(self.random.randrange(max(parents[-1], 0), len(parents)))
        return tuple(parents)

    def batch(self) -> StepBatch:
        sequences: list[SequenceRows] = []
        positions: list[int] = []
        slots: list[int] = []
        for pages, context, count, parents in self.sequences:
            sequences.append(SequenceRows(len(positions), count, context, tuple(pages), parents))
            known = context - len(parents)
            positions += range(context - count, known)
            positions += [known - 1 + len(path(parents, node)) for node in range(len(parents))]
            slots += [
                pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at in range(context - count, context)
            ]
        rows = torch.tensor(positions)
        return StepBatch(torch.zeros_like(rows), rows, torch.tensor(slots), tuple(sequences), rows[:0])


def path(parents: Sequence[int], node: int) -> list[int]:
    """Returns the nodes from the known tokens down to `node`."""
    return [*path(parents, parents[node]), node] if node >= 0 else []


def seen(sequence: SequenceRows, row: int) -> list[int]:
    """Returns which keys of its sequence a row sees, in the order of their positions."""
    known, own = sequence.context - len(sequence.parents), sequence.context - sequence.count + row
    if own < known:
        return list(range(own + 1))
    return [*range(known), *(known + node for node in path(sequence.parents, own - known))]


def definition(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    result = torch.empty(q.shape, dtype=torch.float64)
    for sequence in batch.sequences:
        key, value = (t[list(sequence.pages)].flatten(0, 1).double() for t in (keys, values))
        for index in range(sequence.count):
            row, visible = sequence.start + index, seen(sequence, index)
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                weight = (key[visible, shared] @ q[row, head].double() / HEAD_DIM**0.5).softmax(0)
                result[row, head] = weight @ value[visible, shared]
    return result.flatten(1)


def check(attention: Attention, batch: StepBatch, dtype: torch.dtype = torch.float32) -> None:
    """Compares with the definition; slots that no row may see are not numbers."""
    draw = torch.Generator().manual_seed(len(batch.ids))
    q = torch.randn(len(batch.ids), HEADS, HEAD_DIM, generator=draw)
    if dtype != torch.float32:
        q = q.to(dtype).float()
    size = (PAGES, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(size, generator=draw).to(dtype) for _ in range(2))
    used = torch.zeros(PAGES * PAGE_TOKENS, dtype=torch.bool)
    for sequence in batch.sequences:
        slots = torch.tensor(sequence.pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
        used[slots.flatten()[: sequence.context]] = True
    for tensor in (keys, values):
        tensor.flatten(0, 1)[~used] = float("nan")
    expected = definition(q, keys, values, batch)
    plan = attention.plan(batch, dtype)
    for _ in range(2):
        found = attention(q, keys, values, plan).double()
        torch.testing.assert_close(
            found, expected, **({"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0.02})
        )


@pytest.mark.parametrize("context", EDGES)
@pytest.mark.parametrize("runs", [1, 3, 0], ids=["one run", "three runs", "scattered"])
@pytest.mark.parametrize("convert", [False, True])
def test_one_sequence(context: int, runs: int, convert: bool) -> None:
    layout = Layout(context + runs)
    layout.add(context, runs=runs)
    check(fused(convert), layout.batch())
    check(fused(convert), layout.batch(), torch.bfloat16)


@pytest.mark.parametrize("context", EDGES[1:])
@pytest.mark.parametrize("count", [2, 15, 40])
@pytest.mark.parametrize("runs", [1, 2, 0], ids=["one run", "two runs", "scattered"])
def test_several_rows_of_one_sequence(context: int, count: int, runs: int) -> None:
    layout = Layout(context + count)
    layout.add(context, min(count, context), runs)
    check(fused(True), layout.batch())
    check(fused(True), layout.batch(), torch.bfloat16)


@pytest.mark.parametrize("members", [1, 2, 5, 16])
@pytest.mark.parametrize("shared", [16, 272, 1600])
def test_a_shared_prefix(members: int, shared: int) -> None:
    layout = Layout(members)
    prefix = layout.pages(shared, 2)
    for index in range(members):
        layout.add(shared + 1 + 23 * index, 1 + index % 2, index % 3, prefix)
    layout.add(100)
    check(fused(True), layout.batch())
    check(fused(False), layout.batch(), torch.bfloat16)


def test_prefixes_within_prefixes() -> None:
    layout = Layout(4)
    outer = layout.pages(800, 1)
    inner = [[*outer, *layout.pages(640, 1)] for _ in range(2)]
    for index in range(6):
        layout.add(1440 + 7 + index, prefix=inner[index % 2])
    layout.add(803, prefix=outer)
    plan = fused(True).plan(layout.batch(), torch.float32)
    assert [call.count for call in plan.merged] == [7, 3, 3]
    check(fused(True), layout.batch())


def test_sequences_that_hold_the_same_pages_entirely() -> None:
    layout = Layout(5)
    pages = layout.pages(1024, 1)
    layout.sequences = [(pages, 1024, 1, ()), (pages, 1024, 1, ()), (pages, 1023, 1, ())]
    check(fused(True), layout.batch())


@pytest.mark.parametrize("contexts", [(20, 20, 40), (20, 40, 30), (300, 280, 310, 290), (7, 900, 35, 620, 3, 256)])
@pytest.mark.parametrize("convert", [False, True])
def test_short_contexts_in_any_order(contexts: tuple[int, ...], convert: bool) -> None:
    layout = Layout(6)
    for context in contexts:
        layout.add(context)
    check(fused(convert), layout.batch())


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    layout = Layout(seed)
    prefix = layout.pages(16 * layout.random.randrange(1, 60), layout.random.randrange(3))
    for _ in range(layout.random.randrange(1, 9)):
        count = layout.random.choice([1, 1, 1, 2, 4, 16, 17, 33])
        length = count + layout.random.choice([0, 1, 5, 300, 700])
        before = prefix if layout.random.random() < 0.5 else []
        parents = layout.tree(layout.random.randrange(2, count)) if count > 2 and layout.random.random() < 0.5 else ()
        layout.add(len(before) * PAGE_TOKENS + length, count, layout.random.randrange(4), before, parents)
    check(fused(seed % 2 == 0), layout.batch())
    check(fused(seed % 2 == 0), layout.batch(), torch.bfloat16)


def forest(nodes: int) -> Layout:
    """Trees behind few and many known rows, across the edges of pages and splits, beside prompts and single rows."""
    layout = Layout(nodes)
    for context, count, runs in ((17, 1, 1), (300, 5, 0), (64, 64, 2)):
        layout.add(context, count, runs)
    for known, rows, runs in ((1, 1, 1), (127, 1, 0), (128, 4, 2), (250, 90, 1), (16, 16, 1)):
        layout.add(known + nodes, rows + nodes, runs, parents=layout.tree(nodes))
    layout.add(33)
    return layout


FORMS = [
    GroupedAttention(HEADS // KV_HEADS),
    SplitAttention.build(HEADS, KV_HEADS),
    SplitAttention(HEADS // KV_HEADS, 2),
    PagedAttention(),
    fused(True),
    fused(False),
]


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("nodes", [2, 14])
def test_every_form_computes_trees(attention: Attention, nodes: int) -> None:
    check(attention, forest(nodes).batch())


def test_a_tree_may_have_as_many_rows_as_one_call_takes() -> None:
    layout = Layout(1)
    layout.add(100, 64, parents=layout.tree(63))
    layout.add(100, 65, parents=layout.tree(64))
    check(PagedAttention(), layout.batch())


@pytest.mark.parametrize("known", [1, 120, 127, 128, 250])
def test_a_node_has_the_bits_that_its_token_has_without_a_tree(known: int) -> None:
    """In the reference form: each path is computed anew as plain decoding lays it out, its last row alone."""
    attention, nodes = SplitAttention.build(HEADS, KV_HEADS), 12
    layout = Layout(known)
    layout.add(known + nodes, 1 + nodes, 0, parents=layout.tree(nodes))
    batch = layout.batch()
    draw = torch.Generator().manual_seed(known)
    q = torch.randn(1 + nodes, HEADS, HEAD_DIM, generator=draw)
    keys, values = torch.randn(2, PAGES, PAGE_TOKENS, KV_HEADS, HEAD_DIM, generator=draw)
    found = attention(q, keys, values, attention.plan(batch, torch.float32))
    for row in range(1 + nodes):
        plain = Layout(row)
        (rows,), visible = batch.sequences, seen(batch.sequences[0], row)
        plain.add(len(visible))
        pages = list(plain.sequences[0][0])
        alone = [torch.zeros_like(keys), torch.zeros_like(values)]
        for target, source in zip(alone, (keys, values), strict=True):
            path_of = source[list(rows.pages)].flatten(0, 1)[visible]
            target.flatten(0, 1)[pages[0] * PAGE_TOKENS :][: len(visible)] = path_of
        plan = attention.plan(plain.batch(), torch.float32)
        assert torch.equal(attention(q[row : row + 1], *alone, plan)[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_s_own_sizes(dtype: torch.dtype) -> None:
    """As built for a model: whether keys are converted is measured."""
    layout = Layout(6)
    for context, count, runs in ((40, 1, 1), (700, 30, 2), (16, 1, 0)):
        layout.add(context, count, runs)
    check(FusedAttention.build(HEADS, KV_HEADS, HEAD_DIM), layout.batch(), dtype)


def test_one_plan_serves_caches_of_other_layers() -> None:
    layout = Layout(8)
    layout.add(600, runs=0)
    layout.add(90)
    batch = layout.batch()
    attention = fused(True)
    plan = attention.plan(batch, torch.float32)
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        q = torch.randn(2, HEADS, HEAD_DIM, generator=draw)
        keys, values = (torch.randn(PAGES, PAGE_TOKENS, KV_HEADS, HEAD_DIM, generator=draw) for _ in range(2))
        expected = definition(q, keys, values, batch)
        torch.testing.assert_close(attention(q, keys, values, plan).double(), expected, rtol=1e-5, atol=2e-6)


def test_a_plan_of_another_form_is_refused() -> None:
    layout = Layout(1)
    layout.add(5)
    plan = GroupedAttention(HEADS // KV_HEADS).plan(layout.batch(), torch.float32)
    cache = torch.zeros(1, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    with pytest.raises(TypeError, match="its own plan"):
        fused(False)(torch.zeros(1, HEADS, HEAD_DIM), cache, cache, plan)

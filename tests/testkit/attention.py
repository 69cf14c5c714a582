"""Attention over pages: awkward steps in a poisoned cache, and a judge in double precision.

Whatever must not be read is NaN: pages of nobody, slots past a context, and the page that unused table entries name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from magnitude_kernels.paged_attention.ragged import Cache, Ragged, lay_out
from magnitude_kernels.shared_prefix.reference import Shared

PAGE = 16


class Heads(NamedTuple):
    """The sizes of a model's attention."""

    heads: int
    kv_heads: int
    size: int


class Given(NamedTuple):
    """Inputs of attention; `tokens` are the pages of each sequence as one list of slots."""

    queries: torch.Tensor
    cache: Cache
    ragged: Ragged
    scale: float


def given(
    lengths: Sequence[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    seed: int,
    prefix: int = 0,
    spread: float = 1.0,
) -> Given:
    """Returns a step of sequences with (rows, context), their pages in random order.

    All sequences share the pages of their first `prefix` tokens, a whole number of pages. A larger `spread` makes
    scores larger, and the weights fall on fewer keys.
    """
    generator = torch.Generator().manual_seed(seed)
    shared = prefix // PAGE
    needed = [-(-context // PAGE) for _, context in lengths]
    order = torch.randperm(sum(needed) + shared + 3, generator=generator).tolist()
    poisoned, common, free = order[:3], order[3 : 3 + shared], order[3 + shared :]
    pages = []
    for count in needed:
        own = max(0, count - shared)
        pages.append(common[: min(count, shared)] + free[:own])
        free = free[own:]
    cache = _poisoned_cache(len(order), heads, dtype)
    for own, (_, context) in zip(pages, lengths, strict=True):
        slots = torch.tensor(
            [page * PAGE + offset for page in own for offset in range(PAGE)][:context], dtype=torch.long
        )
        for tensor in cache:
            fresh = torch.randn(context, heads.kv_heads, heads.size, generator=generator)
            flat = tensor.view(-1, heads.kv_heads, heads.size)
            flat[slots] = torch.where(flat[slots].isnan(), fresh.to(dtype), flat[slots])
    rows = sum(count for count, _ in lengths)
    queries = (torch.randn(rows, heads.heads, heads.size, generator=generator) * spread).to(dtype)
    ragged = lay_out([n for n, _ in lengths], [n for _, n in lengths], pages, torch.device("cpu"))
    table = torch.full((len(lengths), ragged.table.shape[1] + 1), poisoned[0], dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = torch.tensor(own)
    return Given(queries, cache, replace(ragged, table=table), heads.size**-0.5)


def _poisoned_cache(pages: int, heads: Heads, dtype: torch.dtype) -> Cache:
    size = (pages, PAGE, heads.kv_heads, heads.size)
    return Cache(torch.full(size, float("nan"), dtype=dtype), torch.full(size, float("nan"), dtype=dtype))


def on(device: torch.device, step: Given) -> Given:
    """Returns the step on another device."""
    tensors = {name: getattr(step.ragged, name).to(device) for name in ("starts", "counts", "contexts", "table")}
    cache = Cache(*(tensor.to(device) for tensor in step.cache))
    return Given(step.queries.to(device), cache, replace(step.ragged, **tensors), step.scale)


def share(step: Given, tokens: int, members: Sequence[int]) -> Shared:
    """Returns one group of consecutive sequences, `members`, that share their first `tokens` tokens."""
    ragged = step.ragged
    first, rows = int(ragged.starts[members[0]]), sum(int(ragged.counts[index]) for index in members)
    shared = torch.zeros_like(ragged.counts)
    shared[list(members)] = tokens
    one = torch.tensor([first, rows, members[-1]], dtype=torch.int32, device=ragged.counts.device)
    return Shared(one[0:1], one[1:2], one[2:3], shared, rows)


def random_trees(counts: Sequence[int], seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Returns for trees of these sizes each node's parent (-1 for a root), and the ancestors' bits of all rows.

    Whether a node's own bit is set is random, and bits past the tree are set.
    """
    generator = torch.Generator().manual_seed(seed)
    parents, bits = [], []
    for count in counts:
        tree, seen = [], []
        for node in range(count):
            parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
            tree.append(parent)
            seen.append((seen[parent] | 1 << parent) if parent >= 0 else 0)
        past = sum(1 << bit for bit in range(count, 64))
        own = torch.randint(2, (count,), generator=generator).tolist()
        bits += [mask | past | (flag << node) for node, (mask, flag) in enumerate(zip(seen, own, strict=True))]
        parents.append(tree)
    signed = [mask - 2**64 if mask >= 2**63 else mask for mask in bits]
    return parents, torch.tensor(signed, dtype=torch.int64)


def complaints(
    step: Given, out: torch.Tensor, tolerance: float, parents: Sequence[Sequence[int]] | None = None
) -> list[str]:
    """Returns what is wrong with `out`, one line per row, by the definition in float64.

    A result may be off by `tolerance` times the average of |v| under the same weights. `parents` makes the rows of
    each sequence the nodes of a tree. Rows of no sequence must be zero.
    """
    step, out = on(torch.device("cpu"), step), out.cpu().double()
    found, lost = [], set(range(out.shape[0]))
    table, group = step.ragged.table.tolist(), step.queries.shape[1] // step.cache.keys.shape[2]
    flat = [tensor.reshape(-1, *tensor.shape[2:]).double() for tensor in step.cache]
    columns = (step.ragged.starts, step.ragged.counts, step.ragged.contexts)
    for index, (start, count, context) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        for node in range(count):
            row = start + node
            lost.discard(row)
            seen = _seen(context - count, node, None if parents is None else parents[index])
            slots = [table[index][position // PAGE] * PAGE + position % PAGE for position in seen]
            keys, values = (tensor[slots].repeat_interleave(group, 1) for tensor in flat)
            scores = (keys * step.queries[row].double()).sum(2) * step.scale
            weights = (scores - scores.amax(0)).exp()
            weights = (weights / weights.sum(0))[:, :, None]
            off = (out[row] - (weights * values).sum(0)).abs() / (weights * values.abs()).sum(0)
            if not bool((off <= tolerance).all()):
                found.append(f"sequence {index} ({count} rows of {context}), row {row}: off by {off.max():.2e}")
    found += [f"padding row {row} is {out[row].abs().max():.2e}" for row in sorted(lost) if bool(out[row].any())]
    return found


def _seen(before: int, node: int, parents: Sequence[int] | None) -> list[int]:
    """Returns the positions that a row sees, `before` the tokens before the first row."""
    if parents is None:
        return list(range(before + node + 1))
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return [*range(before), *(before + step for step in sorted(path))]

"""Attention of sequences that share a prefix, in plain torch: the definition of the operation, and its path on CPU.

The result is that of `paged_attention`: sharing changes what is read how often, never what comes out.

    group 0: rows of sequences 0, 1, 2      |-- shared pages, read once --|
             sequence 0                                                   |-- own pages --|
             sequence 1                                                   |-- own --|
             sequence 2                                                   |-- own pages ------|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magnitude_kernels.paged_attention import reference
from magnitude_kernels.paged_attention.ragged import Cache, Ragged


@dataclass(frozen=True, slots=True)
class Shared:
    """Which sequences share a prefix; tensors lie on the queries' device.

    Attributes:
        starts, counts: int32 [groups]; the rows `starts .. starts + counts` are all rows of the group's sequences.
            A count of 0 is padding.
        leaders: int32 [groups], one sequence of the group: its table gives the shared pages.
        tokens: int32 [sequences], how many first tokens a sequence shares with its group, the same for all of the
            group and before the position of each of its rows; 0 for a sequence of no group.
        most_rows: no group has more rows.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    leaders: torch.Tensor
    tokens: torch.Tensor
    most_rows: int


def shared_prefix(queries: torch.Tensor, cache: Cache, ragged: Ragged, shared: Shared, scale: float) -> torch.Tensor:
    """Returns [rows, heads, head_dim] in the type of `queries` ([rows, heads, head_dim]); zero for padding.

    Raises ValueError where the sequences of a group do not share what `shared` says. The kernel does not look.
    """
    page_tokens = cache.keys.shape[1]
    covered = torch.zeros(ragged.counts.numel(), dtype=torch.bool)
    groups = zip(shared.starts.tolist(), shared.counts.tolist(), shared.leaders.tolist(), strict=True)
    for group, (first, rows, leader) in enumerate(groups):
        tokens = int(shared.tokens[leader])
        pages = -(-tokens // page_tokens)
        for index, (start, count, context) in enumerate(reference.lengths(ragged)):
            if not (count and first <= start < first + rows):
                continue
            covered[index] = True
            same = torch.equal(ragged.table[index, :pages], ragged.table[leader, :pages])
            if not same or int(shared.tokens[index]) != tokens or context - count < tokens:
                raise ValueError(
                    f"sequence {index} does not share its first {tokens} tokens with sequence {leader} of group "
                    f"{group}: give it the same pages and tokens, and rows after them, or leave it out of the group"
                )
    lost = ((shared.tokens.cpu() > 0) & ~covered & (ragged.counts.cpu() > 0)).nonzero().flatten().tolist()
    if lost:
        raise ValueError(f"sequences {lost} share tokens but are in no group: set their tokens to 0")
    return reference.paged_attention(queries, cache, ragged, scale)

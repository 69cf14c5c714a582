"""The page kernels on a GPU: right to the bit, and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from magnitude_kernels import dispatch
from magnitude_kernels.kv_copy.reference import ZEROS, PageMove, PageTensors
from testkit.gpu import Case
from testkit.paging import checksum, moved, page_bytes, random_cache, raw


class Model(NamedTuple):
    """A cache's sizes; bfloat16."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int


# Pages enough that every repetition finds other ones.
MODELS = (Model("SmolLM2", 30, 3, 64), Model("Llama 3 8B", 32, 8, 128))
PAGES = 512
COUNTS = (1, 16, 128)


def check(device: torch.device) -> list[str]:
    """Returns which moves leave other bytes than Python's, or another checksum."""
    wrong = []
    for tensors, pages, heads, dtype in ((1, 3, (1, 2), torch.float32), (60, 40, (3, 80), torch.bfloat16)):
        cache = [t.to(device) for t in random_cache(tensors, pages, heads, dtype, seed=tensors)]
        view = PageTensors.of(cache)
        moves = [PageMove(0, 1), PageMove(1, 2), PageMove(ZEROS, 0), *(PageMove(i, i - 2) for i in range(2, pages))]
        expected = moved(cache, moves)
        dispatch.copy_pages(view, moves)
        if raw(cache) != expected:
            wrong.append(f"copy of {tensors} tensors")
        for listed in ([], [0], list(range(pages))[::-2]):
            staging = view.staging(len(listed)).fill_(0xA5)
            sums = dispatch.gather_pages(view, listed, staging).tolist()
            contents = [page_bytes(cache, page) for page in listed]
            if raw([staging]) != [b"".join(contents)] or sums != [checksum(c) for c in contents]:
                wrong.append(f"gather of {len(listed)} pages of {tensors} tensors")
            dispatch.copy_pages(view, [PageMove(ZEROS, page) for page in range(pages)])
            if dispatch.scatter_pages(view, listed, staging).tolist() != sums:
                wrong.append(f"checksum of {len(listed)} scattered pages of {tensors} tensors")
            written = dict(zip(listed, contents, strict=True))
            if any(page_bytes(cache, p) != written.get(p, bytes(view.page_words * 4 * tensors)) for p in range(pages)):
                wrong.append(f"scatter of {len(listed)} pages of {tensors} tensors")
            for page, content in written.items():
                cache_restore(cache, page, content)
    return wrong


def cache_restore(cache: Sequence[torch.Tensor], page: int, content: bytes) -> None:
    """Puts the bytes of a page back."""
    parts = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(cache[0].device).chunk(len(cache))
    for tensor, part in zip(cache, parts, strict=True):
        tensor[page] = part.view(tensor.dtype).view(tensor.shape[1:])


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; each byte is read once and written once."""
    for model in MODELS:
        size = (PAGES, 16, model.kv_heads, model.head_dim)
        cache = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2 * model.layers)]
        for count in COUNTS:
            yield from _cases(f"{model.name}, {count} pages", cache, count)


def _cases(name: str, cache: list[torch.Tensor], count: int) -> Iterator[Case]:
    view = PageTensors.of(cache)
    staging = view.staging(count)
    index = torch.arange(count, device=view.table.device)
    moving = 2 * staging.numel()

    def listed(turn: int) -> list[int]:
        return [(turn * count + i) % PAGES for i in range(count)]

    def copy(turn: int) -> tuple[()]:
        dispatch.copy_pages(view, [PageMove((p + PAGES // 2) % PAGES, p) for p in listed(turn)])
        return ()

    def torch_copy(turn: int) -> torch.Tensor:
        for tensor in cache:
            tensor[(index + turn * count) % PAGES] = tensor[(index + turn * count + PAGES // 2) % PAGES]
        return index

    yield Case(f"copy, {name}", copy, torch_copy, moving)
    yield Case(
        f"gather, {name}",
        lambda turn: (dispatch.gather_pages(view, listed(turn), staging),),
        lambda turn: torch.stack([tensor[(index + turn * count) % PAGES] for tensor in cache], 1),
        moving,
    )
    yield Case(
        f"scatter, {name}",
        lambda turn: (dispatch.scatter_pages(view, listed(turn), staging),),
        lambda turn: _scatter(cache, (index + turn * count) % PAGES, staging),
        moving,
    )


def _scatter(cache: list[torch.Tensor], index: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    for number, tensor in enumerate(cache):
        tensor[index] = staging[:, number].view(tensor.dtype).view(-1, *tensor.shape[1:])
    return staging

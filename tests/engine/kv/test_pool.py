"""Page accounting: runs, counts, tenants."""

from __future__ import annotations

import pytest
import torch

from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.pool import Fill, IntegrityError, OutOfPages, PageOp, PagePool, Spill
from magnitude_engine.kv.tensors import apply_ops
from magnitude_kernels.kv_copy.reference import PageTensors


def test_a_growing_sequence_stays_in_one_run_beside_another() -> None:
    pool = PagePool(64)
    first = list(pool.allocate(4, "t").pages)
    second = list(pool.allocate(4, "t").pages)
    for _ in range(10):
        first += pool.allocate(1, "t", after=first[-1]).pages
        second += pool.allocate(1, "t", after=second[-1]).pages
    assert first == list(range(first[0], first[0] + 14))
    assert second == list(range(second[0], second[0] + 14))
    pool.check_integrity()


def test_a_request_larger_than_any_run_takes_several() -> None:
    pool = PagePool(8)
    pages = pool.allocate(8, "t").pages
    pool.end_lease(pages[0:2])
    pool.end_lease(pages[4:7])
    assert sorted(pool.allocate(5, "t").pages) == [0, 1, 4, 5, 6]
    assert pool.free == 0
    pool.check_integrity()


def test_too_many_pages_are_refused_without_a_change() -> None:
    pool = PagePool(3)
    pool.allocate(2, "t")
    with pytest.raises(OutOfPages, match="2 cache pages are needed and 1 are free"):
        pool.allocate(2, "t")
    assert pool.free == 1
    pool.check_integrity()


def test_idle_pages_are_those_only_retained() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2, "t").pages
    pool.retain(pages)
    assert pool.idle == 0
    pool.end_lease(pages)
    assert (pool.idle, pool.free) == (2, 2)
    pool.lease(pages[:1])
    assert pool.idle == 1
    pool.end_retention(pages)
    assert (pool.idle, pool.free) == (0, 3)


def test_pages_of_another_tenant_and_broken_pages_are_zeroed_once() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2, "a")
    assert pages.to_zero == ()
    pool.end_lease(pages.pages)
    assert pool.allocate(1, "a").to_zero == ()
    assert pool.allocate(1, "b").to_zero == (1,)
    pool.spoil([0])
    assert pool.spoiled(0)
    pool.end_lease([0])
    assert pool.allocate(1, "a").to_zero == (0,)
    pool.end_lease([0])
    assert pool.allocate(1, "a").to_zero == ()


def test_a_page_given_back_twice_is_found() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1, "t").pages
    pool.end_lease(pages)
    pool.end_lease(pages)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def test_operations_apply_in_order() -> None:
    keys = torch.arange(4.0).reshape(4, 1).repeat(1, 4)
    pages = torch.stack([keys, keys + 10])
    words = PageTensors.of(tuple(pages))
    spilled: dict[bytes, bytes] = {}
    name = BlockName(b"key", b"parent", ())
    ops = [PageOp(1, 3), Spill(1, name), PageOp(None, 1), PageOp(None, 0), PageOp(3, 0)]
    apply_ops(ops, pages, words, lambda name, payload: spilled.update({name.key: bytes(payload)}))
    assert pages[0, :, 0].tolist() == [1, 0, 2, 1]
    assert pages[1, :, 1].tolist() == [11, 0, 12, 11]
    apply_ops([Fill(2, spilled[b"key"])], pages, words, lambda name, payload: None)
    assert pages[:, 2].tolist() == [[1] * 4, [11] * 4]

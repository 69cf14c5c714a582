"""A tenant's secret stays its own on every tier: nobody else's request finds it, reads it or is faster for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.engine import Engine
from magnitude_engine.kv.blocks import HEADER_BYTES
from magnitude_engine.kv.pool import Payload
from magnitude_engine.kv.tensors import read_page
from magnitude_engine.model.loader import LoadedModel
from testkit.disk import files_in
from testkit.engine import Recorder, alone, generate, run
from testkit.tiered import counter, disk_stats, evict, save, tiered

pytestmark = pytest.mark.thorough

SECRET = "the launch code is seven four one, and whoever reads this must never tell it to anybody else at all"

Tier = Callable[[LoadedModel, Path], Engine]


def secret(tenant: str, **fields: object) -> api.Generate:
    return generate(SECRET, tenant=tenant, session="s", **fields)


def on_device(model: LoadedModel, folder: Path) -> Engine:
    engine = tiered(model)
    run(engine, secret("owner"))
    return engine


def in_host_memory(model: LoadedModel, folder: Path) -> Engine:
    engine = tiered(model, kv_host_mb=8)
    run(engine, secret("owner"))
    evict(engine, spoil=False)
    return engine


def on_disk(model: LoadedModel, folder: Path) -> Engine:
    engine = tiered(model, folder)
    run(engine, secret("owner"))
    save(engine)
    evict(engine, spoil=False)
    return engine


def after_a_restart(model: LoadedModel, folder: Path) -> Engine:
    on_disk(model, folder).close()
    return tiered(model, folder)


TIERS = {"device": on_device, "host": in_host_memory, "disk": on_disk, "restart": after_a_restart}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> Tier:
    return TIERS[request.param]


def rows(engine: Engine, request: api.Generate) -> tuple[Recorder, float, int]:
    """Runs a request; returns its answer, the rows that were computed for it, and the steps that it took."""
    before, steps = counter(engine, "prefill_rows") + counter(engine, "decode_rows"), engine.status().steps
    (answer,) = run(engine, request)
    computed = counter(engine, "prefill_rows") + counter(engine, "decode_rows") - before
    return answer, computed, engine.status().steps - steps


def test_another_tenant_pays_in_full_and_the_owner_does_not(model: LoadedModel, tmp_path: Path, tier: Tier) -> None:
    engine = tier(model, tmp_path / "kv")
    plain = rows(tiered(model), secret("other"))
    for request in (secret("other"), secret("other2", n=3), secret("Owner", branch="b")):
        answer, computed, steps = rows(engine, request)
        assert answer.usage.cached_tokens == 0
        assert answer.usage.cached_host_tokens == answer.usage.cached_disk_tokens == 0
        if request.n == 1:
            assert (computed, steps) == plain[1:]
        assert answer.ids() == alone(model, request).ids()
    owner, computed, _ = rows(engine, secret("owner"))
    engine.close()
    assert owner.usage.cached_tokens >= owner.usage.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
    assert computed < plain[1]


def pieces(payload: Payload) -> set[bytes]:
    """Returns the keys and values of each slot and head, those that were never written left out."""
    size = 8 * 4
    data = bytes(payload)
    return {data[at : at + size] for at in range(0, len(data), size)} - {bytes(size)}


def written(engine: Engine) -> set[bytes]:
    """Returns all keys and values that the engine has on its pages."""
    cache = engine._stepper.cache
    return set().union(*(pieces(read_page(cache._pages, page)) for page in range(cache.manager.total)))


@pytest.mark.slow
def test_no_page_of_another_tenant_holds_any_of_the_secret(model: LoadedModel, tmp_path: Path, tier: Tier) -> None:
    """Also not in slots behind what it has written, where its own request may not look."""
    wide = generate(tuple(range(100, 100 + 80)), tenant="other", n=8, max_tokens=20, sampling=api.Sampling(seed=1))
    owners, strangers = tiered(model), tiered(model)
    run(owners, secret("owner", max_tokens=1))
    run(strangers, wide)
    # In the first layer a value depends on its own token alone, so some are the same in any prompt.
    mine = written(owners) - written(strangers)
    engine = tier(model, tmp_path / "kv")
    run(engine, secret("owner", max_tokens=1))
    assert written(engine) & mine
    evict(engine, spoil=False)
    cache = engine._stepper.cache
    seen: list[set[bytes]] = []

    def look() -> None:
        for lease in cache.manager._leases:
            assert lease.key.tenant == "other"
            seen.extend(pieces(read_page(cache._pages, page)) & mine for page in lease.pages)

    run(engine, wide, between=look)
    engine.close()
    assert len(seen) > 100
    assert set().union(*seen) == set()


def test_pages_that_changed_tenants_hold_zeros_behind_what_was_restored(model: LoadedModel, tmp_path: Path) -> None:
    """A restore fills whole pages; the page after it is written token by token and must not show what was there."""
    # A refused draft would leave the owner's own words there, in the owner's pages.
    engine = tiered(model, tmp_path, pages=12, speculation=False)
    run(engine, secret("owner"))
    save(engine)
    evict(engine, spoil=False)
    run(engine, generate("x" * 180, tenant="other", max_tokens=1))
    evict(engine, spoil=False)
    cache = engine._stepper.cache
    lengths: list[int] = []

    def look() -> None:
        for lease in cache.manager._leases:
            rest = lease.length % PAGE_TOKENS
            if rest:
                page = cache._pages[:, lease.pages[lease.length // PAGE_TOKENS]]
                assert torch.count_nonzero(page[:, rest:]) == 0
                lengths.append(lease.length)

    (answer,) = run(engine, secret("owner"), between=look)
    engine.close()
    assert answer.usage.cached_disk_tokens > 0
    assert lengths
    assert answer.ids() == alone(model, secret("owner")).ids()


def test_blocks_copied_under_another_tenants_names_are_rejected(model: LoadedModel, tmp_path: Path) -> None:
    engine = on_disk(model, tmp_path)
    prompt = model.prompts.encode(secret("owner").input)
    chains = [engine._stepper.manager.chain(tenant, prompt) for tenant in ("owner", "thief")]
    engine.close()
    by_name = {file.name: file for file in files_in(tmp_path)}
    for theirs, stolen in zip(*chains, strict=True):
        target = by_name[theirs.hex()].parent.parent / stolen.hex()[:2] / stolen.hex()
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(by_name[theirs.hex()], target)
    thief = tiered(model, tmp_path)
    (answer,) = run(thief, secret("thief"))
    assert answer.usage.cached_tokens == 0
    assert answer.ids() == alone(model, secret("thief")).ids()
    assert disk_stats(thief).rejected == 1
    (owner,) = run(thief, secret("owner"))
    assert owner.usage.cached_disk_tokens == len(chains[0]) * PAGE_TOKENS
    thief.close()


def test_a_file_on_disk_does_not_spell_the_tenant(model: LoadedModel, tmp_path: Path) -> None:
    engine = on_disk(model, tmp_path)
    engine.close()
    data = [file.read_bytes()[:HEADER_BYTES] for file in files_in(tmp_path)]
    assert data
    assert not any(b"owner" in header for header in data)

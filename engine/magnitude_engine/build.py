"""From the settings to the cache of a model and its tiers, and to what drafts for it."""

from __future__ import annotations

from collections.abc import Callable

from magnitude_engine.config import PAGE_TOKENS, EngineConfig, cache_folder
from magnitude_engine.draft.controller import FixedRule
from magnitude_engine.draft.runs import PastRuns, open_store
from magnitude_engine.drafters.chain import Drafter
from magnitude_engine.drafters.model import ModelDrafter, pages_within
from magnitude_engine.drafters.selfdraft import SelfDrafter, spread
from magnitude_engine.kv.blocks import CacheIdentity
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.disk import DiskOptions, DiskTier
from magnitude_engine.kv.disk.folder import LOCK_WAIT_S
from magnitude_engine.kv.manager import CacheManager
from magnitude_engine.kv.tiers import Tiers
from magnitude_engine.model.batch import KeyValueCache
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.speculation import Speculation

MIB = 1024 * 1024
# A million tokens; more would only slow the page accounts down.
MAX_PAGES = 1 << 16
# Layers that the model drafts with (tests/bench/log.md).
SELF_SHARE = 0.6
RUNS_FOLDER = "runs"


def open_cache(
    model: LoadedModel, config: EngineConfig, pages: int | None, clock: Callable[[], float]
) -> tuple[KeyValueCache, PagedCache]:
    """Returns tensors for `pages` pages (default: what `config.kv_memory_mb` holds), and the cache over them.

    Raises:
        ConfigError: another process goes on using the folder of the disk tier, or it cannot be used.
    """
    block = page_bytes(model)
    pages = pages or min(MAX_PAGES, max(1, config.kv_memory_mb * MIB // block))
    reuse = config.optimization_level != "off"
    tiers = _open_tiers(model, config, block) if reuse else Tiers()
    tensors = model.runner.allocate_cache(pages)
    return tensors, PagedCache(CacheManager(pages, reuse, tiers, clock), tiers, tensors.pages)


def open_speculation(
    model: LoadedModel,
    config: EngineConfig,
    tensors: KeyValueCache,
    cache: PagedCache,
    clock: Callable[[], float],
) -> Speculation:
    """Returns what drafts for the model: nothing but an index of what was said, until it is calibrated.

    Past runs are kept below the folder of the disk tier, whose lock this process holds.
    """
    kept = config.kv_disk_mb > 0 and config.drafts
    store = open_store(cache_folder(config) / RUNS_FOLDER, model.card.tokenizer_hash) if kept else None
    drafters: list[Drafter] = []
    if config.drafts:
        if model.draft is not None:
            pages = pages_within(model.draft, config.draft_kv_mb)
            drafters.append(ModelDrafter(model.draft, model.tokenizer.vocab_size, pages))
        layers = spread(model.runner.shape.layers, SELF_SHARE)
        drafters.append(SelfDrafter(model.runner, tensors, cache, layers))
    context = model.runner.shape.context
    return Speculation(FixedRule(), context, PastRuns(store, clock), clock, drafters)


def page_bytes(model: LoadedModel) -> int:
    """Returns the bytes of one page: keys and values of all layers."""
    shape, dtype = model.runner.shape, model.runner.cache_dtype
    return 2 * shape.layers * PAGE_TOKENS * shape.kv_heads * shape.head_dim * dtype.itemsize


def _open_tiers(model: LoadedModel, config: EngineConfig, block: int) -> Tiers:
    shape = model.runner.shape
    identity = CacheIdentity(
        weights_hash=model.card.weights_hash,
        tokenizer_hash=model.card.tokenizer_hash,
        profile=model.card.profile,
        dtype=str(model.runner.cache_dtype),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    ).digest()
    disk = None
    if config.kv_disk_mb:
        folder = cache_folder(config)
        options = DiskOptions(lock_wait_s=LOCK_WAIT_S)
        disk = DiskTier.open(folder, identity, block, config.kv_disk_mb * MIB, options)
    return Tiers(identity, config.kv_host_mb * MIB, disk, block)

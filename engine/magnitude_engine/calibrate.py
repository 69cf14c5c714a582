"""What a decode step costs on this machine, by its number of rows: measured once, before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.draft.controller import Controller, FixedDepth, StepCosts, is_sane
from magnitude_engine.kv.lease import CacheKey, Lease, pages_for
from magnitude_engine.model.batch import KeyValueCache
from magnitude_engine.model.runner import Runner
from magnitude_engine.step import Rows, build_batch
from magnitude_engine.telemetry import worker_log

ROWS = (1, 2, 4, 8)
CONTEXT = 512
ROUNDS = 2


def depths(runner: Runner, tensors: KeyValueCache, pages: int, clock: Callable[[], float]) -> Controller | FixedDepth:
    """Returns what decides how much is drafted: by measured costs, or in `reference` by a fixed rule.

    Writes to the cache's first `pages` pages, which nobody may use yet.
    """
    if runner.profile == "reference":
        return FixedDepth()
    context = min(CONTEXT, pages * PAGE_TOKENS) - ROWS[-1]
    lease = Lease(CacheKey("", "", ""), list(range(pages_for(context + ROWS[-1]))), context)

    def seconds(rows: int) -> float:
        """Returns the least seconds of a step of so many rows, logits included."""
        batch = build_batch([Rows([0] * rows, lease, rows)], runner.device)
        best = math.inf
        for _ in range(ROUNDS):
            began = clock()
            runner.forward(batch, tensors).logits.sum().item()
            best = min(best, clock() - began)
        return best

    measured = {rows: seconds(rows) for rows in ROWS}
    if not is_sane(measured):
        worker_log.warning("the costs of steps cannot be measured: nothing is drafted by cost")
        return FixedDepth()
    worker_log.info("a step of %s rows takes %s ms", list(measured), [round(1000 * s, 1) for s in measured.values()])
    return Controller(StepCosts(measured))

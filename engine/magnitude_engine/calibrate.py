"""What steps and drafts cost on this machine, by their number of rows: measured once, before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.draft.controller import Controller, FixedRule
from magnitude_engine.draft.costs import StepCosts, is_sane
from magnitude_engine.drafters.chain import Drafter, Pass
from magnitude_engine.kv.lease import CacheKey, Lease, pages_for
from magnitude_engine.step import Rows, build_batch
from magnitude_engine.telemetry import worker_log

ROWS = (1, 2, 4, 8, 16)
DRAFT_ROWS = (1, 4)
CONTEXT = 512
ROUNDS = 8


def rule(model: Pass, drafters: Sequences[Drafter], clock: Callable[[], float]) -> Controller | FixedRule:
    """Returns what decides how much is drafted: by measured costs, or in `reference` by a fixed rule.

    Writes to the first pages of the caches.
    """
    if model.runner.profile == "reference":
        return FixedRule()
    measured = seconds(model, ROWS, clock)
    passes = {each.name: seconds(each.a_pass(model.pages), DRAFT_ROWS, clock) for each in drafters}
    if not all(is_sane(each) for each in (measured, *passes.values())):
        worker_log.warning("the costs of steps cannot be measured: nothing is drafted by cost")
        return FixedRule({})
    for name, taken in {"step": measured, **passes}.items():
        words = [round(1000 * each, 1) for each in taken.values()]
        worker_log.info("a %s of %s rows takes %s ms", name, list(taken), words)
    return Controller(StepCosts(measured), {name: StepCosts(taken) for name, taken in passes.items()})


def seconds(measured: Pass, counts: Sequences[int], clock: Callable[[], float]) -> Mapping[int, float]:
    """Returns, for each number of rows, the least seconds of a pass, logits included.

    Each round has a pass of every size, so that other work on the machine meets all of them.
    """
    context = min(CONTEXT, measured.pages * PAGE_TOKENS) - max(counts)
    lease = Lease(CacheKey("", "", ""), list(range(pages_for(context + max(counts)))), context)
    batches = {rows: build_batch([Rows([0] * rows, lease, rows)], measured.runner.device) for rows in counts}
    found = dict.fromkeys(counts, math.inf)
    for _ in range(ROUNDS):
        for rows, batch in batches.items():
            began = clock()
            measured.runner.forward(batch, measured.tensors, measured.layers).logits.sum().item()
            found[rows] = min(found[rows], clock() - began)
    return found

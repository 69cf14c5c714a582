"""A model that computes nothing: its keys are the token ids themselves.

For counting what a cache serves, the numbers in it do not matter, but it does matter that they are the right ones. So
this runner writes each token's id into its slot of the cache, and answers a step with a fingerprint of all ids that it
finds in the sequence's pages: that of the sequence's tokens, unless the cache served a wrong page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magnitude_engine.config import PAGE_TOKENS, EngineConfig
from magnitude_engine.model.batch import KeyValueCache, ModelShape, StepBatch, StepOutput
from magnitude_engine.model.loader import LoadedModel, load_model
from testkit.model import smollm2_path


class Ledger:
    """Stands in for `Runner`.

    Attributes:
        read: fingerprints of the sequences whose logits were wanted, in order.
    """

    profile = "reference"
    cache_dtype = torch.int32
    device = torch.device("cpu")
    description = "none"

    def __init__(self, vocab: int, context: int) -> None:
        self.shape = ModelShape(layers=1, kv_heads=1, head_dim=1, hidden=1, vocab=vocab, context=context)
        self.read: list[int] = []
        self._logits = torch.zeros(vocab)

    def allocate_cache(self, pages: int) -> KeyValueCache:
        """Returns room for the ids of `pages` pages."""
        return KeyValueCache.allocate(self.shape, pages, PAGE_TOKENS, self.cache_dtype, self.device)

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Writes the step's ids, and reads back all of each sequence whose logits are wanted."""
        slots = cache.keys[0].view(-1)
        slots[batch.slots] = batch.ids.int()
        wanted = set(batch.logit_rows.tolist())
        for rows in batch.sequences:
            if rows.start + rows.count - 1 in wanted:
                pages = torch.tensor(rows.pages)
                found = slots.view(-1, PAGE_TOKENS)[pages].view(-1)[: rows.context]
                self.read.append(fingerprint(found.tolist()))
        return StepOutput(self._logits.expand(len(wanted), -1), torch.zeros(len(wanted), 1))

    def recapture(self) -> bool:
        """Has nothing to prepare."""
        return False


def fingerprint(ids: Sequence[int]) -> int:
    """Returns a number that tells sequences of ids apart."""
    return hash(tuple(ids))


def ledger_of(model: LoadedModel) -> tuple[LoadedModel, Ledger]:
    """Returns a model with the tokenizer and template of `model` and no arithmetic, and its runner."""
    ledger = Ledger(model.card.vocab_size, model.card.context_length)
    return model._replace(runner=ledger), ledger  # type: ignore[arg-type]


def smollm2() -> LoadedModel:
    """Returns the real model; skips the test where it was not pulled."""
    return load_model(EngineConfig(model_path=str(smollm2_path()), threads=2))

"""Which model names are served and by whom.

The worker answers to its model's name, to what the operator called it, to configured aliases, to `magnitude`,
`default` and an empty name. An upstream takes the names of its map; one with `*`, or with an empty map, takes
every name. A name that nobody takes is a 404 that lists what is served.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from magnitude_engine import api
from magnitude_proxy.config import UpstreamConfig, WorkerConfig
from magnitude_proxy.errors import NotFound
from magnitude_proxy.wire.replies import ModelReply

ANY = "*"
GENERIC = ("magnitude", "default", "")


class Offer(NamedTuple):
    """Who may answer for a model's name.

    Attributes:
        refusal: why the worker does not although an upstream may; None when it does.
        upstreams: names of the upstreams that take it.
    """

    refusal: api.Failed | None
    upstreams: frozenset[str]


class Catalogue:
    """The names of one proxy; `card` gives the worker's model, None before it is known."""

    def __init__(
        self,
        worker: WorkerConfig,
        upstreams: Sequence[UpstreamConfig],
        card: Callable[[], api.ModelCard | None],
        started: int,
    ) -> None:
        """`started` (Unix seconds) is shown as the models' creation time."""
        self._worker = worker
        self._upstreams = tuple(upstreams)
        self._card = card
        self._started = started
        self._served: dict[tuple[str | None, tuple[str, ...]], str] = {}

    def local(self) -> tuple[str, ...]:
        """Returns the names of the worker's model, the listed one first; nothing without a worker."""
        worker = self._worker
        if worker.mode == "none":
            return ()
        names = [os.path.basename(worker.model.rstrip("/")), worker.model, *worker.aliases]
        if worker.engine is not None and worker.engine.model_name != "default":
            names.insert(0, worker.engine.model_name)
        card = self._card()
        if card is not None:
            names.insert(0, card.name)
        return tuple(dict.fromkeys(name for name in names if name != ANY))

    def listed(self, found: Mapping[str, Sequence[str]], only: str | None = None) -> tuple[ModelReply, ...]:
        """Returns the models as `GET /v1/models` lists them, the worker's first.

        `found` holds, by upstream, what servers without a map of names list themselves. Of the upstreams `only`
        counts, where it is given, here and below.
        """
        entries = [(name, "magnitude") for name in self.local()[:1]]
        for upstream in self._allowed(only):
            names = [*upstream.models] or found.get(upstream.name, ())
            entries += [(name, upstream.name) for name in names if name != ANY]
        unique: dict[str, str] = {}
        for name, owner in entries:
            unique.setdefault(name, owner)
        return tuple(ModelReply(id=name, created=self._started, owned_by=owner) for name, owner in unique.items())

    def find(self, name: str, found: Mapping[str, Sequence[str]], only: str | None = None) -> ModelReply:
        """Returns one model; raises NotFound."""
        for model in self.listed(found, only):
            if model.id == name:
                return model
        if name in self.local():
            return ModelReply(id=name, created=self._started, owned_by="magnitude")
        raise self._unknown(name, only)

    def offer(self, name: str, only: str | None = None) -> Offer:
        """Returns who may answer for `name`.

        Raises:
            NotFound: neither the worker nor any upstream takes the name.
        """
        served = self._worker.mode != "none" and (
            name in GENERIC or ANY in self._worker.aliases or name in self.local()
        )
        upstreams = frozenset(upstream.name for upstream in self._allowed(only) if takes(upstream, name))
        if served:
            return Offer(None, upstreams)
        unknown = self._unknown(name, only)
        if not upstreams:
            raise unknown
        refusal = api.Failed(request="", epoch=0, code=unknown.code, message=unknown.message, param="model")
        return Offer(refusal, upstreams)

    def shown(self, asked: str, local: bool) -> str:
        """Returns the model name for an answer: the worker's own, or what the client asked an upstream for."""
        names = self.local()
        return names[0] if names and (local or not asked) else asked

    def _allowed(self, only: str | None) -> tuple[UpstreamConfig, ...]:
        return tuple(upstream for upstream in self._upstreams if only in (None, upstream.name))

    def _unknown(self, name: str, only: str | None) -> NotFound:
        return NotFound(
            f"model {name[:128]!r} is not served here; served: {self._shown_names(only)}. "
            "Use one of these, or add the name with --model-alias or to an upstream's models",
            param="model",
            code="model_not_found",
        )

    def _shown_names(self, only: str | None) -> str:
        """Returns the names that are served; they change only with the worker's card."""
        key = (only, self.local())
        shown = self._served.get(key)
        if shown is None:
            shown = ", ".join(model.id for model in self.listed({}, only)) or "none"
            self._served[key] = shown
        return shown


def takes(upstream: UpstreamConfig, name: str) -> bool:
    """True when an upstream is asked for this name."""
    return not upstream.models or ANY in upstream.models or name in upstream.models

"""When a proposer that computes is considered: in every step, or now and then while nothing comes of it.

To know whether a pass of it is worth it takes how sure the model was of the last token, which is a look at all of its
probabilities. Where passes are never worth it, that alone would slow each step down.
"""

from __future__ import annotations

# Steps in which nothing was drafted until a proposer rests, and the steps of which it is considered in one.
PATIENCE, PERIOD = 64, 8


class Turn:
    """One proposer's turns, step by step."""

    def __init__(self) -> None:
        self._idle = 0

    @property
    def considers(self) -> bool:
        """Whether it is considered in this step."""
        return self._idle < PATIENCE or self._idle % PERIOD == PERIOD - 1

    @property
    def watches(self) -> bool:
        """Whether how sure the model is of this step's token is wanted, for this step's turn or the next."""
        return self.considers or self._idle % PERIOD == PERIOD - 2

    def take(self, drafted: bool) -> None:
        """A step has passed in which it drafted or not."""
        self._idle = 0 if drafted else self._idle + 1

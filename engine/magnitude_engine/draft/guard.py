"""One proposer's account: what it promised against what came, what it cost against what it earned.

Two things keep a proposer that does not pay from costing anything. What it promises is scaled by how its promises
were kept, so that it is soon offered for what it is worth. And it has a credit, counted in plain steps: it earns what
its accepted tokens would have taken, spends what drafting and verifying them took, and is given a small share of
every step; without credit it is not asked. So whatever it does, it can lose no more than its first credit, what it
earned before, and that share.
"""

from __future__ import annotations

from magnitude_engine.draft.tree import DraftTree

# The first credit and the most that can be saved up, in plain steps; the share of each step that is given.
GRANT, MOST, SHARE = 8.0, 64.0, 0.003
# Promised tokens after which older ones fade.
ENOUGH = 24
# A proposer that keeps less of its promises is scaled down to them, and tried as it stands now and then.
TRUSTED = 0.6
# Steps between two trials: after each that fails twice as many, up to the last.
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
# Tokens that are verified to see whether promises hold again.
TRIAL = 2
_MOST_CORRECTION = 1.25


class Guard:
    """Owned by the controller."""

    def __init__(self, grant: float = GRANT, most: float = MOST) -> None:
        self._credit = grant
        self._most = most
        self._promised = self._came = 1.0
        self._held = 0
        self._pause = FIRST_PAUSE
        self._trying = False

    @property
    def correction(self) -> float:
        """What share of its promises it keeps, up to 1.25."""
        return min(_MOST_CORRECTION, self._came / self._promised)

    def affords(self, steps: float) -> bool:
        """Returns whether it may spend what so many plain steps take."""
        return steps < self._credit

    def begin(self) -> None:
        """A step begins."""
        self._trying = False
        self._credit = min(self._most, self._credit + SHARE)

    def offer(self, tree: DraftTree) -> DraftTree:
        """Returns a draft as it is offered: with the probabilities that it deserves, or a little of it as a trial."""
        if not tree.tokens:
            return tree
        correction = self.correction
        if correction >= TRUSTED or not self.trial_due():
            return tree.scaled(correction)
        return tree.prune(TRIAL)

    def trial_due(self) -> bool:
        """Returns whether it is time to try it whatever it was worth; to be asked where it would be used."""
        self._held += 1
        if self._held < self._pause:
            return False
        self._held = 0
        self._trying = True
        return True

    def settle(self, promised: float, accepted: int, balance: float) -> None:
        """Takes in a step with drafts of it; `balance` is what it earned less what it spent, in plain steps."""
        self._credit = min(self._most, self._credit + balance)
        if self._trying:
            kept = accepted > 0 and 2 * accepted >= promised
            self._pause = FIRST_PAUSE if kept else min(2 * self._pause, LONGEST_PAUSE)
            if kept:
                self._promised = self._came = 1.0
            return
        self._promised += promised
        self._came += accepted
        if self._promised > ENOUGH:
            self._promised *= 0.75
            self._came *= 0.75

"""Which session a request goes on with where its own id does not say: what earlier requests show.

Three things are seen from the conversations that passed here:

- *Agents without an id.* Runs of one task begin with the same words, so that the fingerprint alone would take them for
  one session. A request goes on from the one whose messages it repeats; where somebody else did so before, or a run is
  begun anew, it is a session of its own. A history that was rewritten (compacted, cut) belongs to the run of the same
  beginning that was here last.
- *An id that is new at every call*, the commonest mistake. Two ids in a row that were used once each, where each
  conversation goes on from the one before, and a third that goes on from the second: from then on the calls are
  counted to the first id's session, so that its record, its pages and what is computed ahead stay together, and the
  agent is told (`Identity.advice`). An id that is used again is a session of its own at once: forks are never merged.
- *Sub-agents of sub-agents* belong to the session of the first agent.

Everything is this process's own, bounded, and needs no store: a store that is away changes nothing here. What was
forgotten makes a session of its own, or the fingerprint's. Answers never depend on it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_proxy.bounded import keep
from magnitude_proxy.identity import FINGERPRINT, MAIN_BRANCH, Identity, IdentityHints, fingerprint

LOOK_BACK = 64
MAX_TURNS = 20_000
MAX_SAME = 8
USED_ONCE = 2


@dataclass(slots=True, eq=False)
class _Turn:
    """A request as it was: whose it was, with which words, instructions and tools it began, what went on from it."""

    session: str
    start: str
    gone_on: bytes | None = None


@dataclass(slots=True, eq=False)
class _Line:
    """What is known of one client's id.

    Attributes:
        request: its first one; one that is sent again is no other call.
        calls: how often it was used.
        before: how many ids in a row before it were used once each, and `root` the session of the first of them.
    """

    request: bytes
    root: str
    calls: int = 1
    before: int = 0


@dataclass(slots=True, eq=False)
class _Start:
    """Runs that began with the same words: which was here last, and how many there were besides the first."""

    latest: str
    others: int = 0


class _Hit(NamedTuple):
    """The latest requests whose messages a request repeats, and how often the model spoke since."""

    turns: Sequence[_Turn]
    answers: int

    def likeliest(self, start: str) -> list[_Turn]:
        """Returns them, those first that began with the same instructions and tools, of these the latest first."""
        latest = tuple(reversed(self.turns))
        return [turn for alike in (True, False) for turn in latest if (turn.start == start) is alike]


class _Talk(NamedTuple):
    """A conversation as the digests of its beginnings up to each of the last messages, and how it goes on from there.

    Attributes:
        marks: the last one is of all messages.
        answers: for each mark, how often the model spoke behind it.
    """

    marks: tuple[bytes, ...]
    answers: tuple[int, ...]

    @property
    def whole(self) -> bytes:
        """All of it."""
        return self.marks[-1] if self.marks else b""


@dataclass(slots=True)
class Lineage:
    """Follows the conversations of all tenants. Not thread-safe.

    Args:
        limit: how many requests are remembered; half as many ids and beginnings.
    """

    limit: int = MAX_TURNS
    _turns: OrderedDict[bytes, list[_Turn]] = field(default_factory=OrderedDict)
    _lines: OrderedDict[str, _Line] = field(default_factory=OrderedDict)
    _starts: OrderedDict[str, _Start] = field(default_factory=OrderedDict)
    _children: OrderedDict[str, Identity] = field(default_factory=OrderedDict)

    def place(self, found: Identity, hints: IdentityHints) -> Identity:
        """Returns the identity under which a request counts; `found` is what it says itself."""
        found = self._rooted(found)
        if found.branch != MAIN_BRANCH or hints.text is not None:
            return found
        if found.source == FINGERPRINT:
            session = self._by_words(found, hints.messages)
            run = session if found.run == found.session else found.run
            return msgspec.structs.replace(found, session=session, run=run)
        return self._by_id(found, hints)

    def counted(self, session: str) -> str:
        """Returns the session that the calls of a client's id are counted to."""
        child = self._children.get(session)
        if child is not None:
            return child.session
        line = self._lines.get(session)
        return line.root if line is not None and line.before >= USED_ONCE else session

    def _rooted(self, found: Identity) -> Identity:
        """Returns a sub-agent as a branch of the session of the first agent."""
        known, own = self._children.get(found.session), found.own
        if own is None:
            if known is None:
                return found
            branch = known.branch if found.branch == MAIN_BRANCH else found.branch
            return msgspec.structs.replace(found, session=known.session, branch=branch, run=known.run)
        if known is not None:
            found = msgspec.structs.replace(found, session=known.session, run=known.run)
        keep(self._children, own, found, self.limit // 2)
        return found

    def _by_words(self, found: Identity, messages: Sequence[api.Message]) -> str:
        """Returns the session of an agent without an id."""
        start = found.session
        talk = _talk(found, messages)
        if not talk.marks:
            return start
        known = self._starts.get(start) or _Start(start)
        hit = self._hit(talk)
        if hit is not None and not talk.answers[0]:
            # A run begins: only the same instructions and tools make it the same one, sent again.
            hit = hit._replace(turns=[turn for turn in hit.turns if turn.start == start])
        session = known.latest if hit is None or not hit.turns else self._goes_on(hit, talk, start, known)
        known.latest = session
        keep(self._starts, start, known, self.limit // 2)
        self._note(talk.whole, _Turn(session, start))
        return session

    def _goes_on(self, hit: _Hit, talk: _Talk, start: str, known: _Start) -> str:
        """Returns the session that goes on here; a session of its own where another request did so already."""
        turns = hit.likeliest(start)
        free = [turn for turn in turns if turn.gone_on is None]
        if free:
            if not self._is(free[0], talk):
                free[0].gone_on = talk.whole
            return free[0].session
        if hit.answers > 1:
            return turns[0].session
        known.others += 1
        return hashlib.sha256(f"{start} {known.others}".encode()).hexdigest()[:32]

    def _is(self, turn: _Turn, talk: _Talk) -> bool:
        """Whether a request is the very same as the one before, sent again."""
        return any(turn is known for known in self._turns.get(talk.whole, ()))

    def _by_id(self, found: Identity, hints: IdentityHints) -> Identity:
        """Returns the identity of a client with an id, which counts unless ids are never used twice."""
        line = self._lines.get(found.session)
        if line is None:
            line = self._begun(found, hints)
        elif line.calls > 1 or _talk(found, hints.messages).whole != line.request:
            line.calls += 1
            line.root, line.before = found.session, 0
        keep(self._lines, found.session, line, self.limit // 2)
        if line.before < USED_ONCE:
            return found
        run = line.root if found.run == found.session else found.run
        return msgspec.structs.replace(found, session=line.root, run=run, advice=_advice(line.before + 1))

    def _begun(self, found: Identity, hints: IdentityHints) -> _Line:
        """Returns what is known of an id that is used for the first time."""
        talk = _talk(found, hints.messages)
        line = _Line(talk.whole, found.session)
        if talk.marks:
            turn = _Turn(found.session, fingerprint(hints))
            earlier = self._once(talk, turn.start)
            if earlier is not None:
                line.root, line.before = earlier.root, earlier.before + 1
            self._note(talk.whole, turn)
        return line

    def _once(self, talk: _Talk, start: str) -> _Line | None:
        """Returns the id that the request goes on from if it was used once and nothing else goes on from it."""
        hit = self._hit(_Talk(talk.marks[:-1], talk.answers[:-1]))
        for turn in [] if hit is None else hit.likeliest(start):
            line = self._lines.get(turn.session)
            if line is not None and line.calls == 1 and turn.gone_on in (None, talk.whole):
                turn.gone_on = talk.whole
                return line
        return None

    def _hit(self, talk: _Talk) -> _Hit | None:
        for mark, answers in zip(reversed(talk.marks), reversed(talk.answers), strict=True):
            turns = self._turns.get(mark)
            if turns:
                return _Hit(turns, answers)
        return None

    def _note(self, mark: bytes, turn: _Turn) -> None:
        turns = self._turns.get(mark, [])
        if not any(known.session == turn.session for known in turns):
            turns.append(turn)
        keep(self._turns, mark, turns[-MAX_SAME:], self.limit)


def _talk(found: Identity, messages: Sequence[api.Message]) -> _Talk:
    """Returns a conversation's digests, without the instructions at its beginning: some write the time into them.

    Conversations of different tenants, or of clients that name sessions in different ways, never look alike.
    """
    first = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    state = hashlib.blake2b(f"{found.tenant} {found.source}".encode(), digest_size=16)
    marks: deque[bytes] = deque(maxlen=LOOK_BACK)
    spoke: deque[int] = deque(maxlen=LOOK_BACK)
    answers, role = 0, ""
    for message in messages[first:]:
        state.update(msgspec.msgpack.encode(message))
        answers += message.role == "assistant" and role != "assistant"
        role = message.role
        marks.append(state.digest())
        spoke.append(answers)
    return _Talk(tuple(marks), tuple(answers - before for before in spoke))


def _advice(ids: int) -> str:
    return (
        f"unstable-session-id: {ids} session ids in a row were used for one call each; send the same id with every "
        "call of a run, or none"
    )

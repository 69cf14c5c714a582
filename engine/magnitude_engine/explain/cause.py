"""Why a prompt does not go on from an earlier one: two token sequences, their texts and messages → a cause.

What is looked at, in this order; the first difference decides, whatever else changed behind it:

    tools, reordered          the same definitions in another order, or with keys in another order
    a time, a random value    the texts around the first differing token say so
    tools, system prompt      added, removed, rewritten
    a message                 written in another form, dropped, summarised or cleared, or said differently
    nothing of these          the chat template shows the same conversation in another way
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_engine.explain.overlap import common_text
from magnitude_engine.explain.volatile import Change, volatile

# A message that lost more than half of this much text was cleared rather than corrected.
CLEARED_CHARS = 200
# How far a summary may be in front of the messages that were kept.
SUMMARY_MESSAGES = 3
LEAD_CHARS = 40
KEPT_MESSAGES = 2
_SUMMARY = re.compile(r"summar|compact|condens|previous conversation|continued from", re.IGNORECASE)


class Told(NamedTuple):
    """A prompt, and what was answered.

    Attributes:
        ids: of the prompt and of the answer, as far as they were computed; packed (`overlap.pack`).
        prompt: how many of them are the prompt's.
        messages: None for raw prompts, whose text is `text`.
        tools: each definition as JSON, keys as they came.
        answer: None where it is not known.
    """

    ids: bytes
    prompt: int
    messages: tuple[api.Message, ...] | None
    tools: tuple[bytes, ...] = ()
    text: str = ""
    answer: api.Message | None = None


class Cause(NamedTuple):
    """Why, and in which message."""

    name: api.MissCause
    message: int | None = None


UNSEEN = Cause("unseen")


def cause_of(before: Told, now: Told, change: Change) -> Cause | None:
    """Returns why `now` does not begin with all of the prompt of `before`; `UNSEEN` where it is another conversation.

    None where the client only added to its last message. `change` is the text around the first difference.
    """
    old, new = before.messages, now.messages
    if old is None and new is None:
        if before.text and now.text.startswith(before.text):
            return None
        edited = Cause("edited_history") if alike(before.text, now.text) else UNSEEN
        return _of_text(change, numbers=False) or edited
    if old is None or new is None:
        return Cause("template")
    place = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
    if before.tools != now.tools and not _in_system_text(old, new, place, change):
        return _of_tools(before, now, change)
    if place is not None:
        return _of_message(old, new, place, change)
    return _of_text(change, numbers=True) or (None if len(new) <= len(old) else Cause("template"))


def cause_of_answer(before: Told, now: Told) -> Cause | None:
    """Returns why `now`, which begins with all of the prompt of `before`, does not go on with its answer.

    That is a miss only where the client sends the answer back in another form; what else it sends is its own affair.
    """
    answer = before.answer
    following = (now.messages or ())[len(before.messages or ()) :]
    if answer is None or before.messages is None or not following or following[0] == answer:
        return None
    came_back = following[0].role == "assistant" and meaning(following[0]) == meaning(answer)
    same = _written(following[0]) == _written(answer)
    return Cause("reserialised", len(before.messages)) if came_back and not same else None


def same_conversation(one: Sequence[api.Message], other: Sequence[api.Message]) -> bool:
    """Whether both begin with the same words of the user."""
    first, second = _opening(one), _opening(other)
    return first is not None and first == second


def _opening(messages: Sequence[api.Message]) -> api.Message | None:
    return next((message for message in messages if message.role != "system"), None)


def _of_text(change: Change, numbers: bool, message: int | None = None) -> Cause | None:
    found = volatile(change, numbers)
    return None if found is None else Cause(found, message)


def _of_tools(before: Told, now: Told, change: Change) -> Cause:
    if len(before.tools) == len(now.tools) and (
        sorted(before.tools) == sorted(now.tools)
        or sorted(map(_sorted_keys, before.tools)) == sorted(map(_sorted_keys, now.tools))
    ):
        return Cause("tool_order")
    return _of_text(change, numbers=False) or Cause("tool_change")


def _sorted_keys(tool: bytes) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(tool), order="sorted")


def _in_system_text(old: Sequence[api.Message], new: Sequence[api.Message], place: int | None, change: Change) -> bool:
    """Whether, of tools and a system prompt that both differ, the system prompt's difference comes first."""
    if place != 0 or old[0].role != "system" or new[0].role != "system":
        return False
    one, other = old[0].content, new[0].content
    same = common_text(one, other)
    shared = one[max(0, same - LEAD_CHARS) : same]
    following = ((change.before, one), (change.now, other))
    return change.before[: change.at].endswith(shared) and all(
        text[change.at :].startswith(content[same : same + LEAD_CHARS]) for text, content in following
    )


def _of_message(old: Sequence[api.Message], new: Sequence[api.Message], place: int, change: Change) -> Cause | None:
    was, is_ = old[place], new[place]
    systems = (was.role, is_.role).count("system")
    found = _of_text(change, numbers=systems == 2, message=place)
    if found is not None:
        return found
    if was.role == is_.role and meaning(was) == meaning(is_):
        return Cause("reserialised", place)
    if systems:
        kept = sum(one == other for one, other in zip(old[place + 1 :], new[place + 1 :], strict=False))
        own = alike(was.content, is_.content) if systems == 2 else same_conversation(old, new)
        return Cause("system_change", place) if own or kept >= KEPT_MESSAGES else UNSEEN
    if place == len(old) - 1 and was.role == is_.role and not was.tool_calls and is_.content.startswith(was.content):
        # A prompt in one message that grows at its end.
        return None
    return _of_history(old, new, place)


def _of_history(old: Sequence[api.Message], new: Sequence[api.Message], place: int) -> Cause:
    was, is_ = old[place], new[place]
    if _moved_up(old, new, place):
        return Cause("compaction", place)
    if was is _opening(old) and not alike(was.content, is_.content):
        return Cause("compaction", place) if len(new) < len(old) and _SUMMARY.search(is_.content) else UNSEEN
    if len(new) < len(old) and not (place == len(new) - 1 and was.role == is_.role):
        return Cause("compaction", place)
    if was.role == is_.role and len(was.content) >= CLEARED_CHARS and 2 * len(is_.content) <= len(was.content):
        return Cause("compaction", place)
    return Cause("edited_history", place)


def _moved_up(old: Sequence[api.Message], new: Sequence[api.Message], place: int) -> bool:
    """Whether messages are gone before some that were kept, with a summary in their place or without."""
    return any(new[index] in old[index + 1 :] for index in range(place, min(place + SUMMARY_MESSAGES + 1, len(new))))


def _written(message: api.Message) -> tuple[str, tuple[str, ...]]:
    return message.content, tuple(call.arguments for call in message.tool_calls)


def meaning(message: api.Message) -> tuple[str, str, tuple[str, ...]]:
    """Returns what a message says whatever its white space and the form of its calls' JSON; ids are left out."""
    calls = tuple(f"{call.name}({_canonical(call.arguments)})" for call in message.tool_calls)
    return message.role, " ".join(message.content.split()), calls


def _canonical(text: str) -> str:
    try:
        value: Any = json.loads(text)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "".join(text.split())


def alike(one: str, other: str) -> bool:
    """Whether two texts begin and end so much alike that one is a version of the other."""
    ahead = common_text(one, other)
    behind = common_text(one[ahead:][::-1], other[ahead:][::-1])
    return 3 * (ahead + behind) >= max(len(one), len(other), 1)

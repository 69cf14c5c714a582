"""Text that is another at every step: times, and values that nobody means to say something with.

Both texts of a change begin with the same characters and differ at `at`. A time is one where a pattern covers that
place in both. A random value also has to be followed by the same text in both: otherwise it may be that somebody
says something else.
"""

from __future__ import annotations

import itertools
import re
from typing import Literal, NamedTuple

RESYNC_CHARS = 8
MIN_TURNS = 4

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?|Sat(?:urday)?|Sun(?:day)?)"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[A-Z]{2,4}T)\b|\s?[+-]\d{2}:?\d{2})?"
_TIME = rf"\d{{1,2}}:[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?{_ZONE}"
_AT = rf"(?:,?\s+(?:at\s+)?{_TIME})?"
_NTH = r"\d{1,2}(?:st|nd|rd|th)?"
_TIMESTAMP = re.compile(
    "|".join(
        (
            rf"(?<!\d)\d{{4}}-\d{{2}}-\d{{2}}(?:[T_ ]{_TIME})?(?!\d)",
            r"(?<!\d)\d{8}T\d{6}Z?(?!\d)",
            rf"(?<![\d./])(?:\d{{4}}[/.]\d{{1,2}}[/.]\d{{1,2}}|\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{4}})(?![\d/]){_AT}",
            rf"\b(?:{_DAY},?\s+)?{_MONTH}\s+{_NTH}\b{_AT}(?:,?\s+\d{{4}}\b)?{_AT}",
            rf"\b(?:{_DAY},?\s+)?{_NTH}\s+{_MONTH}(?:,?\s+\d{{4}}\b)?{_AT}",
            rf"\b{_DAY}\b{_AT}",
            rf"(?<![\d:.]){_TIME}(?![\d:])",
            r"(?<![\d.])(?:1[4-9]|2[0-3])\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?![\d.])",
        )
    )
)
_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_WORD = re.compile(rf"{_UUID}|[A-Za-z0-9_\-]{{6,}}")
_HEX = re.compile(r"(?=.*\d)(?=.*[a-fA-F])[0-9a-fA-F]{8,}")
_LONG = re.compile(r"\d{8,}")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Change(NamedTuple):
    """Two texts that are equal up to character `at`; the sides of a larger text around its first difference."""

    before: str
    now: str
    at: int


def volatile(change: Change, numbers: bool = False) -> Literal["timestamp", "nonce"] | None:
    """Returns what of this kind changed, None where it was something else; with `numbers`, counters are nonces too."""
    if _covering(_TIMESTAMP, change.before, change.at) and _covering(_TIMESTAMP, change.now, change.at):
        return "timestamp"
    for pattern in (_WORD, _NUMBER) if numbers else (_WORD,):
        one, other = _covering(pattern, change.before, change.at), _covering(pattern, change.now, change.at)
        if one is None or other is None or not _goes_on(change.before[one.end() :], change.now[other.end() :]):
            continue
        if pattern is _NUMBER or (_random(one[0]) and _random(other[0])):
            return "nonce"
    return None


def _covering(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """Returns the match that character `at` lies in, or that ends right before it."""
    touching = [match for match in pattern.finditer(text) if match.start() <= at <= match.end()]
    return touching[-1] if touching else None


def _goes_on(before: str, now: str) -> bool:
    """Whether both texts go on alike."""
    size = min(len(before), len(now), RESYNC_CHARS)
    return before[:size] == now[:size]


def _random(word: str) -> bool:
    """Whether a word looks drawn rather than chosen: a UUID, hexadecimal, many digits, or a mix that turns often."""
    if re.fullmatch(_UUID, word):
        return True
    return any(_LONG.fullmatch(part) or _HEX.fullmatch(part) or _turns(part) >= MIN_TURNS for part in _parts(word))


def _parts(word: str) -> list[str]:
    return re.split("[_-]", word)


def _turns(word: str) -> int:
    """Returns how often a word with digits in it changes between lower case, upper case and digits."""
    if not any(c.isdigit() for c in word):
        return 0
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in word]
    return sum(one != other for one, other in itertools.pairwise(kinds))

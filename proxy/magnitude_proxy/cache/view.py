"""A cache report as text: tiers, retention, sessions, and the prefixes as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from magnitude_engine import api
from magnitude_proxy.cache import tree

BAR_CELLS = 20
LEAST_WIDTH = 40
SESSION_CHARS = 12
NAME_CHARS = 24
STATES = ("waiting", "thinking", "ended")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
GAP = "  "

Row = tuple[str, ...]


class Limits(NamedTuple):
    """How much is shown; None is all of it.

    Attributes:
        depth: levels of the tree.
        children: runs below one run, and tenants.
        sessions: lines of sessions.
    """

    depth: int | None = None
    children: int | None = None
    sessions: int | None = None


SHORT = Limits(depth=6, children=8, sessions=20)


def render(report: api.CacheReport, width: int, limits: Limits = SHORT) -> str:
    """Returns `report` in lines of at most `width` characters (at least 40), each with its line end."""
    width = max(width, LEAST_WIDTH)
    used = report.pages_total - report.pages_free - report.pages_idle
    total = f"{report.pages_total:,} pages of {report.page_tokens} tokens"
    blocks = (
        [f"{total}: {used:,} in use, {report.pages_idle:,} kept, {report.pages_free:,} free"],
        _tiers(report.tiers, width),
        _retention(report),
        _sessions(report.sessions, limits.sessions),
        _prefixes(report.runs, width, limits),
    )
    text = "\n\n".join("\n".join(_clip(line, width) for line in block) for block in blocks if block)
    return text + "\n"


def size(count: int) -> str:
    """Returns a number of bytes in the largest unit that leaves at least 1, for example `1.5 GiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"


def duration(seconds: float) -> str:
    """Returns a time span in the unit that a person would choose, for example `41 s`."""
    for limit, scale, form in ((10, 1, "{:.1f} s"), (60, 1, "{:.0f} s"), (3600, 60, "{:.0f} min")):
        if seconds < limit:
            return form.format(seconds / scale)
    return f"{seconds / 3600:.1f} h" if seconds < 86_400 else f"{seconds / 86_400:.1f} d"


def _tiers(tiers: Sequence[api.TierUse], width: int) -> list[str]:
    """Returns the tiers' table with bars as wide as there is room."""
    head: Row = ("TIER", "BLOCKS", "SIZE", "TOKENS SERVED", "EVICTED", "REJECTED")
    rows: list[Row] = [
        (
            tier.name,
            f"{tier.blocks:,}",
            f"{size(tier.bytes)} of {size(tier.limit_bytes)}" if tier.limit_bytes else "off",
            f"{tier.tokens_served:,}",
            f"{tier.evicted:,}",
            f"{tier.rejected:,}",
        )
        for tier in tiers
    ]
    if not rows:
        return []
    cells = min(BAR_CELLS, width - len(_table(head, rows, (0, 2))[0]) - len(GAP))
    if cells > 0:
        head = (*head[:2], "", *head[2:])
        bars = [_bar(tier.bytes, tier.limit_bytes, cells) for tier in tiers]
        rows = [(*row[:2], bar, *row[2:]) for row, bar in zip(rows, bars, strict=True)]
    failed = [f"{tier.name}: {tier.failed_writes:,} writes failed" for tier in tiers if tier.failed_writes]
    return _table(head, rows, (0, 2, 3) if cells > 0 else (0, 2)) + failed


def _retention(report: api.CacheReport) -> list[str]:
    rates = (("learned", report.learned_hit_rate), ("lru", report.lru_hit_rate))
    rows = [(name, f"{rate * 100:.1f} %", "in force" if name == report.policy else "") for name, rate in rates]
    return _table(("RETENTION", "HIT RATE", ""), rows, (0, 2))


def _sessions(sessions: Sequence[api.SessionUse], limit: int | None) -> list[str]:
    """Returns the sessions' table: those that wait by when they are due, those at work, those that ended."""
    if not sessions:
        return []
    ordered = sorted(sessions, key=lambda one: (STATES.index(one.state), one.due_s is None, one.due_s or 0.0))
    shown = ordered[:limit]
    rows = [
        (
            one.session[:SESSION_CHARS],
            _name(one.branch),
            one.state,
            f"{one.tokens:,}",
            _name(one.tool),
            _due(one.due_s),
        )
        for one in shown
    ]
    lines = _table(("SESSION", "BRANCH", "STATE", "TOKENS", "WAITS FOR", "DUE"), rows, (0, 1, 2, 4, 5))
    hidden = len(ordered) - len(shown)
    return [*lines, f"… {hidden:,} more"] if hidden else lines


def _prefixes(runs: Sequence[api.CacheRun], width: int, limits: Limits) -> list[str]:
    """Returns the tree with its figures; of a label that is too long the end stays, which says what it is about."""
    head = ("PREFIXES", "PAGES", "IN USE", "IDLE", "SESSIONS")
    rows = [
        (
            line.label,
            f"{line.pages:,}",
            "" if line.in_use is None else f"{line.in_use:,}",
            "" if line.idle_s is None else duration(line.idle_s),
            "" if line.sessions is None else f"{line.sessions:,}",
        )
        for line in tree.lines(runs, limits.depth, limits.children)
    ]
    if not rows:
        return []
    figures = len(_table(head[1:], [row[1:] for row in rows], ())[0]) + len(GAP)
    room = max(width - figures, len(head[0]))
    cut = (label if len(label) <= room else "…" + label[1 - room :] for label, *_ in rows)
    return _table(head, [(label, *row[1:]) for label, row in zip(cut, rows, strict=True)], (0,))


def _name(text: str) -> str:
    """Returns a name that a client or a model chose, fit for a terminal."""
    plain = "".join(mark if mark.isprintable() else "?" for mark in text)
    return _clip(plain, NAME_CHARS)


def _due(due_s: float | None) -> str:
    if due_s is None:
        return ""
    return f"in {duration(due_s)}" if due_s >= 0 else f"{duration(-due_s)} ago"


def _bar(part: int, whole: int, cells: int) -> str:
    """Returns a bar of `cells` characters, empty where there is nothing to fill; what is not empty shows."""
    if whole <= 0:
        return ""
    full = min(cells, round(part / whole * cells))
    full = max(full, 1) if part > 0 else full
    return "█" * full + "░" * (cells - full)


def _table(head: Row, rows: Sequence[Row], left: Sequence[int]) -> list[str]:
    """Returns aligned lines; columns not in `left` are aligned to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = enumerate(zip(row, widths, strict=True))
        aligned = (f"{cell:<{wide}}" if at in left else f"{cell:>{wide}}" for at, (cell, wide) in cells)
        lines.append(GAP.join(aligned).rstrip())
    return lines


def _clip(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"

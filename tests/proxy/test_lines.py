"""Log lines that are written together: what waits, what does not, and that none is lost or out of order."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from magnitude_proxy import lines
from magnitude_proxy.lines import Lines


class Sink(io.StringIO):
    """Counts writes."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def logger(sink: Sink) -> logging.Logger:
    """Returns a logger of its own that writes to `sink`."""
    made = logging.Logger("test", logging.INFO)
    made.addHandler(Lines(sink))
    return made


async def test_lines_wait_for_each_other_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LATE_S", 0.01)
    sink = Sink()
    log = logger(sink)
    log.info("one")
    log.info("two %d", 2)
    assert sink.getvalue() == ""
    while not sink.writes:
        await asyncio.sleep(0.001)
    assert (sink.getvalue(), sink.writes) == ("one\ntwo 2\n", 1)


async def test_a_warning_takes_what_waits_with_it_at_once() -> None:
    sink = Sink()
    log = logger(sink)
    log.info("before")
    log.warning("trouble")
    assert (sink.getvalue(), sink.writes) == ("before\ntrouble\n", 1)
    log.info("after")
    log.handlers[0].flush()
    assert sink.getvalue() == "before\ntrouble\nafter\n"


async def test_no_more_than_a_few_hundred_wait() -> None:
    sink = Sink()
    log = logger(sink)
    for number in range(lines.MOST + 1):
        log.info("%d", number)
    assert sink.getvalue().count("\n") == lines.MOST
    log.handlers[0].flush()


def test_a_thread_without_a_loop_writes_at_once() -> None:
    sink = Sink()
    logger(sink).info("alone")
    assert sink.getvalue() == "alone\n"

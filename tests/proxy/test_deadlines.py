"""Deadlines of replies under one timer: which are told of, whatever comes in between."""

from __future__ import annotations

import asyncio

import pytest

from magnitude_proxy.store.deadlines import Deadlines

SOON_S = 0.01
LATER_S = 0.03


class Watch:
    """Deadlines whose overdue replies are gathered by name."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._names: dict[asyncio.Future[object], str] = {}
        self.deadlines = Deadlines(self._overdue)
        self.told: list[str] = []
        self.last = asyncio.Event()

    def reply(self, name: str, seconds: float) -> asyncio.Future[object]:
        reply: asyncio.Future[object] = self._loop.create_future()
        self._names[reply] = name
        self.deadlines.watch(reply, self._loop.time() + seconds)
        return reply

    def _overdue(self, reply: asyncio.Future[object], deadline: float) -> None:
        self.told.append(self._names[reply])
        if self._names[reply] == "last":
            self.last.set()


async def test_what_is_there_is_not_told_of_and_hides_nobody_behind_it() -> None:
    watch = Watch()
    first = watch.reply("answered", SOON_S)
    watch.reply("silent", SOON_S)
    cancelled = watch.reply("cancelled", SOON_S)
    watch.reply("last", LATER_S)
    first.set_result(1)
    cancelled.cancel()
    await watch.last.wait()
    assert watch.told == ["silent", "last"]


async def test_one_whose_deadline_is_before_the_others_is_told_of_first() -> None:
    watch = Watch()
    watch.reply("last", LATER_S)
    watch.reply("sent again", SOON_S)
    await watch.last.wait()
    assert watch.told == ["sent again", "last"]


@pytest.mark.thorough
async def test_deadlines_go_on_after_all_were_answered() -> None:
    watch = Watch()
    for _ in range(3):
        watch.reply("answered", SOON_S).set_result(1)
        await asyncio.sleep(SOON_S * 2)
    watch.reply("last", SOON_S)
    await watch.last.wait()
    assert watch.told == ["last"]


async def test_nothing_is_told_of_once_cleared() -> None:
    watch = Watch()
    watch.reply("forgotten", SOON_S)
    watch.deadlines.clear()
    watch.reply("last", LATER_S)
    await watch.last.wait()
    assert watch.told == ["last"]

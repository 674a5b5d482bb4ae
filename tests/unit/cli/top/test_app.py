"""The terminal, driven as by a user, before a server that answers over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from threading import Event
from typing import Any

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from aegis.admin_client import AdminClient
from aegis.cli.top.app import Top
from aegis.core.errors import UserError
from aegis.telemetry.live_view import Live, SeenUntil
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import keyring
from tests.unit.proxy.http.watched import WatchedMarket

WITHIN_S = 20.0


class Counting(AdminClient):
    answers = 0

    def live(self, seen: SeenUntil) -> Live:
        answer = super().live(seen)
        Counting.answers += 1
        return answer


def driven(market: WatchedMarket, work: Callable[[Top, Pilot[Any]], Awaitable[None]], **settings: Any) -> None:
    with serving(market, **settings) as url:

        async def main() -> None:
            app = Top(Counting(url), url, 0.2)
            async with app.run_test(size=(120, 40)) as pilot:
                await work(app, pilot)

        asyncio.run(main())


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await pilot.pause(0.05)


def cells(app: Top, table: str) -> list[list[str]]:
    shown = app.query_one(f"#{table}", DataTable)
    return [[getattr(cell, "plain", cell) for cell in shown.get_row(key)] for key in shown.rows]


def head(app: Top) -> str:
    return str(app.query_one("#head", Static).render())


def test_instances_and_models_are_shown_and_renewed() -> None:
    async def work(app: Top, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: len(cells(app, "models")) == 3 and "live" in head(app))
        assert [row[:4] for row in cells(app, "instances")] == [
            [name, "mixed", "up", "● model-0"] for name in ("mixed-0", "mixed-1")
        ]
        assert cells(app, "models")[1][:3] == ["● model-1", "ready", "cached"]
        assert "52MiB of 256MiB" in str(app.query_one("#memory", Static).render())
        before = head(app)
        await until(pilot, lambda: head(app) != before)

    driven(WatchedMarket(3), work)


def test_keys_pause_sort_and_quit() -> None:
    async def work(app: Top, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "live" in head(app))
        await pilot.press("p")
        assert "paused" in head(app)
        await pilot.press("s")
        assert "tokens/s" in str(app.query_one("#models-title", Static).render())
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    driven(WatchedMarket(3), work)


def test_ctrl_c_quits_too() -> None:
    async def work(app: Top, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "live" in head(app))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)

    driven(WatchedMarket(3), work)


def test_who_quits_does_not_wait_for_a_server_that_hangs() -> None:
    """Nor is it asked again before it has answered, which takes a connection each time."""
    asked, over = list[SeenUntil](), Event()

    class Hanging(AdminClient):
        def live(self, seen: SeenUntil) -> Live:
            asked.append(seen)
            over.wait(10 * WITHIN_S)
            raise UserError("it hung")

    async def main() -> None:
        app = Top(Hanging("http://u"), "http://u", 0.05)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: bool(asked))
            await pilot.pause(0.3)

    began_s = time.monotonic()
    asyncio.run(main())
    assert len(asked) == 1
    assert time.monotonic() - began_s < WITHIN_S
    over.set()


def test_an_answer_that_comes_while_it_quits_is_passed_over() -> None:
    """The screen is empty by then, and the last request under way."""

    async def work(app: Top, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "live" in head(app))
        await app.screen.remove_children()
        before = Counting.answers
        await until(pilot, lambda: Counting.answers > before + 1)

    driven(WatchedMarket(3), work)


def test_a_server_that_refuses_or_is_away_is_told_of() -> None:
    async def work(app: Top, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "send the admin key" in head(app))

    driven(WatchedMarket(1), work, keys=keyring(admin="s3cret"))
    market = WatchedMarket(1)

    async def come_back(app: Top, pilot: Pilot[Any]) -> None:
        market.broken = True
        await until(pilot, lambda: "trying again" in head(app))
        market.broken = False
        await until(pilot, lambda: "live" in head(app))

    driven(market, come_back)

"""The dashboard of a server that works: what it shows moves, and what it asks is answered."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import CHROMIUM, NO_BROWSER, chromium, opened, wait_until
from tests.live.market import MARKET
from tests.live.server import ROOT, Server, eventually

PROMPT, LONG_TOKENS, MOST_TOKENS = "Tell me a story.", 80, 100  # at a reader's pace ten seconds
WAIT_MS = 60_000
PICTURE = "document.querySelector('#lanes canvas').toDataURL()"
WHEN = """() => {
  for (const column of document.querySelectorAll(".column")) {
    column.times = [];
    const seen = new MutationObserver(() => column.times.push(performance.now()));
    seen.observe(column.querySelector(".answer"), { childList: true });
  }
}"""
TIMES = "[...document.querySelectorAll('.column')].map(({ times }) => [times[0], times.at(-1), times.length])"


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Each model is asked something, again and again."""
    over = threading.Event()

    def ask(model: str) -> None:
        while not over.is_set():
            server.post("/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True})

    threads = [threading.Thread(target=ask, args=(model,)) for model in MARKET]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def talkative(server: Server) -> list[str]:
    """Models that have so much to say to the prompt that no turn is long enough for it."""

    def tokens(model: str) -> int:
        body = {"model": model, "prompt": PROMPT, "max_tokens": MOST_TOKENS, "temperature": 0}
        said: int = server.post("/v1/completions", body).json()["usage"]["completion_tokens"]
        return said

    return [model for model in MARKET if tokens(model) >= LONG_TOKENS]


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    with chromium() as browser, opened(browser, f"{server.url}/dashboard") as shown:
        shown.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        expect(shown.locator("#connection-text")).to_have_text("Live")
        yield shown


@pytest.mark.long
def test_the_timeline_moves_while_a_load_runs(server: Server, page: Page) -> None:
    with load(server):
        expect(page.locator("#timeline-empty")).to_be_hidden()
        seen = {page.evaluate(PICTURE)}
        for _ in range(3):
            wait_until(page, f"(seen) => !seen.includes({PICTURE})", list(seen))
            seen.add(page.evaluate(PICTURE))
        for instance in ("prefill-0", "decode-0"):
            lane = page.locator("#lanes .lane").filter(has_text=instance)
            expect(lane.locator(".now")).to_have_text(re.compile("|".join(MARKET)))
        expect(page.locator(".tile").filter(has_text="Switches per minute").locator(".big")).not_to_have_text("0")
        canvas = page.locator("#lanes .lane").filter(has_text="decode-0").locator("canvas")
        canvas.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#tip .why")).to_have_text(re.compile("has the turn|goes on"))
        page.keyboard.press("End")


@pytest.mark.long
def test_two_models_answer_at_once_in_the_playground(server: Server, page: Page) -> None:
    pair = talkative(server)[:2]
    assert len(pair) == 2
    while page.locator(".column").count():
        page.locator(".column button").first.click()
    for model in pair:
        page.select_option("#add-model", model)
    page.locator("[name=most]").fill(str(MOST_TOKENS))
    page.evaluate(WHEN)
    page.get_by_role("button", name="Ask").click()
    for model in pair:
        expect(page.locator(".column").filter(has_text=model).locator(".note")).to_contain_text("a second")
    (first, last, pieces), (other_first, other_last, others) = page.evaluate(TIMES)
    assert pieces > 1 and others > 1
    assert first < other_last and other_first < last


def test_the_grafana_dashboard_asks_for_what_there_is(server: Server) -> None:
    """While models are asked: of a shape that has no slab nothing is told."""
    panels = json.loads((Path(ROOT) / "configs/grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"(?:aegis:|process_)\w+", query)}
    assert len(queries) > 40

    def all_there() -> bool:
        known = set(re.findall(r"^# TYPE (\S+)", server.get("/metrics").text, re.MULTILINE))
        return all(name in known or re.sub("_bucket$", "", name) in known for name in asked)

    with load(server):
        eventually(all_there, "every metric that a panel asks for")

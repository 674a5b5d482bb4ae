"""The real browser that pages are tested in."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Browser, Page, sync_playwright

from tests.live.server import eventually

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no Chromium here; on Debian: apt-get install chromium"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
LOOKS = [(PHONE, "light"), (PHONE, "dark"), (DESK, "light"), (DESK, "dark")]
CONTRAST = """() => {
  const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parsed(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
  };
  const texts = "h1, h2, p, a, code, td, th, li, summary, figcaption, caption, button, .name, .plot text, "
    + "label > span, legend, dt, dd, strong";
  return [...document.querySelectorAll(texts)]
    .map((node) => {
      const style = getComputedStyle(node), front = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
      const [a, b] = [light(parsed(front)), light(behind(node))].sort((x, y) => y - x);
      return { node: node.outerHTML.slice(0, 80), contrast: (a + 0.05) / (b + 0.05) };
    })
    .filter(({ contrast }) => contrast < 4.5);
}"""
"""The texts that do not stand out from what is behind them (WCAG 2.2, 1.4.3)."""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(browser: Browser, url: str, look: tuple[Any, str] = LOOKS[2], may_log: str = "") -> Iterator[Page]:
    """A page that asks no host but its own, and logs nothing but what it may."""
    viewport, scheme = look
    context = browser.new_context(viewport=viewport, color_scheme=scheme, has_touch=viewport is PHONE)  # type: ignore[arg-type]
    page, wrong, home = context.new_page(), list[str](), urljoin(url, "/")
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(home) else wrong.append(asked.url))
    page.goto(url)
    yield page
    context.close()
    said = [text for text in wrong if not (may_log and re.search(may_log, text))]
    assert said == [], said


def wait_until(page: Page, expression: str, arg: object = None) -> None:
    """Until it is true in the page. Playwright's own `wait_for_function` evaluates it there, which the page's policy
    forbids where it is not true at once."""
    eventually(lambda: page.evaluate(expression, arg), expression)

"""The page in a real browser, as wide as a telephone and as a desk, by day and by night."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from bench.report.folder import Folder, read
from bench.report.page import page
from bench.report.run import Run
from tests.browser import CHROMIUM, CONTRAST, DESK, NO_BROWSER, PHONE, chromium
from tests.long_forms import first_of
from tests.unit.bench.report.made import fill, simulated, span

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("results")
    fill(folder)
    file = folder / "report.html"
    file.write_text(page(read(folder)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(params=first_of(1, [(PHONE, "dark"), (DESK, "light"), (PHONE, "light"), (DESK, "dark")]), ids=str)
def opened(browser: Browser, address: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that logs nothing and asks for nothing."""
    viewport, scheme = request.param
    context = browser.new_context(viewport=viewport, color_scheme=scheme, has_touch=viewport is PHONE)
    shown, wrong = context.new_page(), []
    shown.on("console", lambda message: wrong.append(message.text))
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("request", lambda asked: wrong.append(asked.url) if asked.url.startswith("http") else None)
    shown.goto(address)
    shown.wait_for_selector(".timeline[data-ready]")
    yield shown
    context.close()
    assert wrong == []


def test_nothing_is_wider_than_the_screen(opened: Page) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.evaluate("[...document.querySelectorAll('svg.plot')].every((plot) => plot.clientWidth > 280)")


def test_all_texts_stand_out_from_what_is_behind_them(opened: Page) -> None:
    assert opened.evaluate(CONTRAST) == []


def test_pictures_have_texts_and_controls_have_names(opened: Page) -> None:
    pictures = opened.locator("[role=img]")
    assert pictures.count() >= 8
    assert all(len(picture.get_attribute("aria-label") or "") > 20 for picture in pictures.all())
    assert opened.get_by_role("button", name="Closer").count() == 1
    ids = [each.get_attribute("id") for each in opened.locator("[id]").all()]
    assert len(set(ids)) == len(ids)


def test_the_schedule_is_drawn_and_told(opened: Page) -> None:
    colours = opened.evaluate("""() => {
      const { width, height } = document.querySelector("canvas");
      const drawn = document.querySelector("canvas").getContext("2d").getImageData(0, 0, width, height);
      return new Set(new Uint32Array(drawn.data.buffer)).size;
    }""")
    assert colours > 8
    step = next(each for each in simulated().spans if each.instance == "decode-0" and each.kind == "decode")
    opened.locator("canvas").scroll_into_view_if_needed()
    opened.evaluate("([from, to]) => document.querySelector('.timeline').timeline.move(from, to)", around(step))
    box = opened.locator("canvas").bounding_box()
    assert box
    names = opened.evaluate("document.querySelector('.timeline').timeline.data.instances.map((it) => it.name)")
    row = names.index("decode-0")
    opened.mouse.move(box["x"] + 74 + (box["width"] - 74) / 2, box["y"] + 22 + 38 * row + 8)
    told = opened.locator(".tip").inner_text()
    assert f"decode-0: decode {step.model}" in told and f"batch {step.requests}, {step.steps} steps" in told
    assert f"{step.model} has the turn" in told and told.endswith(simulated().reasons.line(step))
    tip = opened.locator(".tip").bounding_box()
    assert tip and tip["x"] >= 0 and tip["x"] + tip["width"] <= opened.viewport_size["width"]  # type: ignore[index]


@pytest.mark.long
def test_what_ran_on_a_part_of_the_device_has_that_part_of_the_row(browser: Browser, tmp_path: Path) -> None:
    spans = [span("decode", 0, 10, share=400), span("prefill", 0, 10, lane=1, share=600)]
    file = tmp_path / "report.html"
    file.write_text(page(Folder("one", (Run("one", spans),), (), (), {}, ())), encoding="utf-8")
    shown = browser.new_page(viewport=DESK)  # type: ignore[arg-type]
    shown.goto(file.as_uri())
    shown.wait_for_selector(".timeline[data-ready]")
    shown.locator("canvas").scroll_into_view_if_needed()
    box = shown.locator("canvas").bounding_box()
    assert box
    told = []
    for y in (3, 12):
        shown.mouse.move(box["x"] + 74 + (box["width"] - 74) / 2, box["y"] + 22 + y)
        told.append(shown.locator(".tip").inner_text())
    assert "decode" in told[0] and "on 40 % of the device" in told[0]
    assert "prefill" in told[1] and "on 60 % of the device" in told[1]
    shown.close()


def test_keys_and_buttons_move_the_schedule(opened: Page) -> None:
    window = "(() => { const it = document.querySelector('.timeline').timeline; return [it.from, it.to]; })()"
    whole = opened.evaluate(window)
    opened.get_by_role("button", name="Closer").click()
    closer = opened.evaluate(window)
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 2)
    opened.locator("canvas").focus()
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate(window)[0] > closer[0]
    opened.keyboard.press("0")
    assert opened.evaluate(window) == whole


def around(step: object) -> tuple[float, float]:
    """A little more than the span, which is then in the middle."""
    run = simulated()
    start_us, stop_us = (step.start_ns - run.start_ns) / 1e3, (step.stop_ns - run.start_ns) / 1e3  # type: ignore[attr-defined]
    margin_us = (stop_us - start_us) / 10 + 200
    return start_us - margin_us, stop_us + margin_us

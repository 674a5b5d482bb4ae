"""The dashboard in a real browser, as wide as a telephone and as a desk, by day and by night."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from aegis.telemetry.history import History
from tests.browser import CHROMIUM, CONTRAST, LOOKS, NO_BROWSER, chromium, opened, wait_until
from tests.live.server import eventually
from tests.long_forms import first_of
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import keyring, pooling_market, says
from tests.unit.proxy.http.watched import WHY, WatchedMarket

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)

STORY = "Once upon a time."
APART = """async () => {
  const { LIGHT, DARK } = await import("/dashboard/colours.js");
  const linear = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16) / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const times = (rows, v) => rows.map((row) => row.reduce((sum, each, at) => sum + each * v[at], 0));
  const oklab = (rgb) => times([[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.808675766]], times([[0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]],
    rgb.map((c) => Math.min(Math.max(c, 0), 1))).map(Math.cbrt));
  // As people with normal sight, deuteranopia, protanopia and tritanopia see them (Machado and others, 2009).
  const eyes = [[[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]];
  const least = (colours) => Math.min(...eyes.flatMap((eye) => {
    const seen = colours.map((colour) => oklab(times(eye, linear(colour))));
    return seen.flatMap((a, at) => seen.slice(at + 1).map((b) => Math.hypot(...a.map((each, k) => each - b[k]))));
  }));
  return [least(LIGHT), least(DARK)];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def market() -> WatchedMarket:
    return WatchedMarket(5, says(STORY))


@pytest.fixture(scope="module")
def url(market: WatchedMarket) -> Iterator[str]:
    with serving(market) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str, look: tuple[Any, str]) -> Iterator[Page]:
    with opened(browser, f"{url}/dashboard", look) as shown:
        expect(shown.locator("body")).to_have_attribute("data-state", "live")
        expect(shown.locator("#model-rows tr")).to_have_count(5)
        yield shown


in_all_looks = pytest.mark.parametrize("look", first_of(2, [*LOOKS[1:3], LOOKS[0], LOOKS[3]]), ids=str)
on_both_screens = pytest.mark.parametrize("look", first_of(1, LOOKS[1:3]), ids=str)


COLOURS_DRAWN = """(() => {
  const canvas = document.querySelector("#lanes canvas");
  if (!canvas?.width || !canvas.height) return 0;
  const copy = Object.assign(document.createElement("canvas"), {width: canvas.width, height: canvas.height});
  const context = copy.getContext("2d", {willReadFrequently: true});  // the browser logs if it is read more than once
  context.drawImage(canvas, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
})()"""  # of the first instance


@in_all_looks
def test_nothing_is_wider_than_the_screen(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@in_all_looks
def test_all_texts_stand_out_from_what_is_behind_them(page: Page) -> None:
    assert page.evaluate(CONTRAST) == []


@on_both_screens
def test_controls_and_pictures_have_names(page: Page) -> None:
    for role in ("button", "img", "textbox", "spinbutton", "combobox"):
        for each in page.get_by_role(role).all():  # type: ignore[arg-type]
            named = "(it) => it.ariaLabel || it.textContent || it.labels?.length ? '' : it.outerHTML"
            assert each.evaluate(named) == ""
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((it) => it.id)")
    assert len(set(ids)) == len(ids)


@on_both_screens
def test_the_timeline_moves_and_says_why(page: Page) -> None:
    expect(page.locator("#lanes .lane")).to_have_count(2)
    wait_until(page, f"{COLOURS_DRAWN} > 4")
    picture = "document.querySelector('#lanes canvas').toDataURL()"
    before = page.evaluate(picture)
    wait_until(page, f"(before) => {picture} !== before", before)
    canvas = page.locator("#lanes canvas").first
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    tip = page.locator("#tip")
    expect(tip).to_contain_text(WHY)
    expect(tip).to_contain_text(re.compile(r"model-\d: (decode|prefill)"))
    box = tip.bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]  # type: ignore[index]
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("End")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "false")
    expect(tip).to_be_hidden()


@pytest.mark.long
def test_what_runs_on_a_part_of_a_device_has_that_part_of_the_row(browser: Browser) -> None:
    def told(page: Page, y: int) -> str:
        """Of what runs there, which is not all of the time."""
        box = eventually(page.locator("#lanes canvas").first.bounding_box, "it is there")
        for x in range(100, 200, 2):
            page.mouse.move(box["x"] + box["width"] - x, box["y"] + y)
            text = page.locator("#tip").inner_text()
            if "of the device" in text:
                return text
        raise AssertionError(f"nothing runs on a part of the device at {y}")

    with (
        serving(WatchedMarket(3, says(STORY), divided=True)) as address,
        opened(browser, f"{address}/dashboard", LOOKS[2]) as page,
    ):
        wait_until(page, f"{COLOURS_DRAWN} > 4")
        page.locator("#pause").click()
        assert re.search(r"model-\d: decode[\s\S]*on 60 % of the device", told(page, 8))
        assert re.search(r"model-\d: prefill[\s\S]*99 tokens · on 40 % of the device", told(page, 28))


@on_both_screens
def test_models_are_told_with_what_they_do(page: Page) -> None:
    row = page.locator("#model-rows tr").first
    expect(row).to_contain_text("model-0")
    expect(row.locator(".met")).to_contain_text("93.8 %")
    page.get_by_role("button", name="model-1", exact=True).click()
    expect(page.locator("#only")).to_contain_text("Only model-1")
    page.get_by_role("button", name="Show all models").click()
    expect(page.locator("#only")).to_be_hidden()


@on_both_screens
def test_every_column_of_the_models_can_be_seen(page: Page) -> None:
    column = page.get_by_role("button", name="First token")
    column.scroll_into_view_if_needed()
    box = column.bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]  # type: ignore[index]


@on_both_screens
def test_medians_of_first_tokens_say_of_how_long_they_are(page: Page) -> None:
    expect(page.locator("#summary dt").nth(3)).to_have_text("First token, 1 min")
    expect(page.locator("#models thead th").nth(4)).to_have_text("First token, 5 min")


@on_both_screens
def test_memory_is_told_in_squares_and_words(page: Page) -> None:
    first = page.locator("#devices .group canvas").first
    expect(first).to_have_attribute("aria-label", re.compile("weights of model-0 6 MiB.*KV 6 MiB"))
    expect(page.locator("#devices h3")).to_contain_text("52 MiB of 256 MiB held")
    expect(page.locator("#shapes tr")).to_have_count(4)


@on_both_screens
def test_several_models_answer_side_by_side(page: Page) -> None:
    page.select_option("#add-model", "model-3")
    expect(page.locator(".column")).to_have_count(3)
    page.get_by_label("Remove model-1").click()
    page.get_by_role("button", name="Ask").click()
    for model in ("model-0", "model-3"):
        column = page.locator(".column").filter(has_text=model)
        expect(column.locator(".answer")).to_have_text(STORY)
        expect(column.locator(".note")).to_contain_text(f"{len(STORY)} tokens")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_only_models_that_generate_are_in_the_playground(browser: Browser) -> None:
    with serving(pooling_market()) as address, opened(browser, f"{address}/dashboard") as page:
        expect(page.locator("#model-rows tr")).to_have_count(3)
        expect(page.locator("#columns strong")).to_have_text(["m"])
        expect(page.locator("#add-model option")).to_have_text(["Add a model…"])


@pytest.mark.long
def test_the_theme_is_kept(browser: Browser, url: str) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, f"{url}/dashboard") as page:
        light = page.evaluate(back)
        for _ in range(2):
            page.locator("#theme").click()
        dark = page.evaluate(back)
        assert dark != light
        page.reload()
        assert page.evaluate(back) == dark


def test_colours_stay_apart_for_all_eyes(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/dashboard") as page:
        assert min(page.evaluate(APART)) > 0.075


@pytest.mark.long
def test_many_models_can_be_found(browser: Browser) -> None:
    with serving(WatchedMarket(300)) as url, opened(browser, f"{url}/dashboard") as page:
        expect(page.locator("#models-note")).to_contain_text("200 more")
        page.locator("#filter").fill("model-299")
        expect(page.locator("#model-rows tr")).to_have_count(1)
        seats = page.evaluate("""async () => {
          const { colour, texture } = await import("/dashboard/colours.js");
          return new Set(Array.from({ length: 48 }, (_, seat) => colour(seat) + texture(seat))).size;
        }""")
        assert seats == 48


def test_a_server_without_work_and_without_models_says_so(browser: Browser) -> None:
    with serving(WatchedMarket(0)) as url, opened(browser, f"{url}/dashboard") as page:
        expect(page.locator("#timeline-empty")).to_be_visible()
        expect(page.locator("#models-note")).to_contain_text("No model is served yet")


@pytest.mark.long
def test_what_says_that_nothing_ran_covers_no_instance_on_a_phone(browser: Browser) -> None:
    with serving(WatchedMarket(0)) as url, opened(browser, f"{url}/dashboard", LOOKS[0]) as page:
        told = page.locator("#timeline-empty")
        expect(told).to_be_visible()
        names = page.locator(".lane-name")
        expect(names).to_have_count(2)
        boxes = [each.bounding_box() for each in (told, *names.all())]
        for box in boxes[1:]:
            assert boxes[0] and box and boxes[0]["y"] >= box["y"] + box["height"]


def test_a_server_that_is_away_is_waited_for(browser: Browser) -> None:
    market = WatchedMarket(2)
    with serving(market) as url, opened(browser, f"{url}/dashboard", may_log="500") as page:
        expect(page.locator("#connection-text")).to_have_text("Live")
        market.broken = True
        expect(page.locator("#banner")).to_contain_text("Trying again in")
        expect(page.locator("#connection-text")).to_have_text("Reconnecting")
        market.broken = False
        page.get_by_role("button", name="Try now").click()
        expect(page.locator("#connection-text")).to_have_text("Live")
        expect(page.locator("#banner")).to_be_hidden()


@pytest.mark.long
def test_another_start_of_the_server_begins_anew(browser: Browser) -> None:
    market = WatchedMarket(2)
    with serving(market) as url, opened(browser, f"{url}/dashboard") as page:
        expect(page.locator(".tile").nth(1)).to_contain_text(re.compile(r"\d,\d+ since the start"))
        expect(page.locator("#timeline-empty")).to_be_hidden()
        market.start, market.tallies, market.names = 2, {}, []
        market.past = History(spans=1, records=1, decisions=1, token_times=False)
        expect(page.locator(".tile").nth(1)).to_contain_text("0 since the start")
        expect(page.locator("#timeline-empty")).to_be_visible()


def test_a_key_is_asked_for_and_sent(browser: Browser) -> None:
    with (
        serving(WatchedMarket(2), keys=keyring(admin="s3cret")) as url,
        opened(browser, f"{url}/dashboard", may_log="401") as page,
    ):
        expect(page.locator("#key-why")).to_contain_text("send the admin key")
        page.locator("#key-field").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-why")).to_contain_text("That was not the key")
        page.locator("#key-field").fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#connection-text")).to_have_text("Live")
        page.reload()
        expect(page.locator("#connection-text")).to_have_text("Live")


@pytest.mark.long
def test_who_may_not_see_it_is_told_why_and_may_give_a_key(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/dashboard", may_log="403") as page:
        expect(page.locator("#connection-text")).to_have_text("Live")
        page.set_extra_http_headers({"x-forwarded-for": "192.0.2.1"})
        expect(page.locator("#banner")).to_contain_text("for the server's own machine only")
        page.get_by_role("button", name="Use a key").click()  # while it is refused: the button goes with the refusal
        page.set_extra_http_headers({})
        page.locator("#key-field").fill("any")
        page.keyboard.press("Enter")
        expect(page.locator("#connection-text")).to_have_text("Live")

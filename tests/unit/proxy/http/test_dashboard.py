"""The dashboard's files and what they ask for."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
import pytest

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.live_view import Live
from aegis.telemetry.spans import Span, SpanKind
from tests.unit.proxy.http.scripted import calling, get, keyring, market

FOLDER = Path(__file__).parents[4] / "proxy/http/dashboard"
FILES = sorted(file.name for file in FOLDER.iterdir() if file.suffix in (".css", ".html", ".js", ".svg"))


def test_the_page_is_there() -> None:
    reply = get(market(), "/dashboard")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text == (FOLDER / "index.html").read_text()


def test_the_bare_address_leads_to_the_page_also_where_keys_are_asked_for() -> None:
    reply = calling(market(), lambda client: client.get("/", follow_redirects=True), keys=keyring(alice="sk-alice"))
    assert (reply.status_code, reply.url.path) == (200, "/dashboard")


@pytest.mark.parametrize("name", FILES)
def test_every_part_is_there_and_may_use_nothing_but_this_server(name: str) -> None:
    reply = get(market(), f"/dashboard/{name}")
    assert reply.content == (FOLDER / name).read_bytes()
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[each] for each in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_what_has_not_changed_is_not_sent_again() -> None:
    first = get(market(), "/dashboard/app.js")
    again = get(market(), "/dashboard/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["none.js", "__init__.py", "..%2fapp.py", "%2e%2e/edge.py", "/etc/passwd"])
def test_nothing_else_is(name: str) -> None:
    assert get(market(), f"/dashboard/{name}").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|[\"'(]//\w", text)


def span(number: int) -> Span:
    return Span(InstanceId("decode-0"), SpanKind.DECODE, ModelId("m"), number, number + 1, 2, 3, 4)


def test_the_live_answer_goes_on_where_the_last_ended() -> None:
    behind = market()
    behind.past.spans.add(map(span, range(3)))
    first = msgspec.json.decode(get(behind, "/debug/live").content, type=Live)
    assert (first.news.spans, first.models[0].tally.model) == ([span(0), span(1), span(2)], "m")
    behind.past.spans.add([span(3)])
    reply = get(behind, "/debug/live", params=msgspec.to_builtins(first.news.seen))
    assert msgspec.json.decode(reply.content, type=Live).news.spans == [span(3)]
    assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("name", ["spans", "decisions", "records"])
def test_a_number_that_is_none_is_refused(name: str) -> None:
    reply = get(market(), "/debug/live", params={name: "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_what_it_shows_is_for_those_who_may_command_and_its_files_are_for_all() -> None:
    async def ask(client: httpx.AsyncClient, **headers: str) -> tuple[int, int]:
        shown = await client.get("/debug/live", headers=headers)
        return shown.status_code, (await client.get("/dashboard")).status_code

    assert calling(market(), ask) == (200, 200)
    assert calling(market(), ask, keys=keyring(admin="s3cret")) == (401, 200)
    sent = {"authorization": "Bearer s3cret"}
    assert calling(market(), lambda client: ask(client, **sent), keys=keyring(admin="s3cret")) == (200, 200)
    sent = {"authorization": "Bearer sk-a"}
    assert calling(market(), lambda client: ask(client, **sent), keys=keyring(admin="s3cret", a="sk-a")) == (403, 200)

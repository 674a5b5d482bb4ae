"""`/debug/spans`, `/debug/records` and `/debug/node`."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.model import Slo
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from tests.unit.proxy.http.scripted import ScriptedMarket, calling, get, keyring, market


def span(number: int) -> Span:
    return Span(InstanceId("decode-0"), SpanKind.DECODE, ModelId("m"), number, number + 1, 2, 3, 4)


def behind(spans: int = 0, requests: int = 0) -> ScriptedMarket:
    """Its rings hold four entries."""
    scripted = market()
    scripted.past.spans.add(map(span, range(spans)))
    log = scripted.past.requests
    for request in map(RequestId, range(requests)):
        log.arrived(request, ModelId("m"), Slo(), 10, prompt_tokens=3, max_tokens=2)
        log.tokens(request, 20, 2)
        log.end(request, "finished")
    return scripted


def spans_of(reply: httpx.Response) -> list[Span]:
    return msgspec.json.Decoder(Span).decode_lines(reply.content)


def records_of(reply: httpx.Response) -> list[Record]:
    return msgspec.json.Decoder(Record).decode_lines(reply.content)


def test_spans_are_lines() -> None:
    reply = get(behind(spans=3), "/debug/spans")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/jsonl")
    assert spans_of(reply) == [span(0), span(1), span(2)]
    assert reply.content.splitlines()[0] == b'["decode-0","decode","m",0,1,2,3,4,0,0,0,0,1000,[],0,0,0]'


def test_only_what_is_new_and_still_kept_is_told() -> None:
    full = behind(spans=9)
    assert spans_of(get(full, "/debug/spans")) == [span(n) for n in (5, 6, 7, 8)]
    reply = get(full, "/debug/spans?since=7")
    assert (spans_of(reply), reply.headers["aegis-next"]) == ([span(7), span(8)], "9")
    assert get(full, "/debug/spans?since=9").content == b""


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ("spans?sinse=3", "the query parameter 'sinse' is not known here; known: since"),
        ("decisions?times=1", "the query parameter 'times' is not known here; known: since"),
        ("node?since=1", "the query parameter 'since' is not known here; known: none"),
        ("live?since=1", "the query parameter 'since' is not known here; known: spans, decisions, records"),
        ("records?times=yes", "times should be 0 or 1, not 'yes'"),
    ],
)
def test_a_query_that_says_nothing_is_refused(query: str, line: str) -> None:
    reply = get(behind(), f"/debug/{query}")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, line)


def test_decisions_are_told_with_their_reasons() -> None:
    scripted, why = market(), Why("must begin in 3 ms", 3, 4, "n", 5)
    names = InstanceId("decode-0"), DecisionKind.TURN, ModelId("m"), (RequestId(7),)
    decisions = [Decision(at_ns, *names, "m has the turn", why) for at_ns in range(6)]
    scripted.past.decisions.add(decisions)
    reply = get(scripted, "/debug/decisions?since=4")
    assert msgspec.json.Decoder(Decision).decode_lines(reply.content) == decisions[4:]
    assert reply.headers["aegis-next"] == "6"
    told = {"because": "must begin in 3 ms", "slack_ns": 3, "cost_ns": 4, "lost": "n", "lost_slack_ns": 5}
    assert msgspec.json.decode(reply.content.splitlines()[0])["why"] == told


def test_more_than_is_encoded_at_once_is_whole() -> None:
    scripted = market()
    scripted.past.spans = type(scripted.past.spans)(5_000)
    scripted.past.spans.add(map(span, range(2_500)))
    assert spans_of(get(scripted, "/debug/spans")) == [span(n) for n in range(2_500)]


def test_records_tell_times_of_tokens_when_asked() -> None:
    scripted = behind(requests=1)
    record = Record(RequestId(0), ModelId("m"), 10, 3, 2, "finished", 2, 20, 20)
    assert records_of(get(scripted, "/debug/records")) == [record]
    asked = records_of(get(scripted, "/debug/records?times=1"))
    assert asked == [msgspec.structs.replace(record, token_times_ns=(20, 20))]


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "9" * 30, "", "²"])
def test_a_number_that_is_none_is_refused(since: str) -> None:
    reply = get(behind(spans=1), "/debug/spans", params={"since": since})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "since")


def test_the_node_is_told_without_what_loads_a_model() -> None:
    report = msgspec.json.decode(get(behind(), "/debug/node").content, type=NodeReport)
    (model,) = report.models
    assert (model.model, model.directory, model.image_path, model.manifest.tensors) == ("m", "", "", ())


@pytest.mark.parametrize("path", ["spans", "live", "node", "memory", "nothing"])
def test_no_browser_guesses_what_it_is(path: str) -> None:
    assert get(behind(), f"/debug/{path}").headers.get_list("x-content-type-options") == ["nosniff"]


@pytest.mark.parametrize("path", ["spans", "records", "decisions", "node"])
def test_it_is_for_those_who_may_command(path: str) -> None:
    async def ask(client: httpx.AsyncClient, **headers: str) -> int:
        return (await client.get(f"/debug/{path}", headers=headers)).status_code

    assert calling(behind(), ask) == 200
    assert calling(behind(), lambda client: ask(client, origin="http://page.example")) == 403
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        of_page = {"sec-fetch-site": site}
        assert calling(behind(), lambda client, of_page=of_page: ask(client, **of_page)) == status, site
    locked = keyring(admin="s3cret")
    assert calling(behind(), ask, keys=locked) == 401
    assert calling(behind(), lambda client: ask(client, authorization="Bearer s3cret"), keys=locked) == 200

"""Routes around the models: status, metrics, tokens, what is not served; and what surrounds every route."""

from __future__ import annotations

import logging

import httpx
import pytest
from prometheus_client import Counter

import aegis
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import byte_text, calling, get, market, post


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_and_readiness_are_the_market_s(path: str) -> None:
    behind = market()
    assert get(behind, path).json() == {"status": "ok"}
    behind.unwell = "decode-0 is starting"
    reply = get(behind, path)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    error = {"message": "decode-0 is starting", "type": "server_error", "param": None, "code": "unavailable"}
    assert reply.json() == {"error": error}


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_probes_that_want_no_body_have_none(path: str) -> None:
    with serving(market()) as url:
        reply = httpx.head(url + path, trust_env=False, verify=False)
    assert (reply.status_code, reply.content) == (200, b"")


def test_who_asks_for_a_websocket_is_answered_plainly_and_no_package_is_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    with serving(market()) as url, caplog.at_level(logging.WARNING):
        reply = httpx.get(url + "/ws", headers=headers, trust_env=False, verify=False)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_such_route")
    assert not caplog.messages


def test_metrics_are_the_market_s_registry() -> None:
    behind = market()
    Counter("aegis:things", "Things", registry=behind.registry).inc(3)
    reply = get(behind, "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "aegis:things_total 3.0" in reply.text


def test_the_version_is_told() -> None:
    assert get(market(), "/version").json() == {"version": aegis.__version__}


def test_text_becomes_tokens_and_back() -> None:
    answer = post(market(), "/tokenize", {"model": "m", "prompt": "é"}).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [256, 0xC3, 0xA9]}
    assert post(market(), "/detokenize", {"model": "m", "tokens": answer["tokens"]}).json() == {"prompt": "é"}
    plain = post(market(), "/tokenize", {"model": "m", "prompt": "a", "add_special_tokens": False}).json()
    assert plain["tokens"] == [97]
    chat = post(market(), "/tokenize", {"model": "m", "messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(chat["tokens"]) == b"[user]a[assistant]"


def test_what_fits_is_told_with_tokens_as_it_is_with_the_model() -> None:
    small = market(kv_limit_tokens=99)
    answer = post(small, "/tokenize", {"model": "m", "prompt": "a"}).json()
    assert answer["max_model_len"] == get(small, "/v1/models/m").json()["max_model_len"] == 99


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_a_wrong_tokenize_request_is_refused(path: str, body: dict[str, object], param: str) -> None:
    reply = post(market(), path, {"model": "m"} | body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_tokenizing_needs_a_tokenizer() -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert post(market(text=None), path, {"model": "m"} | body).status_code == 400
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert post(market(text=byte_text(None)), "/tokenize", body).status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "/v1/moderations",
        "/v1/messages/batches",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
    ],
)
def test_families_that_are_not_served_say_so(path: str) -> None:
    reply = post(market(), path, {"model": "m"})
    assert reply.status_code == 501
    assert path in reply.json()["error"]["message"]


def test_unknown_paths_and_wrong_methods_have_the_same_form() -> None:
    assert get(market(), "/v1/nothing").json()["error"]["code"] == "no_such_route"
    reply = get(market(), "/v1/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    several = calling(market(), lambda client: client.put("/v1/responses/x"))
    assert several.headers["allow"] == "DELETE, GET"
    assert several.json()["error"]["message"].endswith("use DELETE or GET")
    error = reply.json()["error"]
    assert error["code"] == "method_not_allowed"
    assert error["message"] == "GET '/v1/completions': Method Not Allowed; use POST"


@pytest.mark.parametrize("host", ["localhost", "x/y"])
def test_the_path_that_there_is_not_is_told_as_it_was_sent(host: str) -> None:
    reply = get(market(), "/v1/models%3Fa%0Ab", headers={"host": host})
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, r"GET '/v1/models?a\nb': Not Found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/m"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/files/x"),
        ("PUT", "/v1/completions"),
    ],
)
def test_a_path_that_ends_with_a_line_feed_is_none(method: str, path: str) -> None:
    behind = market()
    body = {"model": "m", "prompt": "x"}
    reply = calling(behind, lambda client: client.request(method, f"{path}%0A", json=body))
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_such_route")
    assert behind.answers == [("other", 404)] and not behind.submitted


def test_every_reply_has_the_request_s_id_or_one_of_its_own() -> None:
    assert get(market(), "/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    drawn = {get(market(), path).headers["x-request-id"] for path in ("/health", "/nothing")}
    assert len(drawn) == 2
    for unfit in ("a b", "x" * 200, "é".encode()):
        assert get(market(), "/health", headers={"x-request-id": unfit}).headers["x-request-id"] != unfit
        refused = post(market(), "/v1/completions", {"model": "m", "prompt": "x"}, headers={"x-request-id": unfit})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Id")
    body = {"model": "m", "prompt": "x", "request_id": "from-body"}
    assert post(market(), "/v1/completions", body).headers["x-request-id"] == "from-body"
    both = post(market(), "/v1/completions", body, headers={"x-request-id": "from-header"})
    assert both.headers["x-request-id"] == "from-header"
    assert both.json()["id"] == "cmpl-from-header"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_clean_500_and_is_logged_without_the_prompt(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    def script(prompt: object, sampling: object) -> list[object]:
        return ["no delivery at all"]

    body = {"model": "m", "prompt": "a secret", "stream": stream}
    with caplog.at_level(logging.INFO):
        reply = post(market(script), "/v1/completions", body, headers={"x-request-id": "bug-1"})  # type: ignore[arg-type]
    if not stream:
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
    assert "internal error" in reply.text
    assert "[DONE]" not in reply.text
    assert any(record.exc_info for record in caplog.records)
    assert not any("a secret" in str(vars(record)) for record in caplog.records)


def test_the_log_tells_a_request_s_model_and_lengths_but_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        body = {"model": "m", "prompt": "a secret", "add_special_tokens": False}
        post(market(), "/v1/completions", body, headers={"x-request-id": "r-1"})
        get(market(), "/health")
    (line,) = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert line.pop("took_ms") >= 0
    assert line == {
        "request_id": "r-1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "m",
        "prompt_tokens": 8,
        "tokens": 5,
    }


def test_answers_are_told_by_route_and_not_by_what_was_written() -> None:
    behind = market()
    for path in ("/v1/models", "/v1/models/m", "/v1/models/none", "/nowhere/at/all"):
        get(behind, path)
    assert behind.answers == [
        ("/v1/models", 200),
        ("/v1/models/{name:path}", 200),
        ("/v1/models/{name:path}", 404),
        ("other", 404),
    ]

from __future__ import annotations

from typing import Any

import httpx
import pytest

from aegis.core.model import Quantised
from proxy.http.app import create_app
from tests.unit.proxy.http.scripted import (
    TEXTS,
    ScriptedMarket,
    ScriptedModel,
    calling,
    get,
    keyring,
    market,
    post,
    says,
    spec,
)


def two() -> ScriptedMarket:
    behind = market()
    failed = ScriptedModel(spec("org/other"), says("x"), state="failed", detail="truncated", kv_limit_tokens=99)
    behind.served["org/other"] = failed
    return behind


def test_models_are_listed_with_root_state_and_length() -> None:
    answer = get(two(), "/v1/models").json()
    assert answer["object"] == "list"
    assert answer["data"] == [
        {
            "id": "m",
            "created": 1_700_000_000,
            "root": "/checkpoints/x",
            "max_model_len": 512,
            "state": "ready",
            "weights": "cached",
            "pinned": False,
            "priority": 0,
            "slo": {"ttft_ms": 10_000.0, "tbt_ms": 100.0, "gap_ms": 500.0},
            "limits": {"requests_per_minute": None, "tokens_per_minute": None, "concurrent": None},
            "task": "generate",
            "pace": None,
            "detail": None,
            "object": "model",
            "owned_by": "aegis",
            "parent": None,
        },
        get(two(), "/v1/models/org/other").json(),
    ]
    assert answer["data"][1]["state"] == "failed"
    assert answer["data"][1]["detail"] == "truncated"
    assert answer["data"][1]["max_model_len"] == 99


def test_what_quantising_costs_is_told() -> None:
    behind, quantised = market(), Quantised("int8", 4, 1.0, 0.022)
    behind.served["q"] = ScriptedModel(spec("q", quantised=quantised), says("x"))
    assert get(behind, "/v1/models/q").json()["detail"] == quantised.told


def test_a_model_without_a_tokenizer_is_told() -> None:
    assert get(market(text=None), "/v1/models/m").json()["detail"] == "no tokenizer: takes token ids only"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
def test_where_a_checkpoint_lies_is_told_the_admin_and_no_other_caller(path: str) -> None:
    behind = market()
    behind.keys = keyring(admin="s3cret", alice="sk-alice")

    def roots(key: str) -> str:
        told = get(behind, path, headers={"Authorization": f"Bearer {key}"}).json()
        return told.get("data", [told])[0]["root"]

    assert (roots("s3cret"), roots("sk-alice")) == ("/checkpoints/x", "x")


def test_an_unknown_model_is_404() -> None:
    reply = get(two(), "/v1/models/other")
    assert reply.status_code == 404
    assert "'org/other'" in reply.json()["error"]["message"]


def test_a_model_is_changed_in_what_is_named_and_nothing_else() -> None:
    behind = market()

    def update(**changes: object) -> httpx.Response:
        return post(behind, "/models/update", {"model": "m", **changes})

    assert update(slo={"tbt_ms": 50}, priority=-3).json()["slo"] == {
        "ttft_ms": 10_000.0,
        "tbt_ms": 50.0,
        "gap_ms": 500.0,
    }
    card = update(limits={"concurrent": 4}, pin=True).json()
    assert (card["priority"], card["limits"]["concurrent"], card["pinned"]) == (-3, 4, True)
    card = update(pace="smooth").json()
    assert (card["pace"], card["priority"], card["pinned"]) == ("smooth", -3, True)
    assert update(limits={"concurrent": 0, "tokens_per_minute": 9}).json()["limits"] == {
        "requests_per_minute": None,
        "tokens_per_minute": 9,
        "concurrent": None,
    }
    assert update(limits={}, pin=False).json()["limits"]["tokens_per_minute"] is None
    for changes, param in (
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"slo": {"tbt": 1}}, "slo.tbt"),
        ({"limits": {"concurrent": -1}}, "limits.concurrent"),
        ({"priority": 9}, "priority"),
        ({"pin": 1}, "pin"),
        ({"pace": "slow"}, "pace"),
        ({"dtype": "float32"}, "dtype"),
    ):
        reply = update(**changes)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert post(behind, "/models/update", {"model": "n"}).status_code == 404


def test_a_models_weights_are_evicted_unless_it_is_pinned() -> None:
    behind = market()
    reply = post(behind, "/models/evict", {"model": "m"})
    assert (reply.status_code, reply.json()["id"], reply.json()["weights"]) == (200, "m", "disk")
    assert post(behind, "/v1/completions", {"model": "m", "prompt": "x"}).status_code == 200
    post(behind, "/models/update", {"model": "m", "pin": True})
    for body, status, param in (
        ({"model": "m"}, 409, "model"),
        ({"model": "n"}, 404, "model"),
        ({}, 400, "model"),
        ({"model": "m", "when": "now"}, 400, "when"),
    ):
        reply = post(behind, "/models/evict", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
        assert "\n" not in reply.json()["error"]["message"]


def test_models_come_and_go() -> None:
    behind = market()
    added = post(behind, "/models/load", {"source": "/checkpoints/new", "name": "new"})
    assert added.status_code == 200
    assert added.json()["id"] == "new"
    assert post(behind, "/v1/completions", {"model": "new", "prompt": "x"}).json()["choices"][0]["text"] == "new"
    assert post(behind, "/models/unload", {"model": "new"}).json() == {"id": "new", "object": "model", "deleted": True}
    assert post(behind, "/models/unload", {"model": "new"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "source"), ({"source": 5}, "source"), ({"source": "broken"}, "source"), ({"source": "x", "nam": "y"}, "nam")],
)
def test_a_wrong_load_is_refused(body: dict[str, Any], param: str) -> None:
    reply = post(market(), "/models/load", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/models/load", "/models/evict", "/models/unload"])
def test_without_a_key_only_local_clients_that_are_no_web_page_may_change_models(path: str) -> None:
    for name in ("Origin", "X-Forwarded-For"):
        reply = post(market(), path, {}, headers={name: "http://elsewhere.example"})
        assert reply.status_code == 403
        assert f"the request has {name!r}" in reply.json()["error"]["message"]

    async def from_elsewhere() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(market(), texts=TEXTS), client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json={})

    reply = calling(market(), lambda _: from_elsewhere())
    assert reply.status_code == 403
    assert reply.json()["error"]["message"].endswith("as no admin key is set")


def test_with_a_key_whoever_sends_it_may() -> None:
    locked = keyring(admin="s3cret")

    def load(key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = {"source": "x"}
        return calling(market(), lambda c: c.post("/models/load", json=body, headers=headers), keys=locked)

    assert load("s3cret").status_code == 200
    assert load("wrong").status_code == 401
    assert calling(market(), lambda c: c.post("/models/load", json={}), keys=locked).status_code == 401

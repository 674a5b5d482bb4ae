from __future__ import annotations

from typing import Any

import httpx
import pytest

from aegis.core.errors import UserError
from proxy.http.app import create_app
from tests.unit.proxy.http.scripted import TEXTS, calling, get, keyring, market, post


def test_the_report_is_shown_as_json() -> None:
    reply = get(market(), "/debug/memory")
    assert reply.status_code == 200
    assert reply.json() == {
        "devices": [],
        "host_kv": {
            "capacity_bytes": 8,
            "leased_bytes": 4,
            "free_bytes": 4,
            "orphaned_bytes": 0,
            "kept_bytes": 0,
            "slabs": {"held_bytes": 0, "fragmentation": 0.0, "shapes": []},
        },
        "model_cache": {"capacity_bytes": 0, "used_bytes": 0, "images": [], "counters": {"hits": 3}},
    }


@pytest.mark.parametrize(("limit", "nbytes"), [("256MiB", 256 << 20), (4096, 4096), ("4096", 4096)])
def test_a_limit_is_moved(limit: object, nbytes: int) -> None:
    behind = market()
    reply = post(behind, "/debug/memory/limit", {"instance": "decode-0", "limit": limit, "timeout_s": 2.5})
    assert reply.json() == {"instance": "decode-0", "given_back_bytes": 4096}
    assert behind.moves == [("limit", "decode-0", nbytes, 2.5)]


def test_an_instance_is_trimmed() -> None:
    behind = market()
    reply = post(behind, "/debug/memory/trim", {"instance": "prefill-0"})
    assert reply.json() == {"instance": "prefill-0", "given_back_bytes": 0}
    assert behind.moves == [("trim", "prefill-0", 30.0)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("limit", {"limit": 1}, "instance"),
        ("limit", {"instance": "d"}, "limit"),
        ("limit", {"instance": "d", "limit": "lots"}, "limit"),
        ("limit", {"instance": "d", "limit": True}, "limit"),
        ("limit", {"instance": "d", "limit": 1.5}, "limit"),
        ("limit", {"instance": "d", "limit": "1" * 65}, "limit"),
        ("limit", {"instance": "d", "limit": 1 << 63}, "limit"),
        ("limit", {"instance": "d", "limit": "8388608TiB"}, "limit"),
        ("limit", {"instance": "d", "limit": 0}, "limit"),
        ("limit", {"instance": "d", "limit": -1}, "limit"),
        ("limit", {"instance": "d", "limit": 1, "timeout_s": 0}, "timeout_s"),
        ("limit", {"instance": "d", "limit": 1, "timeout": 3}, "timeout"),
        ("trim", {"instance": ["d"]}, "instance"),
        ("trim", {"instance": "d", "limit": 1}, "limit"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line_and_moves_nothing(path: str, body: dict[str, Any], param: str) -> None:
    behind = market()
    reply = post(behind, f"/debug/memory/{path}", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "\n" not in reply.json()["error"]["message"]
    assert behind.moves == []


def test_what_the_market_refuses_is_told_in_its_words() -> None:
    behind = market()
    behind.refusals = [UserError("not in time", status=409, kind="conflict_error")]
    reply = post(behind, "/debug/memory/limit", {"instance": "d", "limit": 1})
    assert (reply.status_code, reply.json()["error"]["message"]) == (409, "not in time")


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/limit"), ("POST", "/trim")])
def test_memory_is_for_those_who_may_command(method: str, path: str) -> None:
    async def ask(client: httpx.AsyncClient, **headers: str) -> int:
        body = {"instance": "d"} | ({"limit": 1} if path == "/limit" else {})
        sent = body if method == "POST" else None
        return (await client.request(method, f"/debug/memory{path}", json=sent, headers=headers)).status_code

    async def from_elsewhere(_: httpx.AsyncClient) -> int:
        transport = httpx.ASGITransport(app=create_app(market(), texts=TEXTS), client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await ask(client)

    assert calling(market(), from_elsewhere) == 403
    assert calling(market(), lambda client: ask(client, origin="http://page.example")) == 403
    assert calling(market(), ask) == 200
    locked = keyring(admin="s3cret")
    assert calling(market(), ask, keys=locked) == 401
    assert calling(market(), lambda client: ask(client, authorization="Bearer s3cret"), keys=locked) == 200

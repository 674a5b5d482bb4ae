"""Adapters over HTTP, with vLLM's fields and answers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from aegis.core.ids import ModelId
from tests.unit.proxy.http.scripted import calling, get, market, post

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def test_one_is_added_shown_with_its_parent_and_removed() -> None:
    behind = market()
    reply = post(behind, LOAD, ADAPTER | {"base_model_name": "m"})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert reply.headers["content-type"].startswith("text/plain")
    assert behind.added == ("/adapters/sql", "sql", "m")
    served = behind.served["sql"]
    served.spec = replace(served.spec, base=ModelId("m"))
    cards = {card["id"]: card["parent"] for card in get(behind, "/v1/models").json()["data"]}
    assert cards["sql"] == "m" and cards["m"] is None
    reply = post(behind, UNLOAD, {"lora_name": "sql", "lora_int_id": 7})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert "sql" not in behind.served


def test_without_a_base_the_adapter_names_it_itself() -> None:
    behind = market()
    assert post(behind, LOAD, ADAPTER).status_code == 200
    assert behind.added == ("/adapters/sql", "sql", "")
    assert post(behind, "/models/load", {"source": "/a", "base": "m"}).status_code == 200
    assert behind.added == ("/a", None, "m")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {"lora_path": "/a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "sql"}, 400, "lora_path"),
        (LOAD, {"lora_name": "", "lora_path": "/a"}, 400, "lora_name"),
        (LOAD, ADAPTER | {"lora_local_path": "/a"}, 400, "lora_local_path"),
        (LOAD, ADAPTER | {"lora_path": "/broken"}, 400, "lora_path"),
        (UNLOAD, {}, 400, "lora_name"),
        (UNLOAD, {"lora_name": "nobody"}, 404, "lora_name"),
        (UNLOAD, {"lora_name": "m"}, 400, "lora_name"),
    ],
)
def test_what_is_wrong_is_refused_in_a_line(path: str, body: dict[str, Any], status: int, param: str) -> None:
    reply = post(market(), path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert "\n" not in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_not_everybody_may(path: str) -> None:
    headers = {"x-forwarded-for": "10.0.0.1"}
    assert calling(market(), lambda client: client.post(path, json=ADAPTER, headers=headers)).status_code == 403

"""The input of a response that is kept, as a list of items, page by page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from msgspec import Struct

from aegis.core.errors import UserError
from proxy.http.errors import shown

ITEMS_MAX = 100
_ITEMS = 20
_ORDERS = ("asc", "desc")
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX}},
    {"name": "order", "in": "query", "schema": {"enum": list(_ORDERS)}},
)


class ItemList(Struct, frozen=True):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def page_of(response_id: str, conversation: Sequence[dict[str, Any]], query: Mapping[str, str]) -> ItemList:
    """The items of the conversation but for the answer, which is its last message; the newest first, unless they are
    asked for otherwise. Raises UserError."""
    limit, newest_first = _limit(query.get("limit")), _order(query.get("order")) == "desc"
    items = [
        {"id": _id(response_id, item["type"], at), "status": "completed"} | item
        for at, item in enumerate(item for message in conversation[:-1] for item in _items(message))
    ]
    if newest_first:
        items.reverse()
    if after := query.get("after"):
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            raise UserError(f"'after' names {shown(after)}, which is no item of this response", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(page, first, last, len(items) > limit)


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
        return
    if thought := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
    calls = message.get("tool_calls", ())
    if content or not calls:
        said = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
        yield {"type": "message", "role": role, "content": [said | {"text": content}]}
    for call in calls:
        name, given = call["function"]["name"], call["function"]["arguments"]
        arguments = msgspec.json.encode(given).decode()
        yield {"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments}


def _id(response_id: str, kind: str, at: int) -> str:
    return f"item_{blake2b(f'{response_id} {kind} {at}'.encode(), digest_size=16).hexdigest()}"


def _limit(asked: str | None) -> int:
    if asked is None:
        return _ITEMS
    if not asked.isascii() or not asked.isdecimal() or len(asked) > 3 or not 1 <= int(asked) <= ITEMS_MAX:
        raise UserError(f"'limit' must be a number between 1 and {ITEMS_MAX}, not {shown(asked)}", param="limit")
    return int(asked)


def _order(asked: str | None) -> str:
    if asked not in (None, *_ORDERS):
        raise UserError(f"'order' must be {' or '.join(_ORDERS)}, not {shown(asked)}", param="order")
    return asked or "desc"

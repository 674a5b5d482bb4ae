"""What a proxy keeps of responses for its clients, each for its own caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from msgspec import Raw

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_notes import note
from proxy.http.responses.input_items import kept_calls
from proxy.http.responses.response_items import ResponseObject, said
from proxy.http.responses.running_responses import RunningResponses
from proxy.http.responses.stored_responses import (
    RESPONSE_BYTES_MAX,
    ResponseStore,
    StoredResponse,
    decode,
    encode,
    key_of,
)
from proxy.http.security.key_guard import caller_of
from proxy.http.security.large_bodies import SMALL_BYTES


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def running_of(request: Request) -> RunningResponses:
    running: RunningResponses = request.app.state.running_responses
    return running


def own_key(request: Request, response_id: str) -> str:
    """The caller's response of that id."""
    return key_of(caller_of(request).name, response_id)


async def find(request: Request, response_id: str) -> StoredResponse | None:
    """Raises UserError: 503."""
    found = await store_of(request).find(own_key(request, response_id))
    return None if found is None else await beside_loop(lambda: decode(found), len(found), few=SMALL_BYTES)


async def conversation_before(request: Request, previous: str | None) -> list[dict[str, Any]]:
    """Raises UserError: 400 where the response before is not kept (any more), or has not ended; 503."""
    if previous is None:
        return []
    found = await find(request, previous)
    if found is None:
        message = f"there is no response {shown(previous)} (any more): send its items in 'input'"
        raise UserError(message, param="previous_response_id", code="previous_response_not_found")
    if not found.conversation:
        message = f"the response {shown(previous)} has not ended with an answer"
        raise UserError(message, param="previous_response_id", code="previous_response_not_ended")
    return found.conversation


async def keep(request: Request, response: ResponseObject, conversation: Sequence[dict[str, Any]]) -> None:
    """An answer that is there is given, whether it can be kept or not."""
    answer = kept_calls(said(response.output))
    try:
        await put(request, response, [*conversation, answer])
    except UserError as error:
        note(request.scope, kept=f"no, {error.message}")


async def put(request: Request, response: ResponseObject, conversation: list[dict[str, Any]]) -> None:
    """Raises UserError: 503; 400 where it is too large."""
    stored = encode(StoredResponse(Raw(encode(response)), conversation))
    if len(stored) > RESPONSE_BYTES_MAX:
        raise UserError(f"the response is too large: more than {RESPONSE_BYTES_MAX >> 20} MiB with its conversation")
    await store_of(request).keep(own_key(request, response.id), stored)

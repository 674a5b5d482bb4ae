"""What a proxy keeps of responses for its clients, each for its own caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from msgspec import Raw, Struct

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.json_bounds import check_counts
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


class KeptConversation(Struct, frozen=True):
    """A conversation that goes on; `nbytes` is its size."""

    messages: Sequence[dict[str, Any]] = ()
    nbytes: int = 0


async def find(request: Request, response_id: str) -> StoredResponse | None:
    """Raises UserError: 503."""
    found = await store_of(request).find(own_key(request, response_id))
    return None if found is None else await _decoded(found)


async def _decoded(stored: bytes) -> StoredResponse:
    return await beside_loop(lambda: decode(stored), len(stored), few=SMALL_BYTES)


class _Told(Struct, frozen=True):
    """Of a response, which may be large."""

    status: str


def status_of(stored: StoredResponse) -> str:
    return msgspec.json.decode(stored.response, type=_Told).status


async def conversation_before(request: Request, previous: str | None) -> KeptConversation:
    """Raises UserError: 400 where the response before is not kept (any more), or has not ended; 503."""
    if previous is None:
        return KeptConversation()
    found = await store_of(request).find(own_key(request, previous))
    if found is None:
        message = f"there is no response {shown(previous)} (any more): send its items in 'input'"
        raise UserError(message, param="previous_response_id", code="previous_response_not_found")
    conversation = (await _decoded(found)).conversation
    if not conversation:
        message = f"the response {shown(previous)} has not ended with an answer"
        raise UserError(message, param="previous_response_id", code="previous_response_not_ended")
    return KeptConversation(conversation, len(found))


async def keep_if_it_can_be(request: Request, response: ResponseObject, before: KeptConversation) -> None:
    """An answer that is there is given, whether it can be kept or not."""
    try:
        await store_of(request).keep_soon(*await _stored(request, response, _with(before, response)))
    except UserError as error:
        note(request.scope, kept=f"no: {error.message}")


async def keep(request: Request, response: ResponseObject, before: KeptConversation) -> None:
    """Raises UserError: as `put` does."""
    await put(request, response, _with(before, response))


def _with(before: KeptConversation, response: ResponseObject) -> KeptConversation:
    answer = kept_calls(said(response.output))
    return KeptConversation([*before.messages, answer], before.nbytes)


async def put(request: Request, response: ResponseObject, conversation: KeptConversation) -> None:
    """Raises UserError: 503; 400 where it is too large, or would take too long to read again."""
    await store_of(request).keep(*await _stored(request, response, conversation))


async def _stored(request: Request, response: ResponseObject, conversation: KeptConversation) -> tuple[str, bytes]:
    """The key under which the response is kept, and what is kept of it. Raises UserError: 400."""

    def encoded() -> bytes:
        stored = encode(StoredResponse(Raw(encode(response)), list(conversation.messages)))
        if len(stored) > RESPONSE_BYTES_MAX:
            raise UserError(f"the response has more than {RESPONSE_BYTES_MAX >> 20} MiB with its conversation")
        check_counts(stored)
        return stored

    stored = await beside_loop(encoded, conversation.nbytes, few=SMALL_BYTES)
    return own_key(request, response.id), stored

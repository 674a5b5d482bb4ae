"""`POST /v1/responses`, and what becomes of a response: `GET`, `DELETE` and cancel."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from time import time
from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec import Raw, Struct, structs

from aegis.core.errors import UserError
from proxy.http.direct_routes import direct_router
from proxy.http.errors import shown
from proxy.http.ignored import Ignored
from proxy.http.openai.chat import ChatBody, converse, needs_chat_template
from proxy.http.openai.held_requests import held
from proxy.http.openai.models import find_servable
from proxy.http.openapi import ASKING, EVENTS, operation
from proxy.http.replies import json_reply
from proxy.http.request.body import read_body
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_ids import id_of
from proxy.http.request_notes import note
from proxy.http.responses.input_items import InputReader, kept_calls
from proxy.http.responses.response_body import ResponseBody, chat_request, head_of
from proxy.http.responses.response_events import ResponseEvents
from proxy.http.responses.response_items import ResponseObject, said
from proxy.http.responses.response_shape import Callbacks, ResponseShape, failure, item_id
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
from proxy.http.settings import market_of, settings_of
from proxy.http.translated import Translated

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
"""Parameters of chat by their names here."""

_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[\\w-]+$"}}
_FINDING = (400, 401, 404, 503)

router = direct_router()


class Deleted(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


@router.post(
    "/v1/responses",
    **operation(
        "Answer, as OpenAI's Responses API does",
        ResponseObject,
        takes=ResponseBody,
        kinds=(EVENTS,),
        problems=ASKING,
    ),
)
async def create_response(request: Request) -> Response:
    body = await read_body(request, ResponseBody, settings_of(request).body_bytes_max)
    head, ignored = head_of(body, _id_for(request), int(time())), Ignored()
    if not settings_of(request).responses_ttl_s:
        head = structs.replace(head, store=False)

    def failed(error: UserError) -> bytes:
        return failure(ResponseEvents(partial(item_id, head), str), head, error)

    return ignored.tell(request, await held(request, body, lambda: _answer(request, body, head, ignored), failed))


def _id_for(request: Request) -> str:
    """The same for a retry, and nobody else's."""
    asked = f"{caller_of(request).name} {id_of(request.scope)}"
    return f"resp_{blake2b(asked.encode(), digest_size=24).hexdigest()}"


async def _answer(request: Request, body: ResponseBody, head: ResponseObject, ignored: Ignored) -> Response:
    text = needs_chat_template(find_servable(market_of(request), body))
    before = await _conversation_before(request, body)

    def read() -> tuple[list[dict[str, Any]], Translated]:
        conversation = [*before, *InputReader(body, ignored).read()]
        return conversation, chat_request(body, conversation, text, ignored)

    conversation, chat = await beside_loop(read, body.nbytes, few=SMALL_BYTES)

    async def keep(response: ResponseObject) -> None:
        if response.store:
            await _keep(request, response, conversation)

    with chat.renamed(_NAMES):
        running, key = running_of(request), key_of(caller_of(request).name, head.id)
        callbacks = Callbacks(partial(running.begin, key), partial(running.end, key), keep, time)
        shape = partial(ResponseShape, head, callbacks)
        return await converse(request, ChatBody(chat.values, nbytes=body.nbytes), shape, cuts=True)


async def _conversation_before(request: Request, body: ResponseBody) -> list[dict[str, Any]]:
    """Raises UserError: 400 where the response before is not kept (any more), 503."""
    previous = body.previous_response_id
    if previous is None:
        return []
    found = await store_of(request).find(key_of(caller_of(request).name, previous))
    if found is None:
        message = f"there is no response {shown(previous)} (any more): send its items in 'input'"
        raise UserError(message, param="previous_response_id", code="previous_response_not_found")
    return (await beside_loop(lambda: decode(found), len(found), few=SMALL_BYTES)).conversation


async def _keep(request: Request, response: ResponseObject, conversation: list[dict[str, Any]]) -> None:
    """An answer that is there is given, whether it can be kept or not."""
    answer = kept_calls(said(response.output))
    stored = encode(StoredResponse(Raw(encode(response)), [*conversation, answer]))
    if len(stored) > RESPONSE_BYTES_MAX:
        note(request.scope, kept="no, too large")
        return
    try:
        await store_of(request).keep(key_of(caller_of(request).name, response.id), stored)
    except UserError as error:
        note(request.scope, kept=f"no, {error.message}")


@router.get(
    "/v1/responses/{response_id}",
    **operation("A response that is kept", ResponseObject, problems=_FINDING, parameters=(_ID,)),
)
async def retrieve_response(request: Request) -> Response:
    stored = decode(await _stored(request))
    return Response(bytes(stored.response), media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}",
    **operation("Keeps a response no longer", Deleted, problems=_FINDING, parameters=(_ID,)),
)
async def delete_response(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not await store_of(request).remove(key_of(caller_of(request).name, response_id)):
        raise _no_response(response_id)
    return json_reply(Deleted(response_id))


@router.post(
    "/v1/responses/{response_id}/cancel",
    **operation("Ends a response where it is", ResponseObject, problems=_FINDING, parameters=(_ID,)),
)
async def cancel_response(request: Request) -> Response:
    """One that this proxy is generating. What it has so far is its output."""
    response_id = request.path_params["response_id"]
    ended = await running_of(request).cancel(key_of(caller_of(request).name, response_id))
    if ended is not None:
        return json_reply(ended)
    status = msgspec.json.decode(decode(await _stored(request)).response)["status"]
    raise UserError(f"the response has ended: it is {status}", param="response_id", code="response_ended")


async def _stored(request: Request) -> bytes:
    """Raises UserError: 404, 503."""
    response_id = request.path_params["response_id"]
    found = await store_of(request).find(key_of(caller_of(request).name, response_id))
    if found is None:
        raise _no_response(response_id)
    return found


def _no_response(response_id: str) -> UserError:
    message = f"there is no response {shown(response_id)} (any more)"
    return UserError(message, status=404, param="response_id", code="response_not_found")


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def running_of(request: Request) -> RunningResponses:
    running: RunningResponses = request.app.state.running_responses
    return running

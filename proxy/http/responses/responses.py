"""`POST /v1/responses`, and what becomes of a response: `GET`, `DELETE` and cancel."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from time import time

import msgspec
from fastapi import Request, Response
from msgspec import Struct, structs

from aegis.core.errors import UserError
from proxy.http.direct_routes import direct_router
from proxy.http.errors import shown
from proxy.http.ignored import Ignored
from proxy.http.openai.chat import ChatBody, converse, needs_chat_template
from proxy.http.openai.held_requests import held
from proxy.http.openai.models import find_servable
from proxy.http.openapi import ASKING, EVENTS, operation
from proxy.http.replies import encode, json_reply
from proxy.http.request.body import read_body
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_ids import id_of
from proxy.http.responses import background, kept
from proxy.http.responses.input_items import InputReader
from proxy.http.responses.listed_items import PARAMETERS, ItemList, page_of
from proxy.http.responses.response_body import ResponseBody, chat_request, head_of
from proxy.http.responses.response_events import ResponseEvents
from proxy.http.responses.response_items import ResponseObject
from proxy.http.responses.response_shape import Callbacks, ResponseShape, failure, item_id
from proxy.http.responses.running_responses import RunningResponse
from proxy.http.responses.stored_responses import StoredResponse
from proxy.http.security.key_guard import caller_of
from proxy.http.security.large_bodies import SMALL_BYTES
from proxy.http.settings import market_of, queries_of, settings_of
from proxy.http.translated import Translated

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
"""Parameters of chat by their names here."""

_OF_STREAMS = ("include", "include[]", "starting_after", "stream")
"""Parameters with which a kept response cannot be asked for."""
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
    """An id that is the same when the request is retried, and that no other caller's request has."""
    asked = f"{caller_of(request).name} {id_of(request.scope)}"
    return f"resp_{blake2b(asked.encode(), digest_size=24).hexdigest()}"


async def _answer(request: Request, body: ResponseBody, head: ResponseObject, ignored: Ignored) -> Response:
    text = needs_chat_template(find_servable(market_of(request), body))
    before = await kept.conversation_before(request, body.previous_response_id)

    nbytes = before.nbytes + body.nbytes

    def read() -> tuple[kept.KeptConversation, Translated]:
        conversation = [*before.messages, *InputReader(body, ignored).read()]
        return kept.KeptConversation(conversation, nbytes), chat_request(body, conversation, text, ignored)

    conversation, chat = await beside_loop(read, nbytes, few=SMALL_BYTES)

    async def generate(asking: Request, begun: RunningResponse | None = None) -> Response:
        return await _converse(asking, head, conversation, chat, begun)

    return await (background.begin(request, head, generate, nbytes) if head.background else generate(request))


async def _converse(
    request: Request,
    head: ResponseObject,
    conversation: kept.KeptConversation,
    chat: Translated,
    begun: RunningResponse | None,
) -> Response:
    """`begun` is what runs already; who began it says when it has failed."""

    async def keep(response: ResponseObject) -> None:
        if response.background:
            await kept.keep(request, response, conversation)
        elif response.store:
            await kept.keep_if_it_can_be(request, response, conversation)

    running, key = kept.running_of(request), kept.own_key(request, head.id)

    def begin() -> RunningResponse:
        return begun or running.begin(key)

    def end(ended: RunningResponse, last: ResponseObject | None) -> None:
        if last is not None or not begun:
            running.end(key, ended, last)

    callbacks = Callbacks(begin, end, keep, time)
    with chat.renamed(_NAMES):
        shape = partial(ResponseShape, head, callbacks)
        return await converse(request, ChatBody(chat.values, nbytes=conversation.nbytes), shape, cuts=True)


@router.get(
    "/v1/responses/{response_id}",
    **operation("A response that is kept", ResponseObject, problems=_FINDING, parameters=(_ID,)),
)
async def retrieve_response(request: Request) -> Response:
    """As a whole: what it was made of is not kept, and so it is not streamed again."""
    for name, value in request.query_params.items():
        if name in _OF_STREAMS and value != "false":
            raise UserError(f"'{name}' is not supported for a response that is kept; leave it out", param=name)
    return Response(bytes((await _stored(request)).response), media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}",
    **operation("Keeps a response no longer", Deleted, problems=_FINDING, parameters=(_ID,)),
)
async def delete_response(request: Request) -> Response:
    """One that is still being generated ends, or it would be kept again when it has."""
    response_id = request.path_params["response_id"]
    key = kept.own_key(request, response_id)
    if kept.status_of(await _stored(request)) == "in_progress":
        await _end(request, key)
    if not await kept.store_of(request).remove(key):
        raise _no_response(response_id)
    return json_reply(Deleted(response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    **operation("What a response that is kept answers", ItemList, problems=_FINDING, parameters=(_ID, *PARAMETERS)),
)
async def list_input_items(request: Request) -> Response:
    """With all that was said before, where it goes on from another one; without instructions. One that has not ended
    tells none yet."""
    stored, response_id = await _stored(request), request.path_params["response_id"]

    def page() -> Response:
        return json_reply(page_of(response_id, stored.conversation, request.query_params))

    return await beside_loop(page, 1, few=0)


@router.post(
    "/v1/responses/{response_id}/cancel",
    **operation("Ends a response where it is", ResponseObject, problems=_FINDING, parameters=(_ID,)),
)
async def cancel_response(request: Request) -> Response:
    """What it has so far is its output, whichever proxy is generating it. One whose proxy is lost has none. One that
    was cancelled before is told again: its client may not have heard of it."""
    key = kept.own_key(request, request.path_params["response_id"])
    if (ended := await _end(request, key)) is not None:
        return Response(ended, media_type="application/json")
    found = await _stored(request)
    status = kept.status_of(found)
    if status == "cancelled":
        return Response(bytes(found.response), media_type="application/json")
    if status != "in_progress":
        raise UserError(f"the response has ended: it is {status}", param="response_id", code="response_ended")
    begun = msgspec.json.decode(found.response, type=ResponseObject)
    cancelled = structs.replace(begun, status="cancelled")
    await kept.put(request, cancelled, kept.KeptConversation())
    return json_reply(cancelled)


async def _end(request: Request, key: str) -> bytes | None:
    """Ends a response that is being generated, by this proxy or another one; as it ended then."""
    ended = await kept.running_of(request).cancel(key)
    return encode(ended) if ended is not None else await queries_of(request).cancel_response(key)


async def _stored(request: Request) -> StoredResponse:
    """Raises UserError: 404, 503."""
    response_id = request.path_params["response_id"]
    found = await kept.find(request, response_id)
    if found is None:
        raise _no_response(response_id)
    return found


def _no_response(response_id: str) -> UserError:
    message = f"there is no response {shown(response_id)} (any more)"
    return UserError(message, status=404, param="response_id", code="response_not_found")

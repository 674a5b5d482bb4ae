"""Responses that are generated when their requests have been answered already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass

from fastapi import Request, Response

from aegis.core.errors import UserError
from proxy.http.errors import unexpected
from proxy.http.replies import json_reply
from proxy.http.request_ids import is_new
from proxy.http.responses import kept
from proxy.http.responses.response_items import ResponseObject
from proxy.http.responses.response_shape import failed_response
from proxy.http.responses.running_responses import RunningResponse
from proxy.http.security import admission
from proxy.http.security.large_bodies import release

BACKGROUND_MAX = 256
BACKGROUND_BYTES_MAX = 64 << 20
"""Of the conversations of all that a proxy generates at a time. No connection bounds them, as it does those of others;
one caller has half of both, or one response."""

AGAIN_S = 1.0
"""After which a response is tried again whose request is being answered already, by another proxy."""

_ANSWERED = "request_in_flight"

_log = logging.getLogger(__name__)

Work = Callable[[Request, RunningResponse], Awaitable[Response]]


@dataclass(slots=True, eq=False)
class _Place:
    """What one background response takes, which is kept under `key`; `nbytes` is the size of its conversation."""

    caller: str
    nbytes: int
    key: str
    task: asyncio.Task[None] | None = None


class BackgroundResponses:
    """The background responses that one proxy is making."""

    def __init__(self, *, most: int = BACKGROUND_MAX, bytes_max: int = BACKGROUND_BYTES_MAX) -> None:
        self._most = most
        self._bytes_max = bytes_max
        self._places = set[_Place]()

    def has(self, key: str) -> bool:
        """Whether the response of that key is being generated."""
        return any(place.key == key for place in self._places)

    def take(self, caller: str, nbytes: int, key: str) -> _Place:
        """Raises UserError: 429 where there is no place for one more."""
        own = [place for place in self._places if place.caller == caller]
        if self._is_full(self._places, nbytes) or self._is_full(own, nbytes, share=2):
            message = "too many responses are being generated in the background; try again when some have ended"
            raise UserError(
                message, status=429, param="background", code="too_many_background", kind="rate_limit_error"
            )
        place = _Place(caller, nbytes, key)
        self._places.add(place)
        return place

    def run(self, place: _Place, work: Coroutine[None, None, None]) -> None:
        place.task = asyncio.create_task(work)
        place.task.add_done_callback(lambda _: self.leave(place))

    def leave(self, place: _Place) -> None:
        self._places.discard(place)

    def _is_full(self, places: Collection[_Place], nbytes: int, *, share: int = 1) -> bool:
        taken = sum(place.nbytes for place in places)
        return len(places) >= self._most // share or (bool(places) and taken + nbytes > self._bytes_max // share)


async def begin(request: Request, head: ResponseObject, work: Work, nbytes: int) -> Response:
    """The response as it begins; `work` generates it, and keeps it when it has ended. `nbytes` is the size of its
    conversation. A retry gets what is kept, or is about to be. Raises UserError: 429, 503."""
    key = kept.own_key(request, head.id)
    found = None if is_new(request) else await kept.find(request, head.id)
    if found is not None:
        return Response(bytes(found.response), media_type="application/json")
    await admission.admit_early(request)
    others: BackgroundResponses = request.app.state.background
    if others.has(key):
        return json_reply(head)
    place = others.take(admission.who(request), nbytes, key)
    runs = kept.running_of(request)
    running = runs.begin(key)  # before anybody finds it: what is kept and runs nowhere has lost its proxy
    try:
        await kept.put(request, head, kept.KeptConversation())
    except BaseException:
        others.leave(place)
        runs.end(key, running, None)
        raise
    release(request.scope)
    later = admission.detached(request)
    others.run(place, _work(later, head, work, running))
    return json_reply(head)


async def _work(request: Request, head: ResponseObject, work: Work, running: RunningResponse) -> None:
    """Who answers its request already may keep the response, or come to nothing."""
    try:
        failure = await _failure(request, work, running)
        while failure and failure.code == _ANSWERED and await _is_wanted(request, head.id, running):
            failure = await _failure(request, work, running)
        if failure and failure.code != _ANSWERED:
            await kept.put(request, failed_response(head, failure), kept.KeptConversation())
    except UserError as error:
        _log.warning("a response that failed is not kept: %s", error.message)
    finally:
        kept.running_of(request).end(kept.own_key(request, head.id), running, None)


async def _failure(request: Request, work: Work, running: RunningResponse) -> UserError | None:
    try:
        await work(request, running)
    except UserError as error:
        return error
    except Exception:  # noqa: BLE001 - nobody waits for it: who asks for the response is told
        _log.exception("a response in the background broke")
        return unexpected()
    finally:
        admission.end(request.scope)
    return None


async def _is_wanted(request: Request, response_id: str, running: RunningResponse) -> bool:
    """Whether the response has not ended after a while, as it is kept, and is not to end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(AGAIN_S):
            await running.stop.wait()
            return False
    try:
        found = await kept.find(request, response_id)
    except UserError:
        return True
    return found is not None and kept.status_of(found) == "in_progress"

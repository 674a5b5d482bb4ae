"""Responses that are generated when their requests have been answered already."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from aegis.core.errors import UserError
from proxy.http.errors import unexpected
from proxy.http.replies import json_reply
from proxy.http.responses import kept
from proxy.http.responses.response_items import ResponseObject
from proxy.http.responses.response_shape import failed_response
from proxy.http.responses.running_responses import RunningResponse
from proxy.http.security import admission
from proxy.http.security.large_bodies import release

_log = logging.getLogger(__name__)


Work = Callable[[Request, RunningResponse], Awaitable[Response]]


async def begin(request: Request, head: ResponseObject, work: Work) -> Response:
    """The response as it begins; `work` generates it, and keeps it when it has ended. A retry gets what is kept. Raises
    UserError: 503."""
    found = await kept.find(request, head.id)
    if found is not None:
        return Response(bytes(found.response), media_type="application/json")
    runs, key = kept.running_of(request), kept.own_key(request, head.id)
    running = runs.begin(key)  # before anybody finds it: what is kept and runs nowhere has lost its proxy
    try:
        await kept.put(request, head, kept.KeptConversation())
    except BaseException:
        runs.end(key, running, None)
        raise
    release(request.scope)
    later = admission.detached(request)
    tasks: set[asyncio.Task[None]] = request.app.state.background
    task = asyncio.create_task(_work(later, head, work, running))
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return json_reply(head)


async def _work(request: Request, head: ResponseObject, work: Work, running: RunningResponse) -> None:
    failure: UserError | None = None
    try:
        await work(request, running)
    except UserError as error:
        failure = error
    except Exception:  # noqa: BLE001 - nobody waits for it: who asks for the response is told
        _log.exception("a response in the background broke")
        failure = unexpected()
    finally:
        admission.end(request.scope)
    if failure:
        try:
            await kept.put(request, failed_response(head, failure), kept.KeptConversation())
        except UserError as error:
            _log.warning("a response that failed is not kept: %s", error.message)
    kept.running_of(request).end(kept.own_key(request, head.id), running, None)

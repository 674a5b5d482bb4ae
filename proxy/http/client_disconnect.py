"""Work that ends when the client who asked for it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """There is nobody to answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Where the client disconnects first, cancels it and raises ClientGone at its end.

    The request's body must have been read. A second task only watches: thousands of requests may wait at a time.
    """
    working = asyncio.current_task()
    assert working is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        result = await work
    except (Exception, asyncio.CancelledError):
        if gone and not working.uncancel():  # else somebody else has cancelled it, too
            raise ClientGone from None
        raise
    finally:
        watching.cancel()
    if gone:  # and it went on to its end
        working.uncancel()
        raise ClientGone
    return result

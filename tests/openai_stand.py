"""A small server with OpenAI's API whose models misbehave, each in the way that its name says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Body = dict[str, Any]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


class Stand:
    """`bodies` are the requests it got, `under_way_max` how many there were at one time.

    `patient` answers when everything else that it is to wait for, `answers_awaited`, has been answered.
    """

    MODELS = (
        "good",
        "no-usage",
        "bundled",
        "refused",
        "rude",
        "cut",
        "unfinished",
        "mute",
        "garbage",
        "html",
        "patient",
    )

    def __init__(self, answers_awaited: int = 0) -> None:
        self.url = ""
        self.bodies: list[Body] = []
        self.under_way_max = 0
        self._under_way = 0
        self._answers_awaited = answers_awaited
        self._all_answered = asyncio.Event()
        self._never = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Stand]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self._never.set()
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name, "owned_by": "stand"} for name in self.MODELS]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self._under_way += 1
        self.under_way_max = max(self.under_way_max, self._under_way)
        try:
            return await self._answer(request, body)
        finally:
            self._under_way -= 1
            self._answers_awaited -= 1
            if self._answers_awaited <= 0:
                self._all_answered.set()

    async def _answer(self, request: web.Request, body: Body) -> web.StreamResponse:
        match body["model"]:
            case "refused":
                return web.json_response({"error": {"message": "out of\nmemory"}}, status=500)
            case "rude":
                return web.json_response({"error": f"I know you: {request.headers.get('Authorization')}"}, status=401)
            case "html":
                return web.Response(text="<p>Hello</p>", content_type="text/html")
            case "patient":
                await self._all_answered.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._write(request, response, body["model"], body["max_tokens"])
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, model: str, tokens: int) -> None:
        match model:
            case "bundled":
                await response.write(chunk("many words", "length") + usage(7, tokens) + DONE)
            case "cut":
                await response.write(chunk("one"))
                assert request.transport is not None
                request.transport.close()
            case "unfinished":
                await response.write(chunk("one"))
            case "mute":
                await response.write(chunk("one"))
                await self._never.wait()
            case "garbage":
                await response.write(b"data: {\n\n")
            case _:
                for index in range(tokens):
                    await response.write(chunk("x", "length" if index == tokens - 1 else None))
                await response.write((b"" if model == "no-usage" else usage(7, tokens)) + DONE)

"""Tokenizing and rendering for clients, in processes beside the proxy: what a checkpoint's tokenizer or template makes
of a client's text may take any time and memory, and must take neither from others.

1. Jobs of short texts are done by the process for short ones, some at a time, within `SHORT_S`.
2. A longer one, and one of a model that lately took longer than that over a short one, by the process for long ones.
3. What serves no request (`/tokenize`, `/detokenize`), by a third, so that it delays none.

In each, callers take turns, and of one caller's jobs the smallest is next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from aegis.core.errors import UserError
from aegis.core.fair_queue import Crowded, FairQueue
from aegis.models.text import TextModel
from aegis.models.text_messages import (
    Answer,
    Count,
    Counted,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Job,
    Refused,
    Render,
    Rendered,
    TooManyCharacters,
    TooManyTokens,
    encoded,
)
from aegis.models.text_process import TextProcess
from aegis.telemetry.logs import log

SHORT_CHARACTERS = 1 << 14
SHORT_S, LONG_S = 0.5, 20.0
SHORT_AT_ONCE = 32
"""Of one at a time most of the processor's time would go into changing from one process to the other."""

SUSPECTED_S = 60.0
WAITING_MAX = 4096  # of one caller, for a process
ASIDE_WAITING_MAX = 64
_MIB = 1 << 20
_COUNTED_MAX = 1 << 16

_logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    text: TextModel
    job: msgspec.Raw
    answer: asyncio.Future[Answer | None]


class Lane:
    """One process and those that wait for it. Event loops may use it one after the other."""

    def __init__(
        self, process: TextProcess, within_s: float, *, at_once: int = 1, most_waiting: int = WAITING_MAX
    ) -> None:
        """The process gets up to `at_once` jobs at a time, which it has `within_s` for."""
        self.process = process
        self.within_s = within_s
        self._at_once = at_once
        self._queue = FairQueue[_Waiting](most_waiting=most_waiting, is_left=lambda waiting: waiting.answer.done())
        self._working: asyncio.Task[None] | None = None

    async def do(self, caller: str, size: int, text: TextModel, job: Job) -> Answer | None:
        """None where it takes more time or memory than there is for it. One that is begun is ended though nobody waits
        for it any more. Raises UserError where the caller has many waiting, or no message holds the job."""
        try:
            message = encoded(job)
        except OverflowError:
            raise UserError("a number is too large", code="invalid_json") from None
        waiting = _Waiting(text, message, asyncio.get_running_loop().create_future())
        try:
            self._queue.put(caller, size, waiting)
        except Crowded:
            refusal = "many prompts of yours are waiting to be tokenized; try again when they were"
            raise UserError(refusal, status=429, code="too_many_prompts", kind="rate_limit_error") from None
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await waiting.answer

    async def start(self) -> None:
        """The process, before there is a job."""
        if self._working is None:
            self._working = asyncio.create_task(self._work(starts=True))
            await self._working

    async def _work(self, *, starts: bool = False) -> None:
        """While there are jobs."""
        batch: list[_Waiting] = []
        try:
            if starts:
                with contextlib.suppress(OSError, EOFError, TimeoutError):  # the first job tries again
                    await self.process.start()
            while batch := self._batch():
                while batch:
                    batch = await self._answer(batch)
        finally:
            self._working = None
            for waiting in batch:
                waiting.answer.cancel()

    def _batch(self) -> list[_Waiting]:
        batch = list[_Waiting]()
        while len(batch) < self._at_once and (waiting := self._queue.take()):
            batch.append(waiting)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> list[_Waiting]:
        """What of the batch has still to be done: all but the one that took too much."""
        answers = await self.process.ask([(waiting.text, waiting.job) for waiting in batch], self.within_s)
        if isinstance(answers, int):
            _tell(batch.pop(answers), None)
            return batch
        for waiting, answer in zip(batch, answers, strict=True):
            _tell(waiting, answer)
        return []


def _tell(waiting: _Waiting, answer: Answer | None) -> None:
    if not waiting.answer.done():
        waiting.answer.set_result(answer)


class Texts:
    """All of one proxy's. Processes are started by their first jobs."""

    def __init__(self, *, short_s: float = SHORT_S, long_s: float = LONG_S) -> None:
        self._short = Lane(TextProcess(memory_bytes=512 * _MIB), short_s, at_once=SHORT_AT_ONCE)
        self._long = Lane(TextProcess(memory_bytes=2048 * _MIB, niceness=5), long_s)
        self._aside = Lane(TextProcess(memory_bytes=2048 * _MIB, niceness=10), long_s, most_waiting=ASIDE_WAITING_MAX)
        self._suspected_until_s: dict[int, float] = {}

    async def start(self) -> None:
        """The process that serves most, so that the first request does not wait for it."""
        await self._short.start()

    def close(self) -> None:
        for lane in (self._short, self._long, self._aside):
            lane.process.close()

    async def encode(
        self, caller: str, text: TextModel, strings: Sequence[str], *, special: bool, tokens_max: int
    ) -> tuple[tuple[int, ...], ...] | TooManyTokens:
        """Token ids of each; no tokens of an empty one. Raises UserError."""
        job = Encode(text.key, tuple(strings), special, tokens_max)
        answer = await self._serve(caller, sum(map(len, strings)), text, job)
        if isinstance(answer, TooManyTokens):
            return answer
        if not isinstance(answer, Encoded):
            raise self._given_up("prompt", "tokenize")
        return answer.texts

    async def render(
        self,
        caller: str,
        text: TextModel,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        size: int,
        add_generation_prompt: bool,
        characters_max: int,
        tokens_max: int,
        aside: bool = False,
    ) -> Rendered | TooManyTokens | TooManyCharacters:
        """A conversation as text and tokens. `aside`: no request is served with it. Raises UserError."""
        job = Render(text.key, messages, dict(variables), add_generation_prompt, characters_max, tokens_max)
        work = self._aside.do if aside else self._serve
        match await work(caller, size, text, job):
            case Refused(message):
                raise UserError(message, param="messages")
            case Rendered() | TooManyTokens() | TooManyCharacters() as answer:
                return answer
        raise self._given_up("messages", "render with the model's chat template")

    async def count(self, caller: str, text: TextModel, string: str, *, special: bool) -> Counted:
        """Raises UserError."""
        answer = await self._aside.do(caller, len(string), text, Count(text.key, string, special))
        if not isinstance(answer, Counted):
            raise self._given_up("prompt", "tokenize")
        return answer

    async def decode(self, caller: str, text: TextModel, tokens: tuple[int, ...]) -> str:
        """Raises UserError."""
        answer = await self._aside.do(caller, len(tokens), text, Decode(text.key, tokens))
        if not isinstance(answer, Decoded):
            raise self._given_up("tokens", "detokenize")
        return answer.text

    def is_quick(self, text: TextModel, size: int) -> bool:
        """Whether a job over so many characters takes so little that nobody need look whether its client is gone."""
        return size <= SHORT_CHARACTERS and self._suspected_until_s.get(text.key, 0.0) <= monotonic()

    async def _serve(self, caller: str, size: int, text: TextModel, job: Job) -> Answer | None:
        if self.is_quick(text, size):
            self._suspected_until_s.pop(text.key, None)
            answer = await self._short.do(caller, size, text, job)
            if answer is not None:
                return answer
            self._suspected_until_s[text.key] = monotonic() + SUSPECTED_S
            fields = {"characters": size, "limit_s": self._short.within_s}
            log(_logger, logging.WARNING, "a short text took too long", fields)
        return await self._long.do(caller, size, text, job)

    def _given_up(self, param: str, what: str) -> UserError:
        message = f"{param!r} takes more than {self._long.within_s:g} s or too much memory to {what}"
        return UserError(message, param=param, code="text_too_costly")


def characters_of(value: Any) -> int:
    """About how many there are in what a client sent as JSON; where it has very many parts, only that they are many."""
    count, rest = 0, [value]
    while rest and count <= _COUNTED_MAX:
        match rest.pop():
            case str() as text:
                count += len(text)
            case list() as entries:
                count += len(entries)
                rest += entries
            case dict() as entries:
                count += sum(map(len, entries))
                rest += entries.values()
            case _:
                count += 1
    return count

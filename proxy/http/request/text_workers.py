"""Tokenizing and rendering for clients, in processes beside the proxy: a checkpoint's tokenizer or template may take
any time and memory for a client's text, and must take neither from others.

1. The process for short texts does their jobs, several at a time, within `SHORT_S`.
2. If a model took longer than that lately, a process for such models does its jobs, within `SUSPECT_S`, one at a time.
3. The process for long texts does theirs, one at a time, within `LONG_S`.
4. If a model took longer than that lately, another process does its long texts, within `LONG_SUSPECT_S`.
5. Jobs that serve no request (`/tokenize`, `/detokenize`) have a process of their own, so that they delay none.

In each, callers take turns with each model, and the smallest of the jobs is next, but the oldest in every fourth turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec

from aegis.core.errors import UserError
from aegis.core.fair_queue import FairQueue
from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_client import TextProcess
from aegis.models.text.worker_messages import (
    ANSWERS_BYTES_MAX,
    Answer,
    Conversation,
    Count,
    Counted,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Fit,
    Fitted,
    Job,
    Refused,
    Render,
    Rendered,
    TooLarge,
    TooManyCharacters,
    TooManyTokens,
    encoded,
    write_conversation,
)
from aegis.telemetry.logs import log

SHORT_CHARACTERS = 1 << 14
SHORT_S, SUSPECT_S = 0.5, 2.0
LONG_S, LONG_SUSPECT_S = 5.0, 20.0
SHORT_LOAD_S = 2.0
"""For a model's tokenizer, in the process that all short texts wait for."""

SHORT_AT_ONCE = 32
"""With one job at a time, most of the processor's time would go into changing from one process to the other."""

LEFT_S = 1.0
"""That a job goes on for after its client has left. To end its process at once would cost more: it takes about as long
to start the next one, for the price of a processor."""

BARRED_S = 60.0
WAITING_MAX = 4096  # of one caller, for a process, with those that it works on
ASIDE_WAITING_MAX = 64
_MIB = 1 << 20
_COUNTED_MAX = 1 << 16

_NOTHING = msgspec.Raw()
_logger = logging.getLogger(__name__)

Watch = Callable[[Coroutine[Any, Any, "Answer | None"]], Awaitable["Answer | None"]]
"""Ends the given work when no client waits for it any more."""


async def _unwatched(work: Coroutine[Any, Any, Answer | None]) -> Answer | None:
    return await work


@dataclass(slots=True, eq=False)
class _Waiting:
    text: TextModel
    job: msgspec.Raw
    answer: asyncio.Future[Answer | None]


class WorkerQueue:
    """One process and the jobs that wait for it. Event loops may use it one after the other."""

    def __init__(
        self,
        process: TextProcess,
        within_s: float,
        *,
        at_once: int = 1,
        most_waiting: int = WAITING_MAX,
        barred_s: float = 0.0,
    ) -> None:
        """The process gets up to `at_once` jobs at a time, and has `within_s` for them. If one takes too much, the jobs
        of its model are barred for `barred_s`."""
        self.process = process
        self.within_s = within_s
        self._at_once = at_once
        self._most_waiting = most_waiting
        self._waiting_of = Counter[str]()
        self._barred_s = barred_s
        self._barred_until_s: dict[int, float] = {}
        self._queue = FairQueue[_Waiting](most_waiting=most_waiting, is_left=lambda waiting: waiting.answer.done())
        self._working: asyncio.Task[None] | None = None

    def bars(self, text: TextModel) -> bool:
        """Whether a job of the model took too much lately."""
        return self._barred_until_s.get(text.key, 0.0) > monotonic()

    async def do(self, caller: str, size: int, text: TextModel, job: Job) -> Answer | None:
        """None if the job takes too much time or memory, or is of a barred model. Raises UserError if the caller has
        many waiting."""
        message = encoded(job)
        if self._waiting_of[caller] >= self._most_waiting:
            refusal = "many prompts of yours are waiting to be tokenized; try again when they were"
            raise UserError(refusal, status=429, code="too_many_prompts", kind="rate_limit_error")
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(text, message, future)
        self._queue.put(f"{text.key} {caller}", size, waiting)
        self._waiting_of[caller] += 1
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        try:
            return await waiting.answer
        finally:
            waiting.job = _NOTHING  # it may be large, and its place in the queue stays
            self._waiting_of[caller] -= 1
            if not self._waiting_of[caller]:
                del self._waiting_of[caller]

    async def start(self) -> None:
        """Starts the process before there is a job."""
        if self._working is None:
            self._working = asyncio.create_task(self._work(starts=True))
            await self._working

    async def _work(self, *, starts: bool = False) -> None:
        """Works while there are jobs."""
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
            if self.bars(waiting.text):
                _set_answer(waiting, None)
            else:
                batch.append(waiting)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> list[_Waiting]:
        """The jobs of the batch that are still to be done: all but those of the model of which one took too much."""
        jobs = [(waiting.text, waiting.job) for waiting in batch]
        if self._at_once == 1:
            answers = await self._ask_while_wanted(jobs, batch[0].answer)
        else:
            answers = await self.process.ask(jobs, self.within_s)
        if answers is None:
            return []
        if isinstance(answers, int):
            guilty = batch[answers].text
            self._barred_until_s[guilty.key] = monotonic() + self._barred_s
            for waiting in batch:
                if waiting.text is guilty:
                    _set_answer(waiting, None)
            return [waiting for waiting in batch if waiting.text is not guilty]
        for waiting, answer in zip(batch, answers, strict=True):
            _set_answer(waiting, answer)
        return []

    async def _ask_while_wanted(
        self, jobs: Sequence[tuple[TextModel, msgspec.Raw]], answer: asyncio.Future[Answer | None]
    ) -> tuple[Answer, ...] | int | None:
        """None if the client left `LEFT_S` ago, after which the process is ended: the job may take long."""
        asking = asyncio.create_task(self.process.ask(jobs, self.within_s))

        def end_later(answer: asyncio.Future[Answer | None]) -> None:
            if answer.cancelled():
                timer = asyncio.get_running_loop().call_later(LEFT_S, asking.cancel)
                asking.add_done_callback(lambda _: timer.cancel())

        answer.add_done_callback(end_later)
        try:
            await asyncio.wait((asking,))
        finally:
            asking.cancel()
        return None if asking.cancelled() else asking.result()


def _set_answer(waiting: _Waiting, answer: Answer | None) -> None:
    if not waiting.answer.done():
        waiting.answer.set_result(answer)


class TextWorkers:
    """All text workers of one proxy. Each process is started by its first job."""

    def __init__(
        self,
        *,
        short_s: float = SHORT_S,
        suspect_s: float = SUSPECT_S,
        long_s: float = LONG_S,
        long_suspect_s: float = LONG_SUSPECT_S,
    ) -> None:
        few, much = 512 * _MIB, 2048 * _MIB
        short = TextProcess(memory_bytes=few, load_s=SHORT_LOAD_S)
        self._short = WorkerQueue(short, short_s, at_once=SHORT_AT_ONCE, barred_s=BARRED_S)
        self._suspects = WorkerQueue(TextProcess(memory_bytes=few, niceness=5), suspect_s)
        self._long = WorkerQueue(TextProcess(memory_bytes=much, niceness=5), long_s, barred_s=BARRED_S)
        self._long_suspects = WorkerQueue(TextProcess(memory_bytes=much, niceness=6), long_suspect_s)
        aside = TextProcess(memory_bytes=much, niceness=10)
        self._aside = WorkerQueue(aside, long_suspect_s, most_waiting=ASIDE_WAITING_MAX)

    async def start(self) -> None:
        """Starts the process with the most jobs, so that the first request does not wait for it."""
        await self._short.start()

    def close(self) -> None:
        for queue in (self._short, self._suspects, self._long, self._long_suspects, self._aside):
            queue.process.close()

    async def encode(
        self,
        caller: str,
        text: TextModel,
        strings: Sequence[str],
        *,
        special: bool,
        tokens_max: int,
        watch: Watch = _unwatched,
    ) -> tuple[tuple[int, ...], ...] | TooManyTokens:
        """Token ids of each string; no tokens of an empty one. `watch` gets work that may take long. Raises
        UserError."""
        job = Encode(text.key, tuple(strings), special, tokens_max)
        answer = await self._serve(caller, sum(map(len, strings)), text, job, watch)
        if isinstance(answer, TooManyTokens):
            return answer
        if not isinstance(answer, Encoded):
            raise _given_up(answer, "prompt", "tokenize")
        return answer.texts

    async def fit(
        self,
        caller: str,
        text: TextModel,
        texts: Sequence[str | tuple[str, str]],
        *,
        param: str,
        most: int | None,
        tokens_max: int,
        watch: Watch = _unwatched,
    ) -> Fitted | TooManyTokens:
        """Token ids of each text, or pair of texts, for a model that pools, cut to `most` if it is given. Raises
        UserError."""
        size = sum(len(each) if isinstance(each, str) else sum(map(len, each)) for each in texts)
        answer = await self._serve(caller, size, text, Fit(text.key, tuple(texts), most, tokens_max), watch)
        if isinstance(answer, Fitted | TooManyTokens):
            return answer
        raise _given_up(answer, param, "tokenize")

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
        watch: Watch = _unwatched,
    ) -> Rendered | TooManyTokens | TooManyCharacters:
        """A conversation as text and tokens. `aside`: no request is served with it. Raises UserError."""
        conversation = write_conversation(Conversation(messages, dict(variables)))  # too deep a one is refused here
        job = Render(text.key, conversation, add_generation_prompt, characters_max, tokens_max)
        work = self._aside.do(caller, size, text, job) if aside else self._serve(caller, size, text, job, watch)
        match refusal := await work:
            case Refused(message):
                raise UserError(message, param="messages")
            case Rendered() | TooManyTokens() | TooManyCharacters() as answer:
                return answer
        raise _given_up(refusal, "messages", "render with the model's chat template")

    async def count(self, caller: str, text: TextModel, string: str, *, special: bool) -> Counted:
        """Raises UserError."""
        answer = await self._aside.do(caller, len(string), text, Count(text.key, string, special))
        if not isinstance(answer, Counted):
            raise _given_up(answer, "prompt", "tokenize")
        return answer

    async def decode(self, caller: str, text: TextModel, tokens: tuple[int, ...]) -> str:
        """Raises UserError."""
        answer = await self._aside.do(caller, len(tokens), text, Decode(text.key, tokens))
        if not isinstance(answer, Decoded):
            raise _given_up(answer, "tokens", "detokenize")
        return answer.text

    async def _serve(self, caller: str, size: int, text: TextModel, job: Job, watch: Watch) -> Answer | None:
        is_short = size <= SHORT_CHARACTERS
        first, suspects = (self._short, self._suspects) if is_short else (self._long, self._long_suspects)
        if not first.bars(text):
            work = first.do(caller, size, text, job)
            answer = await (work if is_short else watch(work))
            if answer is not None and not (is_short and isinstance(answer, TooLarge)):  # its share was smaller
                return answer
            fields = {"characters": size, "limit_s": first.within_s}
            log(_logger, logging.WARNING, f"a {'short' if is_short else 'long'} text took too much", fields)
        return await watch(suspects.do(caller, size, text, job))


def _given_up(answer: Answer | None, param: str, what: str) -> UserError:
    if isinstance(answer, TooLarge):
        message = f"{param!r} cannot be served: the model makes more than {ANSWERS_BYTES_MAX // _MIB} MiB of it"
        return UserError(message, param=param, code="text_too_large")
    message = f"{param!r} cannot be served: it takes too much time or memory to {what}, or breaks what does"
    return UserError(message, param=param, code="text_too_costly")


def characters_of(value: Any) -> int:
    """About how many characters there are in a client's JSON; if it has very many parts, only that there are many."""
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

"""The choices of one call, each a sequence being generated, driven side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

from msgspec import UNSET, Struct, UnsetType, structs

from aegis.core.model import Pace, Slo
from aegis.core.request import Failure, Sampling, Token
from aegis.models.text.text_model import TextModel
from proxy.http.call_records import CallRecord
from proxy.http.market import Delivery, Delta, Failed, Finished, Market, PromptScores, Reused, SequenceHandle, Served
from proxy.http.openai.echoed_prompt import EchoedPrompt
from proxy.http.request.sampling import GenerationParameters, seed_of
from proxy.http.streaming.pace import SmoothPace, paced
from proxy.http.streaming.transcript import Piece, Transcript

_SUBMITTED_AT_ONCE = 16


class SequenceRequest(Struct, frozen=True):
    """One prompt, checked: `max_tokens` fits. `echo` is what the answer begins with."""

    prompt: tuple[int, ...]
    max_tokens: int
    echo: EchoedPrompt | None = None


class Choice:
    """`index` is its place in the reply."""

    __slots__ = ("_begun", "_ended", "_prompt_scores", "_sequence", "handle", "index", "reused", "slow", "transcript")

    def __init__(
        self,
        index: int,
        sequence: SequenceRequest,
        handle: SequenceHandle,
        text: TextModel | None,
        parameters: GenerationParameters,
    ) -> None:
        self.index = index
        self.handle = handle
        self.transcript = Transcript(
            text,
            sequence.prompt,
            stop=parameters.stop,
            stop_token_ids=parameters.sampling.stop_token_ids,
            min_tokens=parameters.sampling.min_tokens,
            offset=len(sequence.echo.text) if sequence.echo else 0,
            shown=parameters.shown,
        )
        self.reused = 0  # of the prompt's tokens
        self.slow = False  # it was given up because of its grammar
        self._begun = False
        self._ended = False
        self._sequence = sequence
        self._prompt_scores: tuple[Token, ...] = ()

    def take(self, delivery: Delivery) -> Piece | None:
        """The text that the delivery adds, if any. Raises UserError if the sequence failed."""
        match delivery:
            case Delta(tokens):
                return self._next(self.transcript.push(tokens))
            case Finished(reason):
                self._ended = True
                return self._next(self.transcript.finish(reason))
            case Reused(tokens):
                self.reused = min(tokens, len(self._sequence.prompt))
                return None
            case PromptScores(tokens):
                self._prompt_scores = tokens
                return None
            case Failed(kind=kind):
                self._ended = True
                self.slow = kind is Failure.SLOW_GRAMMAR
                raise delivery.error()

    def cancel(self, *, satisfied: bool = False) -> None:
        """Frees the resources of the sequence, unless it has ended."""
        if not self._ended:
            self._ended = True
            self.handle.cancel(satisfied=satisfied)

    def _next(self, piece: Piece) -> Piece:
        if self._begun:
            return piece
        self._begun = True
        echo = self._sequence.echo
        echoed = echo.piece(self._prompt_scores) if echo else Piece()
        self._prompt_scores = ()
        text, tokens = echoed.text + piece.text, echoed.tokens + piece.tokens
        return Piece(text, tokens, piece.finish, first=True, stop=piece.stop)


class PromptDetails(Struct, frozen=True):
    """`cached_tokens` of the prompt were not prefilled, for any of its choices: their KV was kept from before."""

    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """`reasoning_tokens`: with the marks around them."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """With `completion_tokens_details` where the chat template marks reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class GenerationRequest:
    """All sequences of one request. The creator calls `cancel` when the reply has ended, however it ended."""

    def __init__(self, served: Served, sequences: Sequence[SequenceRequest]) -> None:
        self.served = served
        self.sequences = sequences
        self.choices: list[Choice] = []
        self._first: SequenceHandle | None = None  # of the prompt at hand
        self._any: SequenceHandle | None = None
        self._arrival_ns = time.monotonic_ns()

    @classmethod
    async def submit(
        cls,
        market: Market,
        served: Served,
        sequences: Sequence[SequenceRequest],
        parameters: GenerationParameters,
        record: CallRecord,
    ) -> GenerationRequest:
        """Submits them all, or none, and lets other calls come in between. Raises UserError."""
        call = cls(served, sequences)
        try:
            for sequence in sequences:
                call._first = None
                with market.together():
                    for which in range(parameters.choices):
                        call.choices.append(call._submit(market, sequence, parameters, which, record))
                        if len(call.choices) % _SUBMITTED_AT_ONCE == 0:
                            await asyncio.sleep(0)
        except BaseException:
            call.cancel()
            raise
        return call

    def _submit(
        self,
        market: Market,
        sequence: SequenceRequest,
        parameters: GenerationParameters,
        which: int,
        record: CallRecord,
    ) -> Choice:
        sampling = structs.replace(
            parameters.sampling,
            max_tokens=sequence.max_tokens,
            seed=seed_of(record.seed, which),
            prompt_logprobs=None if sequence.echo is None else parameters.sampling.logprobs,
        )

        def submit(sampling: Sampling, sent: tuple[int, ...]) -> SequenceHandle:
            model, first = self.served.spec.model, self._first
            handle = market.submit(
                model,
                sequence.prompt,
                sampling,
                priority=parameters.priority,
                sent=sent,
                first_choice=first,
                among=self._any,
            )
            self._first, self._any = first or handle, handle
            return handle

        index = len(self.choices)
        return Choice(index, sequence, record.handle(index, sampling, submit), self.served.text, parameters)

    def usage(self) -> Usage:
        prompt = sum(len(sequence.prompt) for sequence in self.sequences)
        generated = sum(choice.transcript.generated for choice in self.choices)
        return Usage(prompt, generated, prompt + generated, PromptDetails(self._cached()))

    def _cached(self) -> int:
        """The tokens that the first choice of each prompt found kept: the others may go on from its KV."""
        of_each = max(len(self.choices) // len(self.sequences), 1)
        return sum(choice.reused for choice in self.choices[::of_each])

    async def run(self, deliver: Callable[[Choice, Piece], Awaitable[None]], pace: Pace = "made") -> None:
        """Hands on each choice's pieces as they come, or at a smooth pace. Raises UserError if one of them failed."""
        run = _run if pace == "made" else partial(_run_smoothly, slo=self.served.spec.slo, arrival_ns=self._arrival_ns)
        if len(self.choices) == 1:
            await run(self.choices[0], deliver)
            return
        tasks = [asyncio.create_task(run(choice, deliver)) for choice in self.choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def slow(self) -> bool:
        """Whether one of its outputs was given up because of its grammar."""
        return any(choice.slow for choice in self.choices)

    def status(self) -> str:
        """The reason for which the first of its sequences waits, and what is amiss with its model meanwhile."""
        before, detail = self.choices[0].handle.before(), self.served.detail
        told = "waiting" if before is None else f"waiting, {before} requests come before this one"
        return f"{told}; of the model: {detail}" if detail else told

    def cancel(self) -> None:
        for choice in self.choices:
            choice.cancel()


_Deliver = Callable[[Choice, Piece], Awaitable[None]]


async def _run(choice: Choice, deliver: _Deliver) -> None:
    async for delivery in choice.handle:
        piece = choice.take(delivery)
        if piece is not None:
            await deliver(choice, piece)
        if choice.transcript.finished:
            choice.cancel(satisfied=True)
            return
    raise AssertionError("a handle ended before its sequence")


async def _run_smoothly(choice: Choice, deliver: _Deliver, *, slo: Slo, arrival_ns: int) -> None:
    pace = SmoothPace[Piece](slo, arrival_ns)
    async with aclosing(paced(_token_by_token(choice), _tokens_of, pace, time.monotonic_ns)) as pieces:
        async for piece in pieces:
            await deliver(choice, piece)


async def _token_by_token(choice: Choice) -> AsyncIterator[Piece]:
    """Read as they are made: a stop string ends the sequence when it is made, and not when it leaves."""
    async for delivery in choice.handle:
        for each in _single(delivery):
            piece = choice.take(each)
            if piece is not None:
                yield piece
            if choice.transcript.finished:
                choice.cancel(satisfied=True)
                return
    raise AssertionError("a handle ended before its sequence")


def _single(delivery: Delivery) -> Sequence[Delivery]:
    return [Delta((token,)) for token in delivery.tokens] if isinstance(delivery, Delta) else [delivery]


def _tokens_of(piece: Piece) -> int:
    """The tokens of the piece that the pace counts: none where it only says that the stream has ended."""
    return int(piece.finish is None or bool(piece.tokens))

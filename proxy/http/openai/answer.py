"""From the choices of a call to the reply: an event stream, or one JSON object with the same content."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

from fastapi import Request, Response
from msgspec import Raw, structs

from aegis.core.errors import UserError
from aegis.core.model import Pace
from aegis.telemetry.logs import log_text
from proxy.http.call_records import RecordedCall
from proxy.http.client_disconnect import while_connected
from proxy.http.market import Served
from proxy.http.openai.choices import Choice, GenerationRequest, SequenceRequest
from proxy.http.openai.reply_shape import Shape
from proxy.http.replies import encode, json_reply
from proxy.http.request.sampling import GenerationParameters, seed_for
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_ids import id_of, is_new
from proxy.http.request_notes import note
from proxy.http.security.admission import AdmittedRequest, who
from proxy.http.security.key_guard import caller_of
from proxy.http.security.large_bodies import release
from proxy.http.settings import answer_turns_of, keep_alive_of, market_of, records_of, settings_of, trials_of
from proxy.http.streaming.event_stream import Emit, EventStream
from proxy.http.streaming.transcript import Piece, join

WHOLE_BYTES_MAX = 12 << 20
"""Of an answer that is no stream. Where more is made and not taken yet, connections are cut (`UNREAD_BYTES_MAX`)."""

_FEW = 256
"""Tokens that are told in a few milliseconds, with all their alternatives."""

_logger = logging.getLogger(__name__)


async def answer(
    request: Request,
    served: Served,
    sequences: Sequence[SequenceRequest],
    parameters: GenerationParameters,
    shape: Shape,
    admitted: AdmittedRequest,
) -> Response:
    """Submits the sequences and answers with them. Raises UserError; ClientGone if the client has left."""
    model, settings = served.spec.model, settings_of(request)
    if settings.logs_prompts:
        _log_prompts(request, served, sequences)
    release(request.scope)
    admitted.permit.use(sum(len(sequence.prompt) for sequence in sequences))
    with ExitStack() as undoing:
        undoing.callback(shape.closed)
        record = await records_of(request).open(_recorded_call(request, served, sequences, parameters))
        undoing.callback(record.close)
        call = await GenerationRequest.submit(market_of(request), served, sequences, parameters, record)
        undoing.callback(call.cancel)
        undoing.pop_all()
        permit = admitted.keep()

    def close() -> None:
        call.cancel()
        record.close()
        shape.closed()
        usage = call.usage()
        permit.close(usage.completion_tokens)
        if call.slow:
            trials_of(request).was_slow(who(request))
        note(request.scope, model=model, prompt_tokens=usage.prompt_tokens, tokens=usage.completion_tokens)

    if parameters.stream:
        writer = _writer(call, shape, parameters.pace or served.pace or settings.pace)
        return EventStream(writer, keep_alive_of(request), close=close, status=call.status, failed=shape.failed)
    try:
        return await _whole(request, call, shape)
    finally:
        close()


async def _until_stopped(running: Coroutine[None, None, None], stop: asyncio.Event | None) -> None:
    """Returns when all pieces were handed on, or when the answer shall end where it is."""
    if stop is None:
        await running
        return
    run, stopped = asyncio.create_task(running), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((run, stopped), return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
    finally:
        run.cancel()
        stopped.cancel()
        await asyncio.gather(run, stopped, return_exceptions=True)


def _log_prompts(request: Request, served: Served, sequences: Sequence[SequenceRequest]) -> None:
    for sequence in sequences:
        text = served.text.decode(sequence.prompt) if served.text else str(list(sequence.prompt))
        log_text(_logger, "prompt", {"request_id": id_of(request.scope), "model": served.spec.model}, text)


def _recorded_call(
    request: Request, served: Served, sequences: Sequence[SequenceRequest], parameters: GenerationParameters
) -> RecordedCall:
    request_id, caller = id_of(request.scope), caller_of(request).name
    seed = parameters.seed if parameters.seed is not None else seed_for(caller, request_id)
    return RecordedCall(
        request_id,
        f"{caller} {request.scope['path']} {parameters.fingerprint}",
        served.spec.model,
        served.spec.slo,
        structs.replace(parameters.sampling, max_tokens=sequences[0].max_tokens, seed=seed),
        len(sequences) * parameters.choices,
        is_new(request),
        caller,
    )


async def _whole(request: Request, call: GenerationRequest, shape: Shape) -> Response:
    pieces: list[list[Piece]] = [[] for _ in call.choices]
    least = 0  # bytes of the answer

    async def collect(choice: Choice, piece: Piece) -> None:
        nonlocal least
        pieces[choice.index].append(piece)
        least += _least_bytes(piece)
        _check_size(least)

    await while_connected(request.receive, _until_stopped(call.run(collect), shape.stop))
    size = sum(len(piece.tokens) for of_choice in pieces for piece in of_choice)

    def told(index: int) -> Raw:
        return Raw(encode(shape.choice(index, join(pieces[index]))))

    async with answer_turns_of(request) if size > _FEW else nullcontext():
        choices, nbytes = list[Raw](), 0
        for index in range(len(pieces)):
            choices.append(await beside_loop(partial(told, index), size, few=_FEW))
            nbytes += memoryview(choices[-1]).nbytes
            _check_size(nbytes)
        reply = shape.whole(choices, call.usage())
    await shape.kept()
    return json_reply(reply)


def _least_bytes(piece: Piece) -> int:
    """Of JSON that tells it: its text, and of each logprob a token of one character and a number."""
    told = sum([1 + len(scored.token.top) for scored in piece.tokens if scored.token.logprob is not None])
    return len(piece.text) + 9 * told


def _check_size(nbytes: int) -> None:
    """Raises UserError where an answer that is no stream has more than may be kept."""
    if nbytes > WHOLE_BYTES_MAX:
        message = f"the answer has more than {WHOLE_BYTES_MAX >> 20} MiB: send 'stream': true, or ask for less"
        raise UserError(message, code="answer_too_large")


def _writer(call: GenerationRequest, shape: Shape, pace: Pace) -> Callable[[Emit], Awaitable[None]]:
    async def write(emit: Emit) -> None:
        unsent: dict[int, bytes] = {}  # what a choice told and could not send, as the connection took nothing

        async def tell(choice: Choice, piece: Piece) -> None:
            if told := await beside_loop(lambda: shape.told(choice.index, piece), len(piece.tokens), few=_FEW):
                unsent[choice.index] = told
                await emit(told)
                del unsent[choice.index]

        if begun := shape.begun():
            await emit(begun)
        await _until_stopped(call.run(tell, pace), shape.stop)
        ended = shape.ended(call.usage())
        await shape.kept()
        await emit(b"".join([*unsent.values(), ended]))

    return write

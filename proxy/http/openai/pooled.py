"""Texts for models that pool, and their vectors: what embeddings, reranking and scores have in common.

Each text is a sequence of its own that ends with its prefill, so the schedulers see what they always see; those of a
call are submitted together and share steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from fastapi import Request
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.request import PRIORITY_MAX, Sampling
from aegis.models.text.worker_messages import TooManyTokens
from aegis.telemetry.logs import log_text
from proxy.http.client_disconnect import while_connected
from proxy.http.market import Delta, Failed, Finished, Market, SequenceHandle, Served
from proxy.http.openai.models import longest
from proxy.http.parameters import AnyText, Flag, Integer
from proxy.http.request.body import ModelBody
from proxy.http.request.prompts import characters_max, known, needs_tokenizer, too_many_characters
from proxy.http.request_ids import id_of
from proxy.http.request_notes import note
from proxy.http.security.admission import admitted, who
from proxy.http.security.large_bodies import release
from proxy.http.settings import market_of, settings_of, texts_of

CHARACTERS_MAX = 1 << 24
"""Of all texts of one call, a text counted in each of its pairs: a short body may have one text in a thousand pairs."""

_SUBMITTED_AT_ONCE = 16
_logger = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]


class PooledBody(ModelBody):
    """`truncate` as Text Embeddings Inference has it, `truncate_prompt_tokens` as vLLM has it."""

    truncate = Flag(None, about="Cut texts that are too long; else they are refused")
    truncate_prompt_tokens = Integer(
        None, low=-1, about="Cut texts to so many tokens; -1: to as many as the model takes"
    )
    priority = Integer(0, low=-PRIORITY_MAX, high=PRIORITY_MAX, about="The lower, the earlier")
    user = AnyText()


class PooledText(Struct, frozen=True):
    """One text or pair as tokens; of a pair the second text begins at `pair_at`."""

    tokens: tuple[int, ...]
    pair_at: int = 0


class PooledUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


def usage_of(texts: Sequence[PooledText]) -> PooledUsage:
    tokens = sum(len(text.tokens) for text in texts)
    return PooledUsage(tokens, tokens)


def cut_to(body: PooledBody, served: Served, *, truncates: bool) -> int | None:
    """How many tokens a text is cut to; None: what is too long is refused. `truncates`: unless it is asked for, or not.
    Raises UserError."""
    most, tokens = longest(served), body.truncate_prompt_tokens
    if tokens == 0:
        raise body.invalid("truncate_prompt_tokens", "must be -1 or at least 1, not 0")
    if tokens is not None:
        return most if tokens < 0 else min(tokens, most)
    wanted = truncates if body.truncate is None else body.truncate
    return most if wanted else None


async def fitted(
    request: Request,
    body: PooledBody,
    served: Served,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    param: str,
    cut: int | None,
) -> list[PooledText]:
    """Tokens of texts or pairs. Raises UserError; ClientGone where nobody waits any more."""
    text, spec, most = needs_tokenizer(served, param), served.spec, longest(served)
    counts = [len(each) if isinstance(each, str) else sum(map(len, each)) for each in texts]
    if cut is None and max(counts) > characters_max(spec, text):
        raise too_many_characters(param, max(counts), spec)
    if (together := sum(counts)) > CHARACTERS_MAX:
        message = f"{param!r} makes texts of {together} characters together, which may be {CHARACTERS_MAX}: send fewer"
        raise UserError(message, param=param, code="texts_too_large")
    fitting = texts_of(request).fit(
        who(request),
        text,
        list(texts),
        param=param,
        most=cut,
        tokens_max=most,
        watch=partial(while_connected, request.receive),
    )
    found = await fitting
    if isinstance(found, TooManyTokens):
        raise too_long(param, found.count, served)
    pairs = zip(found.texts, found.pairs_at, strict=True)
    return [checked(body, param, PooledText(known(body, param, tokens, spec), at)) for tokens, at in pairs]


def checked(body: PooledBody, param: str, text: PooledText) -> PooledText:
    """Raises UserError if it has no tokens."""
    if not text.tokens:
        raise body.invalid(param, "has a text without any tokens")
    return text


def too_long(param: str, tokens: int, served: Served) -> UserError:
    told = f"a text of {param!r} has {tokens} tokens, {served.spec.model!r} takes {longest(served)}"
    return UserError(f"{told}; send 'truncate': true to cut it", param=param, code="context_length_exceeded")


async def vectors_of(request: Request, body: PooledBody, served: Served, texts: Sequence[PooledText]) -> Vectors:
    """`[texts, dimensions]`. Raises UserError; ClientGone if the client has left."""
    tokens, priority = usage_of(texts).prompt_tokens, body.priority
    if settings_of(request).logs_prompts:
        _log(request, served, texts)
    async with admitted(request, served) as admission:
        release(request.scope)
        admission.permit.use(tokens)
        handles = list[SequenceHandle]()
        try:
            for first in range(0, len(texts), _SUBMITTED_AT_ONCE):
                _submit(market_of(request), served, texts[first : first + _SUBMITTED_AT_ONCE], priority, handles)
                await asyncio.sleep(0)
            found = await while_connected(request.receive, _all(handles))
        finally:
            for handle in handles:
                handle.cancel()
            note(request.scope, model=served.spec.model, prompt_tokens=tokens, tokens=0)
    vectors = np.frombuffer(b"".join(found), "<f4").reshape(len(texts), -1)
    if not np.isfinite(vectors).all():
        raise UserError("the model made a vector of what are no numbers", status=500, kind="server_error")
    return vectors


def _submit(
    market: Market, served: Served, texts: Sequence[PooledText], priority: int, handles: list[SequenceHandle]
) -> None:
    """Adds their handles; with those that are there already they are one answer."""
    with market.together():
        for text in texts:
            sampling = Sampling(max_tokens=1, temperature=0.0, pools=True, pair_at=text.pair_at)
            among, model = handles[0] if handles else None, served.spec.model
            handles.append(market.submit(model, text.tokens, sampling, priority=priority, among=among))


async def _all(handles: Sequence[SequenceHandle]) -> list[bytes]:
    """Each is read as it comes, for what is not read counts against the answer. Raises UserError if one has failed."""
    tasks = [asyncio.create_task(_vector(handle)) for handle in handles]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _vector(handle: SequenceHandle) -> bytes:
    vector = b""
    async for delivery in handle:
        match delivery:
            case Delta(tokens):
                vector = tokens[0].vector or b""
            case Failed():
                raise delivery.error()
            case Finished():
                return vector
    raise AssertionError("a handle ended before its sequence")


def _log(request: Request, served: Served, texts: Sequence[PooledText]) -> None:
    fields = {"request_id": id_of(request.scope), "model": served.spec.model}
    for text in texts:
        told = served.text.decode(text.tokens) if served.text else str(list(text.tokens))
        log_text(_logger, "prompt", fields, told)

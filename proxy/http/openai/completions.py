"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import time

from fastapi import Request, Response

from aegis.core.errors import UserError
from proxy.http.direct_routes import direct_router
from proxy.http.fields import Unsupported
from proxy.http.market import Served
from proxy.http.openai.answer import answer
from proxy.http.openai.choices import SequenceRequest
from proxy.http.openai.completion_replies import Completion, CompletionShape
from proxy.http.openai.echoed_prompt import EchoedPrompt, texts_of_tokens
from proxy.http.openai.held_requests import held
from proxy.http.openai.models import find_servable
from proxy.http.openapi import ASKING, EVENTS, operation
from proxy.http.parameters import Flag, Integer, refuse_unsupported
from proxy.http.request.body import read_body
from proxy.http.request.prompts import Prompt, PromptBody, max_tokens_for, read_prompts
from proxy.http.request.sampling import (
    CHOICES_MAX,
    LOGPROBS_MAX,
    GenerationBody,
    GenerationParameters,
    check_sequences,
    read_parameters,
)
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_ids import request_id_for
from proxy.http.security.admission import AdmittedRequest, admitted
from proxy.http.security.large_bodies import SMALL_BYTES
from proxy.http.settings import market_of, settings_of
from proxy.http.structured.output_format import check_grammar

DEFAULT_MAX_TOKENS = 16
PROMPT_LOGITS_MAX = 1 << 28  # of one prompt, all tokens' together: 1 GiB in float32
ECHOED_VALUES_MAX = 1 << 18  # logprobs of prompts in one answer that is no stream: 8 to 12 MiB of JSON

router = direct_router()


class CompletionBody(GenerationBody, PromptBody):
    logprobs = Integer(None, low=0, high=LOGPROBS_MAX)
    echo = Flag(False)
    best_of = Integer(None, low=1, high=CHOICES_MAX, about="1, or as many as n")
    suffix = Unsupported("")


@router.post(
    "/v1/completions",
    **operation("Continue prompts", Completion, takes=CompletionBody, kinds=(EVENTS,), problems=ASKING),
)
async def create_completion(request: Request) -> Response:
    body = await read_body(request, CompletionBody, settings_of(request).body_bytes_max)
    return await held(request, body, lambda: _complete(request, body))


async def _complete(request: Request, body: CompletionBody) -> Response:
    served = find_servable(market_of(request), body)
    body.elsewhere("messages", "send 'prompt' here, or 'messages' to /v1/chat/completions")
    body.elsewhere("max_completion_tokens", "it is 'max_tokens' here")
    logprobs, max_tokens = body.logprobs, body.max_tokens
    parameters = await beside_loop(
        lambda: read_parameters(body, served, max_tokens=max_tokens, logprobs=logprobs),
        body.nbytes,
        few=SMALL_BYTES,
    )
    echo = body.echo
    body.unsupported("best_of", tuple({1: None, parameters.choices: None}))
    refuse_unsupported(body, CompletionBody)
    async with admitted(request, served) as admission:
        return await _generate(request, body, served, parameters, admission, echo=echo, logprobs=logprobs is not None)


async def _generate(
    request: Request,
    body: CompletionBody,
    served: Served,
    parameters: GenerationParameters,
    admission: AdmittedRequest,
    *,
    echo: bool,
    logprobs: bool,
) -> Response:
    prompts = await read_prompts(request, body, served)
    body.end()
    check_sequences([prompt.tokens for prompt in prompts], parameters)
    if echo and parameters.sampling.logprobs is not None and not parameters.stream:
        _check_echo(sum(len(prompt.tokens) for prompt in prompts) * parameters.choices, parameters.sampling.logprobs)
    if parameters.held_to:
        await check_grammar(request, served, parameters.held_to)
    sequences = await _sequences_of(served, prompts, parameters, echo)
    shape = CompletionShape(
        id=f"cmpl-{request_id_for(request, parameters.request_id)}",
        created_s=int(time()),
        model=served.spec.model,
        text=served.text,
        logprobs=logprobs,
        token_ids=parameters.return_token_ids,
        include_usage=parameters.include_usage,
    )
    return await answer(request, served, sequences, parameters, shape, admission)


async def _sequences_of(
    served: Served, prompts: Sequence[Prompt], parameters: GenerationParameters, echo: bool
) -> list[SequenceRequest]:
    work = [partial(_sequence_of, served, prompt, parameters, echo) for prompt in prompts]
    if echo and parameters.sampling.logprobs is not None:  # each takes long, and others come in between
        return [await beside_loop(one, len(prompt.tokens), few=0) for one, prompt in zip(work, prompts, strict=True)]
    return await beside_loop(lambda: [one() for one in work], sum(len(prompt.tokens) for prompt in prompts))


def _sequence_of(served: Served, prompt: Prompt, parameters: GenerationParameters, echo: bool) -> SequenceRequest:
    max_tokens = max_tokens_for(served, len(prompt.tokens), parameters, default=DEFAULT_MAX_TOKENS, param="prompt")
    if not echo:
        return SequenceRequest(prompt.tokens, max_tokens)
    text, texts = prompt.text, list[str]()
    if parameters.sampling.logprobs is not None:
        _check_prompt_logits(served, len(prompt.tokens))
        texts = texts_of_tokens(served.text, prompt.tokens)
    if text is None:
        text = served.text.decode(prompt.tokens) if served.text else ""
    told = parameters.sampling.logprobs is not None or parameters.return_token_ids
    return SequenceRequest(prompt.tokens, max_tokens, EchoedPrompt(text, prompt.tokens if told else (), texts))


def _check_echo(tokens: int, logprobs: int) -> None:
    """Raises UserError if what is told of prompts alone would be too large for one answer."""
    values = tokens * (1 + logprobs)
    if values > ECHOED_VALUES_MAX:
        message = (
            f"'echo' would tell {values} logprobs in one answer, more than {ECHOED_VALUES_MAX}: "
            "ask for fewer choices or logprobs, or send 'stream': true"
        )
        raise UserError(message, param="echo", code="answer_too_large")


def _check_prompt_logits(served: Served, tokens: int) -> None:
    """Raises UserError if the logprobs of a prompt would take more memory than one request may."""
    most = PROMPT_LOGITS_MAX // served.spec.manifest.vocab_size
    if tokens > most:
        message = f"the prompt has {tokens} tokens; with 'echo', 'logprobs' are given for up to {most} of this model's"
        raise UserError(message, param="echo")

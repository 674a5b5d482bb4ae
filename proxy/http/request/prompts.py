"""The prompts of a completion request, and whether a model can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from fastapi import Request
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.model import ModelSpec
from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_messages import TooManyTokens
from proxy.http.client_disconnect import while_connected
from proxy.http.fields import Fields, Schema
from proxy.http.market import Served
from proxy.http.parameters import Anything, Flag, required
from proxy.http.request.sampling import TOKEN_ID, GenerationParameters, checked_token_ids
from proxy.http.request.shared_token_ids import shared_ids
from proxy.http.request.worker_thread import beside_loop
from proxy.http.security.admission import who
from proxy.http.settings import texts_of

PROMPTS_MAX = 1024
PROMPT_TOKENS_MAX = 1 << 22
_COUNTED_MAX = 1 << 16
_SHRINKS = 4  # the factor by which normalizers may shorten a text that is worth tokenizing


_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKENS: Schema = {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": PROMPT_TOKENS_MAX}
_SEVERAL: Schema = {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1, "maxItems": PROMPTS_MAX}


class SpecialTokensBody(Fields):
    add_special_tokens = Flag(True)


class PromptBody(SpecialTokensBody):
    prompt = required(Anything({"anyOf": [_TEXT, _TOKENS, _SEVERAL]}))


class Prompt(Struct, frozen=True):
    """`text` as the client gave it, None if it gave token ids."""

    tokens: tuple[int, ...]
    text: str | None = None


async def read_prompts(request: Request, body: PromptBody, served: Served) -> list[Prompt]:
    """`prompt` as a string, a list of strings, token ids, or a list of lists of them. Raises UserError; ClientGone
    where nobody waits any more."""
    special = body.add_special_tokens
    entries = read_entries(body, "prompt", body.prompt, PROMPTS_MAX, "prompts")
    if isinstance(entries[0], str):
        return await _tokenized(request, body, served, cast("list[str]", entries), special=special)
    return await beside_loop(lambda: [_checked(body, entry, served) for entry in entries], sum(map(len, entries)))


def read_entries(fields: Fields, name: str, value: Any, most: int, called: str) -> list[str | list[Any]]:
    """A text, a list of texts, a list of token ids or a list of such lists, as a list; the ids are still to be checked.
    Those that may be `most` are `called` so in a refusal. Raises UserError."""
    form = "must be a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fields.invalid(name, form)
    if not value:
        raise fields.invalid(name, "is empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds != {str} and kinds != {list}:
        raise fields.invalid(name, form)
    if len(value) > most:
        raise fields.invalid(name, f"may hold at most {most} {called}, not {len(value)}")
    return value


def _checked(fields: Fields, entry: str | list[Any], served: Served) -> Prompt:
    assert isinstance(entry, list)
    return _not_empty(fields, Prompt(checked_token_ids(fields, "prompt", entry, served.spec)))


async def _tokenized(
    request: Request, fields: Fields, served: Served, strings: list[str], *, special: bool
) -> list[Prompt]:
    text = needs_tokenizer(served, "prompt")
    for string in strings:
        if len(string) > characters_max(served.spec, text):
            raise too_many_characters("prompt", len(string), served.spec)
    encoding = texts_of(request).encode(
        who(request),
        text,
        strings,
        special=special,
        tokens_max=tokens_max(served.spec),
        watch=partial(while_connected, request.receive),
    )
    encoded = await encoding
    if isinstance(encoded, TooManyTokens):
        raise too_many_tokens("prompt", encoded.count, served.spec)
    pairs = zip(strings, encoded, strict=True)
    return [_not_empty(fields, Prompt(known(fields, "prompt", ids, served.spec), string)) for string, ids in pairs]


def _not_empty(fields: Fields, prompt: Prompt) -> Prompt:
    if not prompt.tokens:
        raise fields.invalid("prompt", "is empty")
    return prompt


def characters_max(spec: ModelSpec, text: TextModel) -> int:
    """The largest number of characters of a text that is tokenized at all, because a long one takes long: no model
    could hold a longer one."""
    return _SHRINKS * spec.manifest.context_tokens * max(text.token_characters_max, 1)


def tokens_max(spec: ModelSpec) -> int:
    """The largest number of tokens of a prompt that is examined further."""
    return max(spec.manifest.context_tokens, _COUNTED_MAX)


def too_many_characters(param: str, count: int, spec: ModelSpec) -> UserError:
    context = spec.manifest.context_tokens
    message = f"{count} characters are more than {spec.model!r}, which has a context of {context} tokens, can hold"
    return UserError(message, param=param, code="context_length_exceeded")


def too_many_tokens(param: str, count: int, spec: ModelSpec) -> UserError:
    message = f"the prompt has {count} tokens; {spec.model!r} has a context of {spec.manifest.context_tokens} tokens"
    return UserError(message, param=param, code="context_length_exceeded")


def known(fields: Fields, param: str, tokens: Sequence[int], spec: ModelSpec) -> tuple[int, ...]:
    """The tokens of `param`. Raises UserError if the model has no embedding for one of them."""
    vocabulary, highest = spec.manifest.vocab_size, max(tokens, default=0)
    if highest >= vocabulary:
        raise fields.invalid(param, f"has a token, {highest}, beyond the model's vocabulary of {vocabulary}")
    return shared_ids(tokens)


def needs_tokenizer(served: Served, param: str) -> TextModel:
    """Raises UserError if the model has none."""
    if served.text is None:
        message = f"model {served.spec.model!r} has no tokenizer: send its prompts as token ids to /v1/completions"
        raise UserError(message, param=param, code="no_tokenizer")
    return served.text


def max_tokens_for(
    served: Served,
    prompt_tokens: int,
    parameters: GenerationParameters,
    *,
    default: int | None,
    param: str,
    limit: str = "max_tokens",
) -> int:
    """The number of tokens that may be generated: as many as the client asked for, else as many as fit, at most
    `default`. `param` is where the prompt was, `limit` where the client said how many.

    Raises UserError with both lengths if prompt and answer do not fit both the model's context and the KV memory.
    """
    model, context = served.spec.model, served.spec.manifest.context_tokens
    most = min(context, served.kv_limit_tokens)
    least = parameters.max_tokens or max(parameters.sampling.min_tokens, 1)
    if prompt_tokens + least <= most:
        return parameters.max_tokens or max(least, min(most - prompt_tokens, default or most))
    where = f"{model!r} has a context of {context} tokens"
    if most < context:
        where = f"the KV memory of an instance holds at most {most} tokens of {model!r}"
    lengths = f"the prompt has {prompt_tokens} tokens and {least} are to be generated, {prompt_tokens + least} in all"
    raise UserError(
        f"{lengths}; {where}",
        param=param if prompt_tokens >= most else limit if parameters.max_tokens else "min_tokens",
        code="context_length_exceeded",
    )

"""The prompts of a completion request, and whether a model can hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.model import ModelSpec
from aegis.models.text import TextModel
from proxy.http.boundary import Served
from proxy.http.fields import Fields
from proxy.http.sampling import Wish, checked_token_ids

PROMPTS_MAX = 1024
PROMPT_TOKENS_MAX = 1 << 22
_IN_LOOP = 2048  # characters or tokens that are worked on in a fraction of a millisecond

_SHRINKS = 4  # what normalizers may take out of a text that is worth tokenizing

T = TypeVar("T")


class Prompt(Struct, frozen=True):
    """`text` as the client gave it, None where it gave token ids."""

    tokens: tuple[int, ...]
    text: str | None = None


async def read_prompts(fields: Fields, served: Served) -> list[Prompt]:
    """`prompt` as a string, a list of strings, token ids, or a list of lists of them. Raises UserError."""
    value = fields.take("prompt")
    special = fields.flag("add_special_tokens", True)
    if value is None:
        raise fields.refusal("prompt", "is required")
    entries = _entries(fields, value)
    return await beside_loop(
        lambda: [_read_one(fields, entry, served, special) for entry in entries], sum(map(len, entries))
    )


def _entries(fields: Fields, value: Any) -> list[str | list[Any]]:
    form = "must be a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fields.refusal("prompt", form)
    if not value:
        raise fields.refusal("prompt", "is empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds != {str} and kinds != {list}:
        raise fields.refusal("prompt", form)
    if len(value) > PROMPTS_MAX:
        raise fields.refusal("prompt", f"may hold at most {PROMPTS_MAX} prompts, not {len(value)}")
    return value


def _read_one(fields: Fields, entry: str | list[Any], served: Served, special: bool) -> Prompt:
    if isinstance(entry, list):
        prompt = Prompt(checked_token_ids(fields, "prompt", entry, served.spec))
    else:
        text = needs_tokenizer(served, "prompt")
        check_characters("prompt", len(entry), served.spec, text)
        tokens = text.encode(entry, add_special_tokens=special) if entry else ()
        prompt = Prompt(known(fields, "prompt", tokens, served.spec), entry)
    if not prompt.tokens:
        raise fields.refusal("prompt", "is empty")
    return prompt


def check_characters(param: str, count: int, spec: ModelSpec, text: TextModel) -> None:
    """Before a text is tokenized, which takes long where it is. Raises UserError where the model cannot hold it."""
    context = spec.manifest.context_tokens
    bound = _SHRINKS * context
    if count > bound and count > bound * text.token_characters_max:
        message = f"{count} characters are more than {spec.model!r}, which has a context of {context} tokens, can hold"
        raise UserError(message, param=param, code="context_length_exceeded")


async def encode(text: TextModel, string: str, *, special: bool) -> tuple[int, ...]:
    """Token ids of `string`, with the tokens the tokenizer adds around any text where `special`."""
    return await beside_loop(lambda: tuple(text.encode(string, add_special_tokens=special)), len(string))


async def beside_loop(work: Callable[[], T], size: int) -> T:
    """What `work` makes of `size` characters or tokens: in a thread, unless they are few."""
    return work() if size <= _IN_LOOP else await asyncio.to_thread(work)


def known(fields: Fields, param: str, tokens: Sequence[int], spec: ModelSpec) -> tuple[int, ...]:
    """What a tokenizer made of `param`. Raises UserError where the model has no embedding for a token of it."""
    vocabulary, highest = spec.manifest.vocab_size, max(tokens, default=0)
    if highest >= vocabulary:
        raise fields.refusal(param, f"has a token, {highest}, beyond the model's vocabulary of {vocabulary}")
    return tuple(tokens)


def needs_tokenizer(served: Served, param: str) -> TextModel:
    """Raises UserError where the model has none."""
    if served.text is None:
        message = f"model {served.spec.model!r} has no tokenizer: send its prompts as token ids to /v1/completions"
        raise UserError(message, param=param, code="no_tokenizer")
    return served.text


def max_tokens_for(served: Served, prompt_tokens: int, wish: Wish, *, default: int | None, param: str) -> int:
    """How many tokens may be generated: as many as the client asked for, else as many as fit, at most `default`.

    Raises UserError with both lengths where prompt and answer do not fit both the model's context and the KV memory.
    """
    model, context = served.spec.model, served.spec.manifest.context_tokens
    limit = min(context, served.kv_limit_tokens)
    least = wish.max_tokens or max(wish.sampling.min_tokens, 1)
    if prompt_tokens + least <= limit:
        return wish.max_tokens or max(least, min(limit - prompt_tokens, default or limit))
    where = f"{model!r} has a context of {context} tokens"
    if limit < context:
        where = f"the KV memory of an instance holds at most {limit} tokens of {model!r}"
    lengths = f"the prompt has {prompt_tokens} tokens and {least} are to be generated, {prompt_tokens + least} in all"
    raise UserError(
        f"{lengths}; {where}",
        param=param if prompt_tokens >= limit else "max_tokens",
        code="context_length_exceeded",
    )

"""What a server cannot be asked, told before anything is measured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from aegis.admin_client import check_address
from aegis.core.errors import UserError
from bench.interference.suite import SHORT_TOKENS, Setting
from bench.serve.client import open_session
from bench.serve.models import Card, choose, root_of, served_models

_SILENCE_S = 60.0


def refuse_unmeasurable(setting: Setting) -> None:
    """Asks the server for its models. Raises UserError, which names the option that is at fault."""
    check_address(setting.base_url, "--base-url")
    asyncio.run(_refuse(setting))


async def _refuse(setting: Setting) -> None:
    async with open_session(os.environ.get("OPENAI_API_KEY"), silence_s=_SILENCE_S, keeps=False) as session:
        served = await served_models(session, root_of(setting.base_url))
    (streams,) = choose(served, [setting.model])
    others = choose(served, [setting.other], option="--other") if setting.other else []
    refuse_too_long(setting, streams, others)


def refuse_too_long(setting: Setting, streams: Card, others: Iterable[Card]) -> None:
    """Raises UserError where a prompt and its answer are longer than the context of a model that they go to."""
    _refuse_beyond(streams, "--tokens", setting.stream_tokens, SHORT_TOKENS, "the prompt")
    for card in (streams, *others):
        _refuse_beyond(card, "--prompts", max(setting.prompts), 1, "the answer")


def _refuse_beyond(card: Card, option: str, tokens: int, besides: int, what: str) -> None:
    if card.max_model_len is not None and tokens + besides > card.max_model_len:
        context = f"{card.id!r} has a context of {card.max_model_len}, {besides} of it for {what}"
        most = max(card.max_model_len - besides, 0)
        raise UserError(f"{option}: {tokens} tokens are too many, {context}; give at most {most}")

"""The models of a server: which there are, which of them a workload means, and what tokens they know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import aiohttp
import msgspec
from msgspec import Struct

from aegis.admin_client import tls_mistake, why_unreached
from aegis.core.errors import UserError
from aegis.core.ids import ModelId

SAFE_TOKEN_IDS = tuple(range(10, 100))
"""Token ids that every vocabulary has, and that seldom have a meaning of their own."""

_TEXT = "The quick brown fox jumps over the lazy dog, while 27 wizards brew potions of jade and quartz in May."
_KNOW_TOKEN_IDS = ("aegis", "vllm")
_GENERATES = "generate"


class Card(Struct, frozen=True):
    """A served model as `/v1/models` lists it."""

    id: str
    owned_by: str = ""
    task: str = _GENERATES
    max_model_len: int | None = None  # of a prompt and its answer together; some servers do not say

    @property
    def returns_token_ids(self) -> bool:
        """Whether its server takes `return_token_ids`, which others would refuse."""
        return self.owned_by in _KNOW_TOKEN_IDS

    @property
    def model(self) -> ModelId:
        return ModelId(self.id)


class _Cards(Struct, frozen=True):
    data: list[Card]


class _Tokens(Struct, frozen=True):
    tokens: list[int]


def root_of(url: str) -> str:
    """The address without the `/v1` that clients of the API have at the end."""
    return url.rstrip("/").removesuffix("/v1")


async def served_models(session: aiohttp.ClientSession, url: str) -> list[Card]:
    """The models that the server lists, in its order. Raises UserError."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        if mistake := tls_mistake(url, error):
            raise UserError(mistake) from None
        raise UserError(f"no server at {url} ({why_unreached(error)}); is it running there?") from None
    if status in (401, 403):
        raise UserError(f"{url} wants a key; set OPENAI_API_KEY")
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except msgspec.DecodeError:
        raise UserError(f"{url} answers /v1/models with {status}, but lists no models as the API has it") from None
    if not cards:
        raise UserError(f"{url} serves no models")
    return cards


def choose(cards: Sequence[Card], wanted: Sequence[str], *, option: str = "--model") -> list[Card]:
    """The models that are wanted, by that option, in that order; if none is named, all that generate text. Raises
    UserError."""
    served = {card.id: card for card in cards}
    for name in wanted:
        if name not in served:
            raise UserError(f"{option}: {name!r} is not served; those that are: {', '.join(sorted(served))}")
        if (task := served[name].task) != _GENERATES:
            raise UserError(f"{option}: {name!r} generates no text; its task is {task}")
    chosen = [served[name] for name in dict.fromkeys(wanted)] or [card for card in cards if card.task == _GENERATES]
    if not chosen:
        raise UserError(f"none of the models that are served generates text: {', '.join(sorted(served))}")
    return chosen


def assign(names: Iterable[ModelId], served: Sequence[Card], how: str | None = None) -> dict[ModelId, ModelId]:
    """From each model of a workload to the served one that stands for it.

    `how`: `name`, the same name; `round-robin`, the i-th name, sorted, is the i-th served one, over and over; None,
    by name where all are served, round-robin where none is. Raises UserError if a name is not served.
    """
    wanted, there = sorted(set(names)), [ModelId(card.id) for card in served]
    missing = [name for name in wanted if name not in there]
    if how == "round-robin" or (how is None and len(missing) == len(wanted)):
        return {name: there[index % len(there)] for index, name in enumerate(wanted)}
    if missing:
        raise UserError(f"the workload's model {missing[0]!r} is not served; --map round-robin takes those that are")
    return {name: name for name in wanted}


async def known_token_ids(
    session: aiohttp.ClientSession, url: str, models: Iterable[ModelId]
) -> dict[ModelId, tuple[int, ...]]:
    """Token ids that each model's text really has, by its `/tokenize`; SAFE_TOKEN_IDS where it has none."""
    models = list(models)
    found = await asyncio.gather(*(_tokenize(session, url, model) for model in models))
    return dict(zip(models, found, strict=True))


async def _tokenize(session: aiohttp.ClientSession, url: str, model: ModelId) -> tuple[int, ...]:
    body = {"model": model, "prompt": _TEXT, "add_special_tokens": False}
    try:
        async with session.post(f"{url}/tokenize", json=body) as response:
            tokens = msgspec.json.decode(await response.read(), type=_Tokens).tokens if response.ok else []
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        tokens = []
    return tuple(sorted(set(tokens))) or SAFE_TOKEN_IDS

"""A market in this process with its instances in theirs, as `aegis launch` makes it, and clients that keep the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from aegis.config.config import Config
from aegis.core.errors import ModelRefused
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from aegis.core.request import Sampling
from aegis.core.views import DecodeView, Work
from aegis.launcher.live_market import LiveMarket, open_market
from aegis.launcher.services import open_services
from aegis.models.sources import Source
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.http.market import Delta, Failed
from proxy.routing.router import Router

_POLL_S = 0.002
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Assigned:
    """A `DecodePolicy`: each model is decoded by one instance."""

    instances: Mapping[ModelId, InstanceId]

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        del lists
        return self.instances[work.model]


@dataclass(slots=True)
class Stream:
    """The answer as a client saw it: the time of each token, and the reason if it failed."""

    tokens_ns: list[int] = field(default_factory=list)
    failure: str = ""


@asynccontextmanager
async def serving(
    config: Config,
    sources: Sequence[Source],
    *,
    assigned: Mapping[ModelId, InstanceId] | None = None,
    placement: Mapping[InstanceId, int] | None = None,
    cache_dir: Path | None = None,
) -> AsyncIterator[LiveMarket]:
    """On processors. Yields when every instance serves every model. Raises ModelRefused."""
    config = config.model_copy(update={"device": "cpu"})
    rounds = WeightedRoundRobin()
    router = Router(GroupedFcfs(), Assigned(assigned) if assigned else rounds, Hardware())
    async with (
        open_services(config) as services,
        open_market(config, services, router=router, placement=placement, cache_dir=cache_dir) as market,
    ):
        async for _, outcome in market.node.catalogue.register(sources):
            if isinstance(outcome, ModelRefused):
                raise outcome
        await until(lambda: market.queries.is_ready()[0])
        try:
            yield market
        finally:
            market.proxy.abandon()


async def follow(market: LiveMarket, model: ModelId, prompt: Sequence[int], max_tokens: int, into: Stream) -> Stream:
    """One client, from its request to the end. Cancelling it cancels the request."""
    handle = market.proxy.submit(model, prompt, Sampling(max_tokens, temperature=0.0))
    try:
        async for delivery in handle:
            if isinstance(delivery, Delta):
                into.tokens_ns += [time.monotonic_ns()] * len(delivery.tokens)
            elif isinstance(delivery, Failed):
                into.failure = delivery.message
    finally:
        handle.cancel()
    return into


def draw_prompt(market: LiveMarket, model: ModelId, rng: Random, tokens: int) -> list[int]:
    """Random tokens of the model's vocabulary, without the first two, which are often special."""
    return rng.choices(range(2, market.queries.models()[model].spec.manifest.vocab_size), k=tokens)


async def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError if it does not come true."""
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(_POLL_S)


def write_llama(directory: Path, *, hidden: int, layers: int, heads: int, inner: int, context: int = 4096) -> Path:
    """A checkpoint of random weights in float32 with as many KV heads as heads, all of 64 elements; its directory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory

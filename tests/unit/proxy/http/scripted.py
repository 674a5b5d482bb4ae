"""The other side of the HTTP boundary for tests: a market whose sequences say what a script says.

The text side is real: `tokenizers` tokenizers, one token per byte or with words that carry their spaces.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from aegis.core.api_keys import Caller, Key, Keyring, digest_of
from aegis.core.decision import Decision
from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId
from aegis.core.limits import UNLIMITED, Limits
from aegis.core.model import KvLayer, KvShape, Manifest, ModelChange, ModelSpec, Pace, Pooling, Slo
from aegis.core.request import FinishReason, Sampling, Token
from aegis.engine.grammar.trials import GrammarTrials
from aegis.models.text.text_model import TextModel
from aegis.telemetry.history import History
from aegis.telemetry.live_view import Live, LiveInstance, LiveModel, SeenUntil, updates_since
from aegis.telemetry.memory_report import HostKvReport, MemoryReport, ModelCacheReport, SlabsReport
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.registration import RegisteringModel, Waiting
from aegis.telemetry.spans import Span
from proxy.http.app import create_app
from proxy.http.market import Delivery, Delta, Finished, PromptScores
from proxy.http.replies import encode
from proxy.http.request.text_workers import TextWorkers
from proxy.http.responses.running_responses import RunningResponses
from proxy.http.responses.stored_responses import ResponseMemory
from proxy.http.settings import Settings

BOS, EOS = 256, 257
TEXTS = TextWorkers()
"""Shared by all tests: starting its processes takes seconds."""

CONTEXT_TOKENS = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'developer'] %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
)


def byte_text(chat_template: str | None = CHAT_TEMPLATE) -> TextModel:
    """Token b is the byte b; every character beyond ASCII is cut at each of its borders."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {b: chr(b) for b in printable}
    names |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in names)}
    tokenizer = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return TextModel(tokenizer, {}, chat_template)


def word_text() -> TextModel:
    """Words that begin with a space, which the first word of a text loses."""
    words = {word: i for i, word in enumerate(["<unk>", "▁the", "▁cat", "▁sat", "s", "▁"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return TextModel(tokenizer, {}, None)


def spec(name: str, **changes: Any) -> ModelSpec:
    manifest: dict[str, Any] = {
        "fingerprint": name,
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "image_bytes": 0,
        "tensors": (),
        "kv": KvShape((KvLayer(1, 8, 8),), "float32", 4),
        "context_tokens": CONTEXT_TOKENS,
        "vocab_size": 258,
        "eos_token_ids": (EOS,),
        "hidden_size": 8,
        "intermediate_size": 8,
        "parameters": 0,
    }
    return ModelSpec(
        ModelId(name), Manifest(**(manifest | changes)), "/images/x", "/images/x/image.bin", "/checkpoints/x"
    )


def tokens(said: str | bytes | Sequence[int]) -> tuple[Token, ...]:
    ids = said.encode() if isinstance(said, str) else said
    return tuple(Token(i, -0.5 - i / 1000, ((i, -0.5 - i / 1000), ((i + 1) % 256, -2.0))) for i in ids)


def says(
    said: str | bytes | Sequence[int], *, per_delivery: int = 1, reason: FinishReason = FinishReason.STOP
) -> Script:
    """The same for every prompt: `said`, in deliveries of so many tokens."""

    def script(prompt: Sequence[int], sampling: Sampling) -> list[Delivery]:
        generated = tokens(said)
        parts = range(0, len(generated), per_delivery)
        deltas: list[Delivery] = [Delta(generated[i : i + per_delivery]) for i in parts]
        scores: list[Delivery] = [] if sampling.prompt_logprobs is None else [PromptScores(tokens(prompt[1:]))]
        return [*scores, *deltas, Finished(reason)]

    return script


Script = Callable[[Sequence[int], Sampling], Sequence[Delivery | Awaitable[Any]]]
"""What a sequence delivers; anything awaitable among it is waited for."""


class ScriptedHandle:
    def __init__(self, deliveries: Sequence[Delivery | Awaitable[Any]]) -> None:
        self.cancelled = False
        self.satisfied = False
        self.ended = False
        self._deliveries = deliveries

    def before(self) -> int | None:
        return 2

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        for delivery in self._deliveries:
            await asyncio.sleep(0)
            if isinstance(delivery, Awaitable):
                await delivery
            elif not self.cancelled:
                yield delivery
        self.ended = True

    def cancel(self, *, satisfied: bool = False) -> None:
        self.cancelled = not self.ended
        self.satisfied = satisfied


@dataclass
class ScriptedModel:
    spec: ModelSpec
    script: Script
    text: TextModel | None = field(default_factory=byte_text)
    state: str = "ready"
    detail: str = ""
    weights: str = "cached"
    created_s: int = 1_700_000_000
    kv_limit_tokens: int = 1_000_000
    priority: int = 0
    limits: Limits = UNLIMITED
    pace: Pace | None = None
    pinned: bool = False


@dataclass
class ScriptedPermit:
    caller: str
    model: ModelId | None
    prompt_tokens: int = 0
    answer_tokens: int | None = None  # None: it is not closed

    def use(self, tokens: int) -> None:
        self.prompt_tokens += tokens

    def close(self, tokens: int) -> None:
        assert self.answer_tokens is None
        self.answer_tokens = tokens


def keyring(admin: str | None = None, **callers: str) -> Keyring:
    """By name."""
    keys = [Key(digest_of(key), Caller(name)) for name, key in callers.items()]
    return Keyring(tuple(keys), Key(digest_of(admin), Caller("admin", is_admin=True)) if admin else None)


@dataclass
class ScriptedMarket:
    """`submitted` are all sequences ever, `refusals` the errors that the next submissions raise (None: none)."""

    served: dict[str, ScriptedModel]
    keys: Keyring = field(default_factory=Keyring)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    submitted: list[tuple[ModelId, tuple[int, ...], Sampling]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    added: tuple[str, str | None, str | None] | None = None
    handles: list[ScriptedHandle] = field(default_factory=list)
    first_choices: list[object] = field(default_factory=list)
    among: list[object] = field(default_factory=list)
    refusals: list[UserError | None] = field(default_factory=list)
    registering: dict[str, RegisteringModel] = field(default_factory=dict)
    wanted: list[ModelId] = field(default_factory=list)
    permits: list[ScriptedPermit] = field(default_factory=list)
    permit_refusals: list[UserError] = field(default_factory=list)
    unwell: str = ""
    moves: list[tuple[object, ...]] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    start: int = 1
    now_ns: int = 0
    instances: list[LiveInstance] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    memory: MemoryReport | None = None
    past: History = field(default_factory=lambda: History(spans=4, records=4, decisions=4, token_times=True))
    responses: ResponseMemory = field(default_factory=ResponseMemory)
    elsewhere: RunningResponses = field(default_factory=RunningResponses)  # those of another proxy

    def answered(self, path: str, code: int, refused: str | None) -> None:
        self.answers.append((path, code))
        self.refused += [refused] if refused else []

    def models(self) -> Mapping[str, ScriptedModel]:
        return self.served

    def coming(self) -> Mapping[str, RegisteringModel]:
        return self.registering

    def want(self, model: ModelId) -> None:
        """What is known of it is another only when the node has heard of it."""
        self.wanted.append(model)

    async def permit(self, caller: Caller | None, model: ModelId | None) -> ScriptedPermit:
        refusal = self.permit_refusals.pop(0) if self.permit_refusals else None
        if refusal:
            raise refusal
        self.permits.append(ScriptedPermit(caller.name if caller else "", model))
        return self.permits[-1]

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(
        self,
        model: ModelId,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        sent: tuple[int, ...] = (),
        first_choice: object = None,
        among: object = None,
    ) -> ScriptedHandle:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal:
            raise refusal
        self.submitted.append((model, tuple(prompt), sampling))
        self.priorities.append(priority)
        self.first_choices.append(first_choice)
        self.among.append(among)
        self.handles.append(ScriptedHandle(self.served[model].script(prompt, sampling)))
        return self.handles[-1]

    @property
    def queries(self) -> ScriptedMarket:
        return self

    async def healthy(self) -> tuple[bool, str]:
        return not self.unwell, self.unwell

    async def ready(self) -> tuple[bool, str]:
        return not self.unwell, self.unwell

    async def add_model(
        self, source: str, name: str | None, *, lazy: bool = False, base: str | None = None
    ) -> ScriptedModel | Waiting:
        self.added = (source, name, base)
        if lazy:
            return Waiting(ModelId(name or source), source)
        if "broken" in source:
            raise ModelRefused(f"{source}: truncated")
        added = ScriptedModel(spec(name or source), says("new"))
        self.served[added.spec.model] = added
        return added

    async def remove_model(self, name: str) -> None:
        del self.served[name]

    async def unload_model(self, name: str) -> ScriptedModel:
        if self.served[name].pinned:
            raise UserError(f"model '{name}' is pinned; unpin it first", status=409, param="model")
        self.served[name].weights = "disk"
        return self.served[name]

    async def change_model(self, name: str, change: ModelChange) -> ScriptedModel:
        model = self.served[name]
        slo = model.spec.slo
        slo = Slo(change.ttft_ns or slo.ttft_ns, change.tbt_ns or slo.tbt_ns)
        model.spec = msgspec.structs.replace(model.spec, slo=slo)
        model.priority = model.priority if change.priority is None else change.priority
        model.limits = model.limits if change.limits is None else change.limits
        model.pinned = model.pinned if change.pinned is None else change.pinned
        model.pace = change.pace or model.pace
        return model

    async def metrics(self) -> bytes:
        return generate_latest(self.registry)

    async def spans(self, since: int) -> tuple[list[Span], int]:
        return self.past.spans.since(since), self.past.spans.next

    async def records(self, since: int) -> tuple[list[Record], int]:
        return self.past.records.since(since), self.past.records.next

    async def decisions(self, since: int) -> tuple[list[Decision], int]:
        return self.past.decisions.since(since), self.past.decisions.next

    async def live(self, seen: SeenUntil) -> bytes:
        models = [
            LiveModel(
                seat,
                model.state,
                model.weights,
                self.tallies.get(name, Tally(ModelId(name))),
                generates=model.spec.manifest.pooling is None,
            )
            for seat, (name, model) in enumerate(self.served.items())
        ]
        memory = self.memory or await self.memory_report()
        told = Live(
            self.start, "0", "least-slack", self.now_ns, self.instances, models, memory, updates_since(self.past, seen)
        )
        return msgspec.json.encode(told)

    async def report(self) -> NodeReport:
        specs = tuple(model.spec.without_tensors() for model in self.served.values())
        return NodeReport("least-slack", 1, 8, 2, 4, {}, specs)

    async def memory_report(self) -> MemoryReport:
        none = SlabsReport(0, 0.0, ())
        return MemoryReport((), HostKvReport(8, 4, 4, 0, 0, none), ModelCacheReport(0, 0, (), {"hits": 3}))

    async def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        self.moves.append(("limit", instance, nbytes, timeout_s))
        if self.refusals and (refusal := self.refusals.pop(0)):
            raise refusal
        return 4096

    async def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        self.moves.append(("trim", instance, timeout_s))
        return 0

    async def keep_response(self, key: str, stored: bytes) -> None:
        await self.responses.keep(key, stored)

    async def find_response(self, key: str) -> bytes | None:
        return await self.responses.find(key)

    async def remove_response(self, key: str) -> bool:
        return await self.responses.remove(key)

    async def cancel_response(self, key: str) -> bytes | None:
        ended = await self.elsewhere.cancel(key)
        return encode(ended) if ended else None


def pools(*, dimensions: int = 4, value: float | None = None) -> Script:
    """A vector: the number of the prompt's tokens, and then ones; or this value throughout."""

    def script(prompt: Sequence[int], sampling: Sampling) -> list[Delivery]:
        assert sampling.pools and sampling.max_tokens == 1
        told = [float(len(prompt)), *[1.0] * (dimensions - 1)] if value is None else [value] * dimensions
        return [Delta((Token(0, vector=struct.pack(f"<{dimensions}f", *told)),)), Finished(FinishReason.LENGTH)]

    return script


def pooling_market(script: Script | None = None, **pooling: Any) -> ScriptedMarket:
    """A model of embeddings, `e`, a reranker, `r`, and one that generates, `m`."""
    embeds = spec("e", pooling=Pooling(**({"dimensions": 4, "modes": ("mean",)} | pooling)))
    ranks = spec("r", pooling=Pooling(1, scores=True))
    models = {
        "e": ScriptedModel(embeds, script or pools()),
        "r": ScriptedModel(ranks, script or pools(dimensions=1)),
        "m": ScriptedModel(spec("m"), says("hello")),
    }
    return ScriptedMarket(models)


def market(script: Script | None = None, **changes: Any) -> ScriptedMarket:
    """One model, `m`."""
    return ScriptedMarket({"m": ScriptedModel(spec("m"), script or says("hello"), **changes)})


def calling(
    behind: ScriptedMarket,
    calls: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]],
    trials: GrammarTrials | None = None,
    texts: TextWorkers | None = None,
    keys: Keyring | None = None,
    **settings: Any,
) -> Any:
    """What `calls` makes of a client of this market, within the process, with other keys if given."""
    behind.keys = keys or behind.keys
    app: ASGIApp = create_app(behind, Settings(**settings), trials=trials, texts=texts or TEXTS)

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await calls(client)

    return asyncio.run(run())


def post(
    behind: ScriptedMarket, path: str, body: Any = None, trials: GrammarTrials | None = None, **request: Any
) -> httpx.Response:
    if body is not None:
        request["json"] = body
    return calling(behind, lambda client: client.post(path, **request), trials)


def get(behind: ScriptedMarket, path: str, **request: Any) -> httpx.Response:
    return calling(behind, lambda client: client.get(path, **request))

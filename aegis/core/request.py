"""A request as the schedulers see it. The output length is not in it: nobody knows it (rule 2, no oracle)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from aegis.core.ids import ONLY_MACHINE, BlockRun, InstanceId, MachineId, ModelId, RequestId
from aegis.core.model import Slo

PRIORITY_MAX = 8
"""Priorities are between this and its negative."""


class Grammar(Struct, frozen=True, cache_hash=True):
    """The constraint on an output: a JSON Schema, a regular expression, a grammar in EBNF, or one of XGrammar's
    structural tags. `text` holds it."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str


class Failure(StrEnum):
    """The kinds of reasons why a request that was taken fails."""

    GENERATION = "generation_failed"
    MODEL_REMOVED = "model_not_found"
    MODEL_NOT_FETCHED = "model_not_fetched"
    NO_PLACE = "no_place"
    SHUTTING_DOWN = "shutting_down"
    SLOW_GRAMMAR = "slow_grammar"
    SLOW_GRAMMARS = "slow_grammars"
    WOULD_BE_LATE = "would_be_late"


PLACES_NEED = "it takes more instances, more memory or another --policy"

SLOW: Mapping[Failure, str] = {
    Failure.SLOW_GRAMMAR: "the output's grammar takes too long to follow; where it derives a text in many ways, make "
    "them fewer",
    Failure.SLOW_GRAMMARS: "the grammars of other requests take too long to follow now; send this one again later",
}
"""The reasons why an output is not held to its grammar any further, for the client."""


class Sampling(Struct, frozen=True):
    """Sampling parameters. Greedy when `temperature` is 0. Ranges are checked at the proxy."""

    max_tokens: int
    seed: int = 0  # always set by the proxy; draw i uses the stream (seed, i), so batching cannot change it
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the model's own end tokens included unless ignore_eos
    logprobs: int | None = None  # alternatives to report per generated token
    prompt_logprobs: int | None = None  # the same for the prompt (echo)
    grammar: Grammar | None = None  # with one, the model has end tokens, which are stop tokens from the first on
    pools: bool = (
        False  # the answer is one vector, in place of the first token, which is the last; nothing is generated
    )
    pair_at: int = 0  # then, of a prompt that is a pair of texts, where the second one begins; 0: it is no pair

    def finish(self, index: int, token: int) -> FinishReason | None:
        """The reason why generated token number `index` is the last, if it is. Stop tokens count from min_tokens on."""
        if index >= self.min_tokens and token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.max_tokens else None


class Token(Struct, frozen=True, array_like=True):
    """A generated token; logprobs are of the distribution before temperature and truncation. Of a model that pools: its
    `vector`, in little-endian float32; it has no id then."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    vector: bytes | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class KeptPrefix(Struct, frozen=True):
    """KV of a prompt's first `tokens`, all of them whole blocks, that lies in the node's host memory and may be gone at
    any moment: it was there while it was copied if `entry`, the last of its blocks, is still kept afterwards."""

    blocks: tuple[BlockRun, ...]
    tokens: int
    entry: int


class Job(Struct, frozen=True):
    """One sequence to run. A replay after a failure carries the tokens already sent as `sent`: they are prefilled with
    the prompt, count towards max_tokens and penalties, and are never sent again. So does one that another proxy began.

    Schedulers take the job as if it had arrived `priority` times TTFT later; its deadlines stay what they are."""

    request: RequestId
    attempt: int
    model: ModelId
    prompt: tuple[int, ...]
    sampling: Sampling
    arrival_ns: int
    sent: tuple[int, ...] = ()
    priority: int = 0  # the lower, the earlier
    kept: KeptPrefix | None = None  # need not be prefilled
    adapter: ModelId | None = None  # of `model`, which is its base: what the client has asked for

    @property
    def served(self) -> ModelId:
        """The model that the client has asked for."""
        return self.adapter or self.model

    @property
    def prefill_tokens(self) -> int:
        return len(self.prompt) + len(self.sent)

    @property
    def kept_tokens(self) -> int:
        """The tokens among them whose KV was known to be kept when it was sent."""
        return self.kept.tokens if self.kept else 0

    @property
    def is_whole(self) -> bool:
        """Whether its prompt has to be run in one step from the first token to the last, whatever is kept of it."""
        return self.sampling.pools or self.sampling.prompt_logprobs is not None

    @property
    def most_tokens(self) -> int:
        """Positions the sequence can ever occupy."""
        return len(self.prompt) + self.sampling.max_tokens

    def ranked_ns(self, slo: Slo) -> int:
        """The time of arrival that counts when the request is compared with others."""
        return self.arrival_ns + self.priority * slo.ttft_ns

    def urgent_ns(self, slo: Slo, index: int) -> int:
        """The deadline of generated token `index`, likewise."""
        return slo.due_ns(self.ranked_ns(slo), index)

    def finish(self, index: int, token: int) -> FinishReason | None:
        """The reason why generated token number `index` is the last, if it is."""
        return self.sampling.finish(index, token)


class EventHandle(Struct, frozen=True, array_like=True):
    """An event that any process of the node can query: passed once shared word `word` has reached `value`."""

    word: int
    value: int


class KvHandle(Struct, frozen=True):
    """The place of a request's KV in the host slabs of the owner's machine, and the event after which it is there."""

    owner: InstanceId
    blocks: tuple[BlockRun, ...]
    tokens: int
    ready: EventHandle
    machine: MachineId = ONLY_MACHINE

    def is_from(self, owner: InstanceId, words: Container[int]) -> bool:
        """Whether it was handed over by the owner's process whose these words were: no other has had them."""
        return self.owner == owner and self.ready.word in words

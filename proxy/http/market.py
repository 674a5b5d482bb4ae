"""The interface through which the HTTP layer reaches the rest of aegis. It sees a market of models and handles of
sequences only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from aegis.core.api_keys import Caller, Keyring
from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.limits import Limits
from aegis.core.model import ModelChange, ModelSpec, Pace
from aegis.core.request import Failure, FinishReason, Sampling, Token
from aegis.models.text.text_model import TextModel
from aegis.telemetry.live_view import SeenUntil
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.registration import RegisteringModel, Waiting
from aegis.telemetry.spans import Span


class Delta(Struct, frozen=True):
    """The next generated tokens, in order, never twice. A stop token that ended the sequence is among them."""

    tokens: tuple[Token, ...]


class PromptScores(Struct, frozen=True):
    """Logprobs of the prompt's tokens from the second on; comes before the first `Delta` where they were asked for."""

    tokens: tuple[Token, ...]


class Reused(Struct, frozen=True):
    """So many of the prompt's tokens were not prefilled, their KV being kept; comes before the first `Delta`."""

    tokens: int


class Finished(Struct, frozen=True):
    """Nothing follows."""

    reason: FinishReason


class Failed(Struct, frozen=True):
    """Nothing follows. `status` is what a reply that has not begun answers with, where the kind does not say. Who is
    refused may ask again after `retry_after_s`."""

    message: str
    status: int = 500
    kind: Failure = Failure.GENERATION
    retry_after_s: int | None = None

    def error(self) -> UserError:
        """The failure as the client is told of it."""
        status = _STATUS.get(self.kind, self.status)
        fault = _FAULT.get(self.kind, "server_error")
        return UserError(self.message, status=status, code=self.kind, kind=fault, retry_after_s=self.retry_after_s)


_STATUS = {
    Failure.MODEL_REMOVED: 404,
    Failure.MODEL_NOT_FETCHED: 503,
    Failure.NO_PLACE: 503,
    Failure.SHUTTING_DOWN: 503,
    Failure.SLOW_GRAMMAR: 400,
    Failure.SLOW_GRAMMARS: 503,
    Failure.WOULD_BE_LATE: 429,
}
_FAULT = {
    Failure.MODEL_REMOVED: "invalid_request_error",
    Failure.SLOW_GRAMMAR: "invalid_request_error",
    Failure.WOULD_BE_LATE: "rate_limit_error",
}


Delivery = Delta | PromptScores | Reused | Finished | Failed


class SequenceHandle(Protocol):
    """One sequence being generated; iterate it once. Ends after `Finished` or `Failed`."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    def before(self) -> int | None:
        """The number of earlier requests that wait for their first token at the same place; None: it has one, or no
        place yet."""
        ...

    def cancel(self, *, satisfied: bool = False) -> None:
        """Frees all the sequence holds. Harmless when it has ended or was cancelled before. `satisfied`: a stop string
        was found, the client has all it asked for."""
        ...


class Served(Protocol):
    """One registered model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def text(self) -> TextModel | None:
        """None when the checkpoint has no tokenizer: prompts and answers are token ids then."""
        ...

    @property
    def state(self) -> str:
        """`loading`, `ready`, `failed`, `unloaded`, …; requests to a failed model are refused, others wait."""
        ...

    @property
    def detail(self) -> str:
        """The reason why it failed, or its present problem."""
        ...

    @property
    def weights(self) -> str:
        """The place of its weights when no instance has them: `cached` in host memory, on their way in or out of it
        (`filling`, `evicting`), or on `disk`."""
        ...

    @property
    def priority(self) -> int:
        """The number that is added to the priority of each of its requests."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits of all its requests together."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether its weights stay in the model cache."""
        ...

    @property
    def pace(self) -> Pace | None:
        """The pace of the model's streams that do not ask for one; None: the server's."""
        ...

    @property
    def created_s(self) -> int: ...

    @property
    def kv_limit_tokens(self) -> int:
        """The most tokens one sequence's KV can ever hold on an instance."""
        ...


class ServerQueries(Protocol):
    """Queries about the whole server, whichever of its proxies was asked."""

    async def healthy(self) -> tuple[bool, str]:
        """Whether the server can go on, and if not, why."""
        ...

    async def ready(self) -> tuple[bool, str]:
        """Whether every launched instance and proxy serves, and if not, which does not."""
        ...

    async def add_model(
        self, source: str, name: str | None, *, lazy: bool = False, base: str | None = None
    ) -> Served | Waiting:
        """Registers a checkpoint directory, a GGUF file, a hub id or an address, or an adapter, of the `base` where one
        is named; returns when it is served, or, if it is `lazy`, was looked at. Cancelled, it is not
        registered. Raises UserError: 409 where it was unloaded meanwhile."""
        ...

    async def remove_model(self, name: str) -> None:
        """One that is served, or being added. Raises UserError."""
        ...

    async def unload_model(self, name: str) -> Served:
        """Takes its weights out of all memory, where requests use them as soon as those have ended; it is served as
        before. Raises UserError: 409 where it is pinned."""
        ...

    async def change_model(self, name: str, change: ModelChange) -> Served:
        """Changes what may be changed of one that is served, at once. Raises UserError, with nothing changed."""
        ...

    async def metrics(self) -> bytes:
        """All metrics of the server, in Prometheus' text format."""
        ...

    async def spans(self, since: int) -> tuple[list[Span], int]:
        """The recent spans of its instances, from that number on, and the number of the next one; `records` are the
        outcomes of requests, `decisions` the decisions."""
        ...

    async def records(self, since: int) -> tuple[list[Record], int]: ...

    async def decisions(self, since: int) -> tuple[list[Decision], int]: ...

    async def live(self, seen: SeenUntil) -> bytes:
        """A `Live` as JSON: the server as it is now, and what it did beyond what was seen."""
        ...

    async def report(self) -> NodeReport:
        """The parts of the server."""
        ...

    async def memory_report(self) -> MemoryReport:
        """All memory of the node as it stands."""
        ...

    async def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        """Sets how much the instance may hold of its device; returns when it holds no more than that: how many bytes it
        gave back. Raises UserError, with nothing changed: 404 for an unknown instance, 409 where it cannot be done in
        time."""
        ...

    async def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        """Takes back what the instance does not need now; returns when that is done: how many bytes. Raises
        UserError."""
        ...

    async def keep_response(self, key: str, stored: bytes) -> None:
        """Keeps a response in the node's memory; `find_response` and `remove_response` are as in `ResponseStore`."""
        ...

    async def find_response(self, key: str) -> bytes | None: ...

    async def remove_response(self, key: str) -> bool: ...

    async def cancel_response(self, key: str) -> bytes | None:
        """Ends the response of that key, whichever proxy is generating it: how it ended, in JSON. None where none
        is."""
        ...


class Permit(Protocol):
    """The permit of one request to begin."""

    def use(self, tokens: int) -> None:
        """The request's prompts turned out to have so many tokens, which count for the limits of its key."""
        ...

    def close(self, tokens: int) -> None:
        """The request has ended, with an answer of so many tokens, which count too."""
        ...


class Market(Protocol):
    """Everything behind the HTTP layer."""

    def answered(self, path: str, code: int, refused: str | None) -> None:
        """A client was, with this status; `path` is a route's, not what the client wrote; `refused` says why it was,
        if it was for who asked, when or how often."""
        ...

    @property
    def queries(self) -> ServerQueries: ...

    @property
    def keys(self) -> Keyring:
        """The keys that clients may send at present: they may be replaced at any time."""
        ...

    def models(self) -> Mapping[str, Served]:
        """The models by the name that clients use."""
        ...

    def coming(self) -> Mapping[str, RegisteringModel]:
        """Models that are being registered, or will be at their first request, by the names clients will use."""
        ...

    def want(self, model: ModelId) -> None:
        """There is a request for a model that waits for one."""
        ...

    async def permit(self, caller: Caller | None, model: ModelId | None) -> Permit:
        """A permit for a request, before its prompts are worked on. Raises UserError: 429 if a limit of the caller or
        the model is reached. None: it has a permit of the caller already, or its model is not known yet."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Sequences submitted within this context come to their instances at once: choices of a call find each other
        there."""
        ...

    def submit(
        self,
        model: ModelId,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        sent: tuple[int, ...] = (),
        first_choice: SequenceHandle | None = None,
        among: SequenceHandle | None = None,
    ) -> SequenceHandle:
        """Queues a sequence whose lengths and parameters were checked; it goes on after the tokens `sent`, which are
        not delivered again. `first_choice`: one that was submitted with the same prompt, of which it is another choice.
        `among`: any other of the same answer; what waits to be read of them is bounded together. Raises UserError: 503
        while draining, 429 where it would be late and that is to be told."""
        ...

"""What the HTTP layer asks of the rest of aegis. It sees a market of models and tickets for sequences, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from aegis.core.decision import Decision
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import FinishReason, Sampling, Token
from aegis.models.text import TextModel
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.node import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span


class Delta(Struct, frozen=True):
    """The next generated tokens, in order, never twice. A stop token that ended the sequence is among them."""

    tokens: tuple[Token, ...]


class PromptScores(Struct, frozen=True):
    """Logprobs of the prompt's tokens from the second on; comes before the first `Delta` where they were asked for."""

    tokens: tuple[Token, ...]


class Finished(Struct, frozen=True):
    """Nothing follows."""

    reason: FinishReason


class Failed(Struct, frozen=True):
    """Nothing follows. `status` is what a reply that has not begun answers with."""

    message: str
    status: int = 500


Delivery = Delta | PromptScores | Finished | Failed


class Ticket(Protocol):
    """One sequence being generated; iterate it once. Ends after `Finished` or `Failed`."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

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
        """Why it failed, or what ails it."""
        ...

    @property
    def weights(self) -> str:
        """Where its weights are when no instance has them: `cached` in host memory, on their way in or out of it
        (`filling`, `evicting`), or on `disk`."""
        ...

    @property
    def created_s(self) -> int: ...

    @property
    def kv_limit_tokens(self) -> int:
        """The most tokens one sequence's KV can ever hold on an instance."""
        ...


class Desk(Protocol):
    """What is asked of the whole server, whichever of its proxies was asked."""

    async def healthy(self) -> tuple[bool, str]:
        """Whether the server can go on, and if not, why."""
        ...

    async def ready(self) -> tuple[bool, str]:
        """Whether every launched instance and proxy serves, and if not, which does not."""
        ...

    async def add_model(self, source: str, name: str | None) -> Served:
        """Registers a checkpoint directory or hub id; returns when it is served. Raises UserError."""
        ...

    async def remove_model(self, name: str) -> None:
        """Raises UserError."""
        ...

    async def metrics(self) -> bytes:
        """In Prometheus' text format."""
        ...

    async def spans(self, since: int) -> tuple[list[Span], int]:
        """What its instances did of late, from that number on, and the number of what comes next; `records` are what
        became of requests, `decisions` what was decided."""
        ...

    async def records(self, since: int) -> tuple[list[Record], int]: ...

    async def decisions(self, since: int) -> tuple[list[Decision], int]: ...

    async def report(self) -> NodeReport:
        """What the server consists of."""
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


class Market(Protocol):
    """Everything behind the HTTP layer."""

    @property
    def desk(self) -> Desk: ...

    def models(self) -> Mapping[str, Served]:
        """By the name clients use."""
        ...

    def submit(
        self,
        model: ModelId,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        sent: tuple[int, ...] = (),
    ) -> Ticket:
        """Queues a sequence whose lengths and parameters were checked; it goes on after the tokens `sent`, which are
        not delivered again. Raises UserError (503 while draining)."""
        ...

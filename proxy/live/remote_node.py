"""A node as a proxy in another process sees it: its models as it reports them, its queries by call and answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Raw

from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId
from aegis.core.limits import Limits
from aegis.core.model import ModelChange, ModelSpec, Pace
from aegis.core.request import Job
from aegis.models.text.text_model import TextModel
from aegis.node.query_messages import QUERIES
from aegis.telemetry.live_view import SeenUntil
from aegis.telemetry.logs import log
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.registration import RegisteringModel, Waiting
from aegis.telemetry.spans import Span
from aegis.transport.links import Spoke
from aegis.transport.node_messages import (
    Card,
    CardRemoved,
    FromProxy,
    LookUp,
    ModelWanted,
    NodeAnswer,
    NodeCall,
    NodeCallCancelled,
    OnPrefixFound,
    PrefixFound,
    Refusal,
    Registering,
    ToProxy,
)

_logger = logging.getLogger(__name__)
_UNREAD = "its image cannot be read; the log of the server says why"
_LEFT = "its image has left the disk; it is fetched again at the next request"


@dataclass(slots=True)
class RemoteModel:
    """A model as its card describes it. Implements `proxy.http.market.Served`."""

    card: Card
    text: TextModel | None

    @property
    def spec(self) -> ModelSpec:
        return self.card.spec

    @property
    def state(self) -> str:
        return self.card.state

    @property
    def detail(self) -> str:
        return self.card.detail

    @property
    def weights(self) -> str:
        return self.card.weights

    @property
    def priority(self) -> int:
        return self.card.priority

    @property
    def limits(self) -> Limits:
        return self.card.limits

    @property
    def pinned(self) -> bool:
        return self.card.pinned

    @property
    def pace(self) -> Pace | None:
        return self.card.pace

    @property
    def created_s(self) -> int:
        return self.card.created_s

    @property
    def kv_limit_tokens(self) -> int:
        return self.card.kv_limit_tokens


class RemoteNode:
    """Implements `proxy.live.proxy.NodeLink`. A model is there once its text is loaded, which is done in a thread. One
    whose image has left the disk before comes when a request has had the image fetched again, one that could not be
    read when a request or news of the node has it tried again."""

    def __init__(self, link: Spoke[ToProxy], *, reuses: bool = False) -> None:
        """If it `reuses` KV, it asks the node for kept KV."""
        self.queries = RemoteQueries(self)
        self._reuses = reuses
        self._call_ids = count()
        self._looked_up: dict[int, OnPrefixFound] = {}
        self._link = link
        self._cards: dict[ModelId, Card] = {}
        self._models: dict[ModelId, RemoteModel] = {}
        self._opening: dict[ModelId, asyncio.Task[None]] = {}
        self._missing: set[ModelId] = set()  # whose images were not there, or could not be read
        self._tries: dict[ModelId, int] = {}  # of those that could not be read
        self._news = 0  # an image may be there since
        self._coming: dict[str, RegisteringModel] = {}

    def coming(self) -> Mapping[str, RegisteringModel]:
        """One whose text is being loaded is not here yet either."""
        opening = [card for model, card in self._cards.items() if model in self._opening and model not in self._models]
        missing = [self._cards[model] for model in self._missing - self._models.keys()]
        missing = [card for card in missing if card.state != "failed"]  # else nothing fetches it
        return {
            **{card.spec.model: RegisteringModel(card.spec.root, "being opened") for card in opening},
            **{card.spec.model: self._returning(card) for card in missing},
            **self._coming,
        }

    def _returning(self, card: Card) -> RegisteringModel:
        tries = self._tries.get(card.spec.model, 0)
        progress = card.detail or (_UNREAD if tries else _LEFT)
        return RegisteringModel(card.spec.root, progress, lazy=True, tries=tries, refusal=_UNREAD if tries else "")

    def models(self) -> Mapping[str, RemoteModel]:
        return cast(Mapping[str, RemoteModel], self._models)

    def look_up(self, instance: InstanceId, job: Job, found: OnPrefixFound) -> None:
        if not self._reuses:
            found(None)
            return
        call_id = next(self._call_ids)
        self._looked_up[call_id] = found
        self.notify(LookUp(call_id, instance, job))

    def notify(self, message: FromProxy) -> None:
        """A request for a model that could not be read has it tried again: the node, which has it, does nothing."""
        if isinstance(message, ModelWanted) and message.model in self._tries.keys() - self._opening.keys():
            self._begin_to_open(message.model)
        self._link.send([message])

    async def opened(self) -> None:
        """Waits until all models that the node has reported are there."""
        while self._opening:
            await asyncio.shield(asyncio.gather(*self._opening.values()))  # they go on where nobody waits any more

    def on_message(self, message: Card | CardRemoved | PrefixFound | Registering) -> None:
        match message:
            case PrefixFound(call_id, kept):
                self._looked_up.pop(call_id)(kept)
            case Registering(models):
                self._coming = models
                self._news += 1
                for model in self._missing - self._opening.keys():
                    self._begin_to_open(model)
            case Card(spec):
                self._news += 1
                self._cards[spec.model] = message
                seen = self._models.get(spec.model)
                if seen and seen.spec.directory == spec.directory:
                    seen.card = message
                elif spec.model not in self._opening:
                    self._begin_to_open(spec.model)
            case CardRemoved(model):
                self._cards.pop(model, None)
                self._models.pop(model, None)
                self._forget_failure(model)

    def _forget_failure(self, model: ModelId) -> None:
        self._missing.discard(model)
        self._tries.pop(model, None)

    def _begin_to_open(self, model: ModelId) -> None:
        self._opening[model] = asyncio.create_task(self._open(model))

    async def _open(self, model: ModelId) -> None:
        """Until what is there is what its last card says, which may have changed meanwhile."""
        try:
            while card := self._cards.get(model):
                news = self._news
                try:
                    text = await asyncio.to_thread(_load, Path(card.spec.directory))
                except Exception as error:  # noqa: BLE001 - of a damaged file `tokenizers` raises nothing narrower
                    if model in self._cards and news == self._news:
                        self._note_failure(card, error)
                        break
                    continue
                latest = self._cards.get(model)
                if latest and latest.spec.directory == card.spec.directory:
                    self._forget_failure(model)
                    self._models[model] = RemoteModel(latest, text)
                    break
        finally:
            del self._opening[model]

    def _note_failure(self, card: Card, error: Exception) -> None:
        model = card.spec.model
        self._missing.add(model)
        if isinstance(error, FileNotFoundError):
            self._tries.pop(model, None)
            return
        self._tries[model] = self._tries.get(model, 0) + 1
        fields = {"model": model, "directory": card.spec.directory, "reason": str(error)}
        log(_logger, logging.WARNING, "model cannot be read", fields)


def _load(directory: Path) -> TextModel | None:
    """None if the checkpoint had no tokenizer. Raises FileNotFoundError if its image is not there, and any Exception if
    it cannot be read."""
    try:
        return TextModel.load_to_decode(directory)
    finally:
        directory.stat()  # else half of one that has left meanwhile, or nothing, is taken for all there is


class RemoteQueries:
    """Implements `proxy.http.market.ServerQueries`."""

    def __init__(self, node: RemoteNode) -> None:
        self._node = node
        self._call_ids = count()
        self._pending: dict[int, asyncio.Future[NodeAnswer]] = {}

    def answered(self, answer: NodeAnswer) -> None:
        pending = self._pending.get(answer.call_id)
        if pending and not pending.done():
            pending.set_result(answer)

    async def healthy(self) -> tuple[bool, str]:
        return cast(tuple[bool, str], await self._ask("healthy"))

    async def ready(self) -> tuple[bool, str]:
        return cast(tuple[bool, str], await self._ask("ready"))

    async def add_model(
        self, source: str, name: str | None, *, lazy: bool = False, base: str | None = None
    ) -> RemoteModel | Waiting:
        model = await self._ask("add_model", source, name, lazy, base)
        if isinstance(model, Waiting):
            return model
        await self._node.opened()
        return self._there(cast(ModelId, model))

    async def remove_model(self, name: str) -> None:
        await self._ask("remove_model", name)

    async def unload_model(self, name: str) -> RemoteModel:
        await self._ask("unload_model", name)
        return self._there(name)

    async def change_model(self, name: str, change: ModelChange) -> RemoteModel:
        await self._ask("change_model", name, change)
        return self._there(name)  # whose card came before the answer

    async def metrics(self) -> bytes:
        return cast(bytes, await self._ask("metrics"))

    async def spans(self, since: int) -> tuple[list[Span], int]:
        return cast(tuple[list[Span], int], await self._ask("spans", since))

    async def records(self, since: int) -> tuple[list[Record], int]:
        return cast(tuple[list[Record], int], await self._ask("records", since))

    async def decisions(self, since: int) -> tuple[list[Decision], int]:
        return cast(tuple[list[Decision], int], await self._ask("decisions", since))

    async def live(self, seen: SeenUntil) -> bytes:
        return cast(bytes, await self._ask("live", seen))

    async def report(self) -> NodeReport:
        return cast(NodeReport, await self._ask("report"))

    async def memory_report(self) -> MemoryReport:
        return cast(MemoryReport, await self._ask("memory_report"))

    async def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        return cast(int, await self._ask("limit_memory", instance, nbytes, timeout_s))

    async def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        return cast(int, await self._ask("trim_memory", instance, timeout_s))

    async def keep_response(self, key: str, stored: bytes) -> None:
        await self._ask("keep_response", key, stored)

    async def find_response(self, key: str) -> bytes | None:
        return cast("bytes | None", await self._ask("find_response", key))

    async def remove_response(self, key: str) -> bool:
        return cast(bool, await self._ask("remove_response", key))

    async def cancel_response(self, key: str) -> bytes | None:
        return cast("bytes | None", await self._ask("cancel_response", key))

    def _there(self, name: str) -> RemoteModel:
        """Raises UserError if it was removed meanwhile."""
        seen = self._node.models().get(name)
        if seen is None:
            raise UserError(f"model '{name}' was removed", status=404, param="name")
        return seen

    async def _ask(self, what: str, *arguments: Any) -> object:
        """Raises UserError."""
        call_id = next(self._call_ids)
        pending = self._pending[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._node.notify(NodeCall(call_id, what, Raw(msgspec.msgpack.encode(arguments))))
            answer = await pending
        except asyncio.CancelledError:
            self._node.notify(NodeCallCancelled(call_id))
            raise
        finally:
            del self._pending[call_id]
        if answer.refusal:
            raise _error(answer.refusal)
        result: object = msgspec.msgpack.decode(answer.result, type=QUERIES[what].result)
        return result


def _error(refusal: Refusal) -> UserError:
    return UserError(
        refusal.message,
        status=refusal.status,
        param=refusal.param,
        code=refusal.code,
        kind=refusal.kind,
        retry_after_s=refusal.retry_after_s,
    )

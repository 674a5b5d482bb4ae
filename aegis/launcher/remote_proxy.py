"""A proxy in another process as its node sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.queries import NodeQueries
from aegis.node.query_messages import QUERIES
from aegis.telemetry.logs import log
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.model_counts import Tally
from aegis.transport.links import Hub
from aegis.transport.node_messages import (
    CancelResponse,
    Card,
    CardRemoved,
    FromProxy,
    NodeAnswer,
    NodeCall,
    NodeCallCancelled,
    PermitAnswer,
    PrefixFound,
    ProxyReport,
    Refusal,
    ResponseCancelled,
    Scraped,
    ScrapeWanted,
    ToProxy,
)
from proxy.routing.events import ForeignLoad, ModelUp

_logger = logging.getLogger(__name__)
_NOTHING = Raw(msgspec.msgpack.encode(None))
_OF_REQUESTS = (ForeignLoad, PermitAnswer, PrefixFound)
"""Messages that come with requests and tell of no model: with each of them all models would be looked through."""

T = TypeVar("T")

ProxyAnswer = Scraped | ResponseCancelled
"""To a call of the node's."""


class RemoteProxy:
    """Implements `aegis.transport.node_messages.ProxyEnd`."""

    def __init__(self, address: str, identity: str, link: Hub[FromProxy], queries: NodeQueries) -> None:
        self.address = address
        self._identity = identity
        self._link = link
        self._queries = queries
        self._cards: dict[ModelId, Card] = {}  # as it was told last
        self._stripped: dict[ModelId, tuple[ModelSpec, ModelSpec]] = {}  # and what it was made from
        self._call_ids = count()
        self._scrapes: dict[int, asyncio.Future[tuple[Family, ...]]] = {}
        self._cancels: dict[int, asyncio.Future[bytes | None]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}  # by the ids of their calls
        self._tallies: dict[ModelId, Tally] = {}

    def deliver(self, message: ToProxy) -> None:
        """Sends the message; the proxy can look up the models that it is told of."""
        if isinstance(message, ModelUp):
            message = replace(message, spec=self._strip(message.spec))
        changes = () if isinstance(message, _OF_REQUESTS) else self._changes()
        self._link.send(self._identity, [*changes, message])

    def refresh(self) -> None:
        """Sends changes of models that have no event."""
        changes = self._changes()
        if changes:
            self._link.send(self._identity, changes)

    async def scrape(self) -> tuple[Family, ...]:
        return await self._call(ScrapeWanted, self._scrapes)

    async def cancel_response(self, key: str) -> bytes | None:
        return await self._call(partial(CancelResponse, key=key), self._cancels)

    def tallies(self) -> Iterable[Tally]:
        return self._tallies.values()

    def on_message(self, message: ProxyAnswer | NodeCall | NodeCallCancelled | ProxyReport) -> None:
        match message:
            case ProxyReport():
                self._tallies.update((tally.model, tally) for tally in message.tallies)
            case Scraped(call_id, families):
                _answer(self._scrapes.get(call_id), families)
            case ResponseCancelled(call_id, response):
                _answer(self._cancels.get(call_id), response)
            case NodeCall():
                task = self._answering[message.call_id] = asyncio.create_task(self._answer(message))
                task.add_done_callback(lambda _: self._answering.pop(message.call_id))
            case NodeCallCancelled(call_id):
                if call_id in self._answering:
                    self._answering[call_id].cancel()

    def lost(self) -> None:
        """The proxy is lost: no answer of it, or to it, is waited for any more."""
        for scraped in self._scrapes.values():
            _answer(scraped, ())
        for cancelled in self._cancels.values():
            _answer(cancelled, None)
        for task in list(self._answering.values()):
            task.cancel()

    async def _call(self, message: Callable[[int], ToProxy], calls: dict[int, asyncio.Future[T]]) -> T:
        """`message` is made of the call's id."""
        call_id = next(self._call_ids)
        calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.deliver(message(call_id))
            return await calls[call_id]
        finally:
            del calls[call_id]

    async def _answer(self, asked: NodeCall) -> None:
        query = QUERIES[asked.what]
        arguments = msgspec.msgpack.decode(asked.arguments, type=query.arguments)
        try:
            result = await query.answer(self._queries, *arguments)
        except UserError as error:
            self._refuse(asked, error)
        except Exception:  # noqa: BLE001 - a bug of ours costs its request, not the server
            log(_logger, logging.ERROR, "question broke", {"what": asked.what}, exc_info=True)
            self._refuse(asked, UserError("the server failed on this request", status=500, kind="server_error"))
        else:
            self.deliver(NodeAnswer(asked.call_id, Raw(msgspec.msgpack.encode(result))))

    def _refuse(self, asked: NodeCall, error: UserError) -> None:
        refusal = Refusal(error.message, error.status, error.param, error.code, error.kind, error.retry_after_s)
        self.deliver(NodeAnswer(asked.call_id, _NOTHING, refusal))

    def _changes(self) -> list[Card | CardRemoved]:
        cards = {model.spec.model: self._card(model) for model in self._queries.models().values()}
        told, self._cards = self._cards, cards
        gone = [CardRemoved(model) for model in told if model not in cards]
        for removed in gone:
            self._stripped.pop(removed.model, None)
        return [*gone, *(card for model, card in cards.items() if told.get(model) != card)]

    def _card(self, model: CatalogueModel) -> Card:
        return Card(
            self._strip(model.spec),
            model.kv_limit_tokens,
            model.created_s,
            model.state,
            model.detail,
            model.weights,
            model.priority,
            model.limits,
            model.pinned,
            model.pace,
        )

    def _strip(self, spec: ModelSpec) -> ModelSpec:
        """Without what only serves to load it."""
        known = self._stripped.get(spec.model)
        if known is None or known[0] is not spec:
            known = spec, replace(spec, manifest=replace(spec.manifest, tensors=(), checksums=b""))
            self._stripped[spec.model] = known
        return known[1]


def _answer(call: asyncio.Future[T] | None, answer: T) -> None:
    """Nobody may wait for it any more."""
    if call and not call.done():
        call.set_result(answer)

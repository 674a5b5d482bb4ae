"""Messages between a node and its proxies: who lives, which models there are, and what clients ask of the node.

A proxy in the node's own process is told by a call, any other over a link. No message is about a request in flight:
those go between proxies and instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Raw, Struct

from aegis.core.api_keys import Keyring
from aegis.core.decision import Decision
from aegis.core.ids import InstanceId, ModelId
from aegis.core.limits import Limits, Scope
from aegis.core.model import ModelSpec, Pace
from aegis.core.request import Job, KeptPrefix
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.records import Record
from aegis.telemetry.registration import RegisteringModel
from proxy.routing.events import ForeignLoad, ModelAway, ModelMoved, ModelRemoved, ModelUp, MoveModel, PlacesSet, SloSet

TELL_S = 0.2
"""From one time that a proxy tells of its requests, or that it lives, to the next."""

# --- to a proxy -------------------------------------------------------------------------------------------------------


class InstanceLost(Struct, frozen=True, tag=True):
    """This process of the instance is gone. Answered by `Noted` once nothing it said will be heard any more: until then
    the others go on as if it lived. One that was `requested` to end was not killed by a request."""

    instance: InstanceId
    incarnation: int
    requested: bool = False


class InstanceGivenUp(Struct, frozen=True, tag=True):
    """The instance is not started again, or not until a command says so."""

    instance: InstanceId


class Card(Struct, frozen=True, tag=True):
    """The data about a model that clients see, `proxy.http.market.Served` but for its text. A new one replaces the
    last."""

    spec: ModelSpec
    kv_limit_tokens: int
    created_s: int
    state: str
    detail: str
    weights: str
    priority: int
    limits: Limits
    pinned: bool
    pace: Pace | None = None


class Registering(Struct, frozen=True, tag=True):
    """All models that are being registered, or will be when they are wanted, by name."""

    models: dict[str, RegisteringModel]


class CardRemoved(Struct, frozen=True, tag=True):
    """There is no model of that name any more."""

    model: ModelId


class KeysSet(Struct, frozen=True, tag=True):
    """These are the keys now: a request with another one is refused, admitted requests stay."""

    keys: Keyring


class Unserved(Struct, frozen=True, tag=True):
    """No request can be served any more, for this reason: those there are end at once. Without a reason: requests can
    be again."""

    why: str


class Drain(Struct, frozen=True, tag=True):
    """Refuse what comes; what runs may finish within so long, then the rest ends, and the proxy's process too."""

    within_s: float


class NodeAnswer(Struct, frozen=True, tag=True):
    """To the call with this id: its result, or the `UserError` it raises."""

    call_id: int
    result: Raw
    refusal: Refusal | None = None


class Refusal(Struct, frozen=True):
    """A `UserError` on its way."""

    message: str
    status: int
    param: str | None
    code: str | None
    kind: str
    retry_after_s: int | None = None


class PrefixFound(Struct, frozen=True, tag=True):
    """Answers `LookUp`."""

    call_id: int
    kept: KeptPrefix | None


class ScrapeWanted(Struct, frozen=True, tag=True):
    """Answered by `Scraped`."""

    call_id: int


class CancelResponse(Struct, frozen=True, tag=True):
    """Ends the response of that key, if this proxy is generating it. Answered by `ResponseCancelled`."""

    call_id: int
    key: str


class PermitAnswer(Struct, frozen=True, tag=True):
    """To `PermitWanted`: which limit is reached, when to try again, and whether it is a key's or a model's; empty: the
    request may begin."""

    number: int
    refused: str = ""
    wait_ns: int = 0
    kind: str = ""


ToProxy = (
    ModelUp
    | ModelAway
    | ModelRemoved
    | SloSet
    | MoveModel
    | PlacesSet
    | InstanceLost
    | InstanceGivenUp
    | Card
    | CardRemoved
    | Registering
    | ForeignLoad
    | KeysSet
    | Unserved
    | Drain
    | NodeAnswer
    | PrefixFound
    | ScrapeWanted
    | CancelResponse
    | PermitAnswer
)


# --- from a proxy -----------------------------------------------------------------------------------------------------


class Joined(Struct, frozen=True, tag=True):
    """The proxy's process has begun, and listens for instances at this address."""

    address: str


class Serves(Struct, frozen=True, tag=True):
    """It answers clients."""


class Noted(Struct, frozen=True, tag=True):
    """Answers `InstanceLost`."""

    instance: InstanceId
    incarnation: int


class ModelUsed(Struct, frozen=True, tag=True):
    """A request for the model came."""

    model: ModelId


class ModelWanted(Struct, frozen=True, tag=True):
    """A request came for a model that is registered when one does."""

    model: ModelId


class ProxyReport(Struct, frozen=True, tag=True):
    """A few times a second: what the proxy's requests are to the others, and what is to be remembered of them."""

    loads: tuple[ForeignLoad, ...]
    records: tuple[Record, ...] = ()
    decisions: tuple[Decision, ...] = ()
    tallies: tuple[Tally, ...] = ()  # of the models of which something has changed


class Alive(Struct, frozen=True, tag=True):
    """In place of `ProxyReport` where nothing has changed: silence would be taken for death."""


class Scraped(Struct, frozen=True, tag=True):
    """The proxy's metrics as they stand."""

    call_id: int
    families: tuple[Family, ...]


class ResponseCancelled(Struct, frozen=True, tag=True):
    """The response as it ended, in JSON; None where the proxy is not generating it."""

    call_id: int
    response: bytes | None


class NodeCall(Struct, frozen=True, tag=True):
    """A call to the node: a method of `ServerQueries`, with its arguments. Answered by `NodeAnswer`."""

    call_id: int
    what: str
    arguments: Raw


class NodeCallCancelled(Struct, frozen=True, tag=True):
    """The answer is not waited for any more."""

    call_id: int


class LookUp(Struct, frozen=True, tag=True):
    """Asks for the kept KV of this job's prompt on the instance's machine. Answered by `PrefixFound`."""

    call_id: int
    instance: InstanceId
    job: Job


class PermitWanted(Struct, frozen=True, tag=True):
    """A request that something of is limited would begin. Answered by `PermitAnswer`, and by `PermitOver` in turn."""

    number: int
    scopes: tuple[Scope, ...]


class PermitUsed(Struct, frozen=True, tag=True):
    """Its prompt turned out to have so many tokens."""

    number: int
    tokens: int


class PermitOver(Struct, frozen=True, tag=True):
    """The request has ended, with an answer of so many tokens, or its permit is not waited for any more."""

    number: int
    tokens: int


FromProxy = (
    Joined
    | Serves
    | Noted
    | ModelMoved
    | ModelUsed
    | ModelWanted
    | ProxyReport
    | Alive
    | Scraped
    | ResponseCancelled
    | NodeCall
    | NodeCallCancelled
    | LookUp
    | PermitWanted
    | PermitUsed
    | PermitOver
)

OnPrefixFound = Callable[[KeptPrefix | None], None]
"""Told what is kept, if anything."""


class ProxyEnd(Protocol):
    """A proxy, as its node tells it something."""

    address: str

    def deliver(self, message: ToProxy) -> None: ...

    async def scrape(self) -> tuple[Family, ...]:
        """The proxy's metrics; none of one that is lost meanwhile."""
        ...

    async def cancel_response(self, key: str) -> bytes | None:
        """Ends the response of that key: how it ended, in JSON. None where the proxy is not generating it, or is lost
        meanwhile."""
        ...

    def tallies(self) -> Iterable[Tally]:
        """The counts of each model that the proxy had a request for, by its last report."""
        ...

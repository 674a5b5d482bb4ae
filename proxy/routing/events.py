"""Events that the router is told, and effects that it asks its shell to perform."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.decision import Decision
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import FromInstance, ToInstance
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Failure, FinishReason, Job, Token
from aegis.core.role import Role
from aegis.core.views import PPM

# --- events -----------------------------------------------------------------------------------------------------------


class RequestArrived(Struct, frozen=True):
    """`first_choice`: the first choice of the same call, which has the same prompt. One that is `refusable` may end in
    a refusal as long as it has no token (`proxy.routing.admission`)."""

    job: Job
    first_choice: RequestId | None = None
    refusable: bool = False


class ClientLeft(Struct, frozen=True):
    """`satisfied`: not because it lost interest but because it has all it asked for (a stop string)."""

    request: RequestId
    satisfied: bool = False


class MessageReceived(Struct, frozen=True):
    """A message of an instance's living process; the shell drops those of a dead one."""

    instance: InstanceId
    message: FromInstance


class InstanceUp(Struct, frozen=True):
    """The instance's process serves: all models were sent to it before anything that this core sends."""

    instance: InstanceId
    role: Role


class InstanceDown(Struct, frozen=True):
    """Its process is gone. Another one is started, or none any more: `for_good`. One that was `requested` to end was
    not killed by a request."""

    instance: InstanceId
    for_good: bool = False
    requested: bool = False


class ModelUp(Struct, frozen=True, tag=True):
    """Every living instance has bound it: its requests may be placed, those that wait too.

    `capacity_tokens`: what a decode instance holds of its KV beside its weights.
    """

    spec: ModelSpec
    capacity_tokens: int


class ModelAway(Struct, frozen=True, tag=True):
    """Its weights cannot be loaded: what is placed waits for the next `ModelUp`, or `ModelRemoved`."""

    model: ModelId


class SloSet(Struct, frozen=True, tag=True):
    """From now on the model's tokens are due as `slo` says. A model that is not up, or not any more, is left out."""

    model: ModelId
    slo: Slo


class ModelRemoved(Struct, frozen=True, tag=True):
    """`why` completes the sentence that its requests end with: "model 'm' was removed". If it `returns`, the next
    request that wants it is answered again."""

    model: ModelId
    why: str = "was removed"
    returns: bool = False


class MoveModel(Struct, frozen=True, tag=True):
    """The model's requests go on at `target`, those at `source` or, without one, those that are anywhere else: of them
    the last to have come, as few as have `share_ppm` of their tokens, in millionths. Once the target holds the model,
    those that come go to `places`; none: to the target. Answered by `ModelMoved` of its `number`, once; a later move of
    the model takes the place of one under way."""

    model: ModelId
    target: InstanceId
    source: InstanceId | None = None
    places: tuple[InstanceId, ...] = ()
    share_ppm: int = PPM
    number: int = 0


class PlacesSet(Struct, frozen=True, tag=True):
    """From now on requests of the model go to these instances, to that of them that is up and under least pressure.
    None, or none that is up: where the policy says."""

    model: ModelId
    instances: tuple[InstanceId, ...]


class ModelLoad(Struct, frozen=True):
    """Requests of one model that are decoded, or are to be, and the tokens of all of them. For whoever decides whom to
    refuse also the time to prefill those that have no token yet, the model being there, and what all are worth beyond
    one each."""

    model: ModelId
    requests: int
    tokens: int
    prefill_ns: int = 0
    more_worth: float = 0.0


class ForeignLoad(Struct, frozen=True, tag=True):
    """Requests that other proxies have placed on an instance, by their last report: `prefill_ns` is the estimated time
    of their waiting prefills."""

    instance: InstanceId
    prefill_ns: int
    models: tuple[ModelLoad, ...]


Event = (
    RequestArrived
    | ClientLeft
    | MessageReceived
    | InstanceUp
    | InstanceDown
    | ModelUp
    | ModelAway
    | SloSet
    | ModelRemoved
    | MoveModel
    | PlacesSet
    | ForeignLoad
)


# --- effects ----------------------------------------------------------------------------------------------------------


class To(Struct, frozen=True):
    instance: InstanceId
    message: ToInstance


class Deliver(Struct, frozen=True):
    """Tokens `[first, first + len(tokens))` for the client."""

    request: RequestId
    first: int
    tokens: tuple[Token, ...]


class DeliverPrompt(Struct, frozen=True):
    request: RequestId
    tokens: tuple[Token, ...]


class DeliverReused(Struct, frozen=True):
    """The first `tokens` of the request's prompt were kept from before. Precedes its first token."""

    request: RequestId
    tokens: int


class Ended(Struct, frozen=True):
    """The terminal reply. With `state` FINISHED a reason, with FAILED a message for the client, and its kind. Who is
    refused may ask again after `retry_s`."""

    request: RequestId
    state: State
    reason: FinishReason | None = None
    message: str = ""
    failure: Failure = Failure.GENERATION
    retry_s: int = 0


class Replayed(Struct, frozen=True):
    """For the metrics: a request starts again from its prompt and the tokens sent."""

    request: RequestId


class ModelMoved(Struct, frozen=True, tag=True):
    """Answers `MoveModel`: so many requests have `moved` with their KV, and so many were `replayed`. With `why` the
    move was given up for that reason, and the others went on elsewhere. `kv_tokens` have the moved ones together."""

    model: ModelId
    target: InstanceId
    moved: int
    replayed: int
    why: str = ""
    kv_tokens: int = 0
    number: int = 0


Effect = To | Deliver | DeliverPrompt | DeliverReused | Ended | Replayed | ModelMoved | Decision

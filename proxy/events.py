"""What the session core is told, and what it asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import FromInstance, ToInstance
from aegis.core.model import ModelSpec
from aegis.core.request import FinishReason, Job, Token

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    job: Job


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """`satisfied`: not because it lost interest but because it has all it asked for (a stop string)."""

    request: RequestId
    satisfied: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of an instance's living process; the shell drops those of a dead one."""

    instance: InstanceId
    message: FromInstance


@dataclass(frozen=True, slots=True)
class InstanceUp:
    """Its process serves: all models were sent to it before anything this core sends."""

    instance: InstanceId
    prefill: bool


@dataclass(frozen=True, slots=True)
class InstanceDown:
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class ModelUp:
    """Every living instance has bound it: its requests may be placed, those that wait too.

    `capacity_tokens`: what a decode instance holds of its KV beside its weights.
    """

    spec: ModelSpec
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class ModelGone:
    """`why` completes the sentence that its requests end with: "model 'm' was removed"."""

    model: ModelId
    why: str = "was removed"


Event = Arrived | ClientLeft | Heard | InstanceUp | InstanceDown | ModelUp | ModelGone


# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class To:
    instance: InstanceId
    message: ToInstance


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens `[first, first + len(tokens))` for the client."""

    request: RequestId
    first: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    request: RequestId
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The terminal reply. With `state` FINISHED a reason, with FAILED a message for the client."""

    request: RequestId
    state: State
    reason: FinishReason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """For the metrics: a request starts again from its prompt and the tokens sent."""

    request: RequestId


Effect = To | Deliver | DeliverPrompt | Ended | Replayed

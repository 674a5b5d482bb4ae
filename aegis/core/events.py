"""Events that a shell tells an instance core, besides the messages of `aegis.core.messages`."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.effects import StreamName
from aegis.core.ids import ModelId
from aegis.core.messages import ToInstance
from aegis.core.request import Token


class Progress(Struct, frozen=True, tag=True):
    """The stream has completed all its copies up to and including number `value`."""

    stream: StreamName
    value: int


class LoadFailed(Struct, frozen=True, tag=True):
    """The model's image could not be read from disk: what its range holds is not its weights. Told before the
    `Progress` that says the load's event has passed. `reason` is for the client."""

    model: ModelId
    reason: str


class Stepped(Struct, frozen=True):
    """The result of the last run on the lane: the tokens that each of its steps made, in the order of the rows that
    make one; no step if none does. `duration_ns` is that of the whole run; 0 if nothing was run yet, and a later row
    will run that too. `prompt` holds the prompt's logprobs, if the run is of one prompt that was asked for them."""

    steps: tuple[tuple[Token, ...], ...]
    duration_ns: int
    prompt: tuple[Token, ...] = ()
    lane: int = 0
    processor_ns: int = 0
    """What it took of a processor whose time lanes share; 0 where they do not."""


class StepFailed(Struct, frozen=True):
    """In place of `Stepped`: the engine raised in a step, for which no row has a token. Those of earlier steps of the
    run have been sent. `reason` is for the client."""

    reason: str
    lane: int = 0


class Tick(Struct, frozen=True):
    """Time has passed, nothing else. To be told now and then while `Balloon.owes`."""


InstanceEvent = ToInstance | Progress | LoadFailed | Stepped | StepFailed | Tick

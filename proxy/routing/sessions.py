"""A request, as its proxy has it from its arrival to its one terminal reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from aegis.core.ids import InstanceId, RequestId
from aegis.core.lifecycle import State
from aegis.core.request import Job, KvHandle

MAX_LOSSES: Final = 3
"""A request fails after so many instances have died while it was running on them, because it may be what kills them."""

MAX_REPLAYS: Final = 10
"""The same for instances on which it was waiting: that it was running may not have been reported yet."""

BEFORE_FIRST_TOKEN: Final = (State.QUEUED, State.PREFILLING)
"""No request of a batch that has the turn is in these states: a message that says so is about an attempt that was given
up."""


@dataclass(slots=True, eq=False)
class Session:
    """`prefill` is the instance that prefills it, or has done so, or that handed its KV over last; `target` the one
    that a move sends it to."""

    job: Job
    first_choice: RequestId | None = None
    state: State = State.QUEUED
    sent: list[int] = field(default_factory=list)  # no logprobs: they are sent once, and take much more memory
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    target: InstanceId | None = None
    kv: KvHandle | None = None  # handed over and not adopted yet
    prompt_reported: bool = False
    reused: int = 0  # tokens that the running prefill need not run
    losses: int = 0
    deaths: int = 0


class Handle(Struct, frozen=True):
    """KV that is being adopted."""

    owner: InstanceId
    adopter: InstanceId

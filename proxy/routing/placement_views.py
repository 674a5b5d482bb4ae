"""What policies of placement see of a pool, and the form of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import PPM


class PlacedLoad(NamedTuple):
    """The requests of a model on an instance, their tokens if each has made one every TBT, and what they want of the
    instance: a part of its time for a step every TBT, of its time if weights are loaded every TTFT, and of its memory,
    in millionths. Where all requests are of one proxy, it knows their tokens, which are `ahead_tokens` more, or fewer,
    and those of the largest request; else both are 0."""

    model: ModelId
    requests: int
    tokens: int
    steps_ppm: int
    loads_ppm: int
    memory_ppm: int
    ahead_tokens: int = 0
    largest_tokens: int = 0


class InstanceView(Struct, frozen=True):
    """An instance that decodes. Of a group of ranks each has a device of its own, so that no two parts of a model are
    ever on one; instances may share devices. Devices are numbered."""

    instance: InstanceId
    devices: tuple[int, ...]
    memory_bytes: int  # of each
    loads: tuple[PlacedLoad, ...]


class ModelView(Struct, frozen=True):
    """`places` are the instances that its requests go to, the first one before all others; none: wherever."""

    model: ModelId
    weight_bytes: int  # on each device
    token_bytes: int
    tbt_ns: int
    tokens_per_s: float  # that its KV grows by of late: prompts, and a token every TBT of each request
    prefill_ppm: int  # of an instance's time, for its prompts
    places: tuple[InstanceId, ...]


class PlacementView(Struct, frozen=True):
    """Instances and models that serve, in order of name."""

    instances: Mapping[InstanceId, InstanceView]
    models: Mapping[ModelId, ModelView]


class Change(Struct, frozen=True):
    """From now on requests of the model go to `places`; those at `source`, or anywhere but there, go on at the first,
    or the last to have come of them, with `share_ppm` of their tokens. Where they stay, `moves` is false. `gain_ppm`:
    what the most loaded of the devices concerned is relieved of, in millionths of its time; None: the policy has
    weighed the costs."""

    model: ModelId
    places: tuple[InstanceId, ...]
    moves: bool
    because: str
    source: InstanceId | None = None
    gain_ppm: int | None = None
    share_ppm: int = PPM


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """The rules that a policy sets for its core."""

    window_ns: int = 60 * NS_PER_S  # over which loads are averaged, and a move has to pay for itself
    held_ns: int = 0  # for so long a change has been wanted, without a break, before it is made
    settled_ns: int = 10 * NS_PER_S  # after a change nothing moves
    idle_ns: int | None = None  # weights of a model that was idle for so long leave; None: they stay
    keeps: bool = True  # requests go where their model was moved to; otherwise, once it was, where they would go


class PlacementPolicy(Protocol):
    """A policy that chooses the instances that requests of a model go to."""

    @property
    def rules(self) -> PlacementRules: ...

    def changes(self, view: PlacementView) -> Sequence[Change]:
        """The changes that are wanted, the most urgent one first. None under loads that a change of its own has left:
        nothing moves to and fro."""
        ...

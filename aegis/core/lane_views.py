"""What a policy of lanes sees, and the form of its answers: what runs beside a decode on a divided device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from aegis.core.views import BatchView


class Division(Struct, frozen=True):
    """The device, divided between a decode and what runs beside it. Shares are in thousandths."""

    shares: tuple[int, int]
    step_ns: int  # one step of the decode on the first lane, at worst
    beside_ns: int  # what runs on the second one: estimated time of all of the prompt, or of one step at worst
    gain: float  # the work that both do in a time, as is to be expected: what one alone on the whole device does is 1


class Companion(Struct, frozen=True):
    """What could run beside the decode at once: the next prompt of its own batch or of another one, or steps of another
    one."""

    batch: BatchView
    prefills: bool
    alone_ns: int  # its estimated time on the whole device: all of the prompt, or one step
    divisions: Sequence[Division]  # the smallest share of the decode first; at least one


class LanesView(Struct, frozen=True):
    """A decode that is to begin, or goes on, and what could run beside it; the prompt of its own batch comes first."""

    decoding: BatchView
    step_ns: int  # estimated time of one step of it on the whole device
    companions: Sequence[Companion]  # at least one


class LaneChoice(Struct, frozen=True):
    """A companion, by its batch, and the shares that it and the decode get. A prompt is run for `within_ns` at most, as
    far as it can be cut; steps go on for so long. None: all of the prompt. Prompts join one that is run to its end as
    long as all take no more than `joins_ns`, or `within_ns`."""

    batch: int
    prefills: bool
    shares: tuple[int, int]
    within_ns: int | None = None
    joins_ns: int = 0


@runtime_checkable
class LanePolicy(Protocol):
    """A `RoundPolicy` that divides devices."""

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        """What runs on the second lane; None: nothing, and the decode has the whole device."""
        ...

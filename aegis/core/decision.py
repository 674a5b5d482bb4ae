"""The reasons of decisions: the slack, the cost, and the alternative that lost.

A decision is explained only on request, by a pure function of the view from which it was made. The policy itself
explains it, by the numbers that it decides by; for a policy that does not, the explanation is what it saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import BatchView, DecodeView, PrefillPlacement, PrefillView, Turn, WaitingJobs, Work


class DecisionKind(StrEnum):
    PLACE = "place"  # where a request goes
    PREFILL = "prefill"  # which job is next on a prefill instance
    TURN = "turn"  # which batch has the turn on a decode or mixed instance
    EVICT = "evict"  # whose weights leave a device, or whose KV
    REFUSE = "refuse"  # which request is not served, or not any more


class Why(Struct, frozen=True, omit_defaults=True, gc=False):
    """A reason, in words and in numbers. `slack_ns` is the time until the choice had to begin to be on time, `cost_ns`
    the time before its first step: of weights to load and prefills. An eviction has the numbers of its next use, and
    `lost` is the one that stays. None: the number does not apply."""

    because: str
    slack_ns: int | None = None
    cost_ns: int | None = None
    lost: str | None = None  # the model, instance or request that came second
    lost_slack_ns: int | None = None
    lost_cost_ns: int | None = None


class Contender(NamedTuple):
    """A candidate for the next turn or prefill, with what it `wants` in words and the numbers of a `Why`."""

    model: ModelId
    wants: str
    slack_ns: int | None
    cost_ns: int


def why_before(because: str, first: Contender, second: Contender | None, *, then: str) -> Why:
    """The reason with the numbers of the first one and of the one after it."""
    if second is None:
        return Why(because, first.slack_ns, first.cost_ns)
    return Why(
        f"{because}; {then} {second.model} ({second.wants})",
        first.slack_ns,
        first.cost_ns,
        second.model,
        second.slack_ns,
        second.cost_ns,
    )


class Decision(Struct, frozen=True, gc=False):
    """`instance` is where it takes effect. `requests` are those it is about; there is nothing else of them in it."""

    at_ns: int
    instance: InstanceId
    kind: DecisionKind
    model: ModelId
    requests: tuple[RequestId, ...]
    what: str
    why: Why

    @property
    def line(self) -> str:
        return f"{self.what}: {self.why.because}"


class Plan(NamedTuple):
    """The turns of a plan, the batches that it was made over, and when."""

    batches: Sequence[BatchView]
    turns: Sequence[Turn]
    made_ns: int

    def batch(self, at: int) -> BatchView | None:
        """The batch of turn number `at`, if there is one."""
        if at >= len(self.turns):
            return None
        return next(batch for batch in self.batches if batch.batch == self.turns[at].batch)


@runtime_checkable
class ExplainsTurns(Protocol):
    """A `RoundPolicy` that does."""

    def why_turn(self, plan: Plan, at: int) -> Why:
        """The reason of turn number `at` of a plan of this policy, when the plan was made."""
        ...


@runtime_checkable
class ExplainsPlaces(Protocol):
    """A `DecodePolicy` that does."""

    def why_place(self, work: Work, lists: DecodeView, chosen: InstanceId) -> Why:
        """The reason for placing the work there; the lists are as they were then."""
        ...


@runtime_checkable
class ExplainsGroups(Protocol):
    """A `PrefillPolicy` that does."""

    def why_group(self, work: Work, queues: PrefillView, chosen: PrefillPlacement) -> Why:
        """The reason for placing the work there; the queues are as they were then."""
        ...


@runtime_checkable
class ExplainsOrder(Protocol):
    """A `PrefillOrder` that does."""

    def why_next(self, waiting: WaitingJobs, order: Sequence[int], now_ns: int) -> Why:
        """The reason why the first job of the order is first, when the order was made."""
        ...

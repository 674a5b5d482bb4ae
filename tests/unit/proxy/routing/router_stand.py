"""A router and what is said to and by it."""

from __future__ import annotations

from typing import TypeVar

from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import FromInstance, KvReleased, Phase, Prefilled, Started, ToInstance, Tokens
from aegis.core.request import EventHandle, Job, KvHandle, Sampling, Token
from aegis.core.role import Role
from aegis.core.views import DecodePolicy
from aegis.sim.faults.fake_models import make_spec
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.events import Deliver, Effect, Ended, Event, InstanceUp, MessageReceived, ModelUp, RequestArrived, To
from proxy.routing.router import Router

SPEC = make_spec(0, image_pages=3, block_bytes=1024)
OTHER = make_spec(1, image_pages=3, block_bytes=1024)
P0, P1, D0, D1 = (InstanceId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))
R = RequestId(1)

T = TypeVar("T", bound=ToInstance)


class Proxy:
    """Checks laws 1 and 2 on all that is said to the client."""

    def __init__(self, *instances: InstanceId, policy: DecodePolicy | None = None) -> None:
        self.core = Router(GroupedFcfs(), policy or WeightedRoundRobin(), Hardware())
        self.delivered: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, Ended] = {}
        self.last: list[Effect] = []
        for spec in (SPEC, OTHER):
            self.tell(ModelUp(spec, 1000))
        for instance in instances:
            self.up(instance)

    def tell(self, event: Event) -> list[Effect]:
        self.last = self.core.on(event, 0)
        for effect in self.last:
            match effect:
                case Deliver(request, first, tokens):
                    got = self.delivered.setdefault(request, [])
                    assert first == len(got) and request not in self.ended
                    got += [token.id for token in tokens]
                case Ended(request):
                    assert request not in self.ended
                    self.ended[request] = effect
        return self.last

    def up(self, instance: InstanceId) -> None:
        self.tell(InstanceUp(instance, Role(instance.partition("-")[0])))

    def arrive(self, request: int = 1, *, model: ModelId = SPEC.model, prompt: int = 4) -> None:
        job = Job(RequestId(request), 1, model, tuple(range(prompt)), Sampling(max_tokens=50), 0)
        self.tell(RequestArrived(job))

    def heard(self, instance: InstanceId, message: FromInstance) -> None:
        self.tell(MessageReceived(instance, message))

    def sent(self, kind: type[T]) -> list[tuple[InstanceId, T]]:
        """Messages of a kind that the last event caused."""
        return [(e.instance, e.message) for e in self.last if isinstance(e, To) and isinstance(e.message, kind)]

    def all_sent(self) -> list[tuple[InstanceId, ToInstance]]:
        return [(e.instance, e.message) for e in self.last if isinstance(e, To)]

    def state(self, request: int = 1) -> State | None:
        found = self.core.states().get(RequestId(request))
        return found[1] if found else None

    # --- as instances do ---

    def prefilled(self, *, owner: InstanceId = P0, attempt: int = 1, token: int = 10, request: RequestId = R) -> None:
        self.heard(owner, Prefilled(request, attempt, Token(token), handle(owner), 5))

    def decodes(self, *, attempt: int = 1, decode: InstanceId = D0) -> None:
        self.heard(decode, Phase((R,), running=True))

    def reach(self, point: str) -> None:
        """Request 1 from its arrival to `point`."""
        self.arrive()
        if point == "queued":
            return
        self.heard(P0, Started(R, 1))
        if point == "prefilling":
            return
        self.prefilled()
        if point == "handed off":
            return
        if point != "decoding, KV not there":
            self.heard(D0, KvReleased(R, 1, handle(P0)))
        self.decodes()
        self.heard(D0, Tokens(R, 1, 1, (Token(11),)))
        if point == "preempted":
            self.heard(D0, Phase((R,), running=False))


def handle(owner: InstanceId) -> KvHandle:
    return KvHandle(owner, ((1, 2),), 4, EventHandle(0, 1))

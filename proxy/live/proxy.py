"""A proxy: the router wired to clients, instances and its node.

Requests go to instances and come back from them directly; its node tells it which instances and models there are. It is
one object of one event loop: the core's decisions on an event are performed before the next event is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry

from aegis.core.api_keys import Caller, Keyring
from aegis.core.clock import Clock
from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, ProxyId, RequestId, nth_request
from aegis.core.lifecycle import State
from aegis.core.limits import Scope
from aegis.core.messages import Adopt, FromInstance, Greeting, Phase, Started, Submit
from aegis.core.request import PRIORITY_MAX, Failure, Job, Sampling
from aegis.core.role import Role
from aegis.core.views import Work
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.history import History
from aegis.telemetry.metrics.requests import Metrics
from aegis.telemetry.metrics.scrape import Family, in_slices, scrape
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.records import REFUSED
from aegis.telemetry.registration import RegisteringModel
from aegis.telemetry.request_stages import RequestStages
from aegis.transport.links import Hub
from aegis.transport.node_messages import (
    Drain,
    FromProxy,
    InstanceGivenUp,
    InstanceLost,
    KeysSet,
    ModelUsed,
    ModelWanted,
    Noted,
    OnPrefixFound,
    PermitAnswer,
    ProxyReport,
    Registering,
    ToProxy,
    Unserved,
)
from aegis.transport.outbox import Outbox
from memory.host_kv import with_prefix
from proxy.http.market import (
    Delta,
    Failed,
    Finished,
    Permit,
    PromptScores,
    Reused,
    SequenceHandle,
    Served,
    ServerQueries,
)
from proxy.http.replies import encode
from proxy.http.responses.running_responses import RunningResponses
from proxy.live.permits import ProxyPermits, too_many
from proxy.live.sequence_handle import LiveSequenceHandle
from proxy.live.unread_answers import UnreadAnswers
from proxy.routing.events import (
    ClientLeft,
    Deliver,
    DeliverPrompt,
    DeliverReused,
    Ended,
    Event,
    ForeignLoad,
    InstanceDown,
    InstanceUp,
    MessageReceived,
    ModelAway,
    ModelMoved,
    ModelRemoved,
    ModelUp,
    MoveModel,
    PlacesSet,
    Replayed,
    RequestArrived,
    SloSet,
    To,
)
from proxy.routing.patience import no_time_for, retry_after_s
from proxy.routing.router import Router


class NodeLink(Protocol):
    """The node, as its proxy sees it."""

    @property
    def queries(self) -> ServerQueries: ...

    def models(self) -> Mapping[str, Served]:
        """The models by the name that clients use."""
        ...

    def coming(self) -> Mapping[str, RegisteringModel]:
        """Models that are being registered."""
        ...

    def look_up(self, instance: InstanceId, job: Job, found: OnPrefixFound) -> None:
        """Looks up the KV that is kept of the job's prompt on the instance's machine, and answers at once or later."""
        ...

    def notify(self, message: FromProxy) -> None: ...


class Proxy:
    """Implements `proxy.http.market.Market` and `aegis.transport.node_messages.ProxyEnd`."""

    def __init__(
        self,
        number: ProxyId,
        core: Router,
        node: NodeLink,
        link: Hub[FromInstance],
        clock: Clock,
        history: History,
        *,
        decisions: DecisionLog | None = None,
        stages: RequestStages | None = None,
        refuses_late: bool = False,
    ) -> None:
        """`stages` are for traces, if they are wanted. If it `refuses_late`, a request whose first token would be late
        is refused."""
        self.address = link.address
        self.number = number
        self.keys = Keyring()  # until its node sends them
        self.draining = False
        self.running_responses = RunningResponses()
        self._gathering = 0  # calls of which not all choices have been submitted
        self._core = core
        self._node = node
        self._link = link
        self._clock = clock
        self._decisions = decisions
        self._history = history
        self._stages = stages
        self._metrics = Metrics()
        self._permits = ProxyPermits(node.notify)
        self._refuses_late = refuses_late
        self._handles: dict[RequestId, LiveSequenceHandle] = {}
        self._unread_answers = UnreadAnswers()
        self._next_request = 0
        self._unserved = ""  # the reason, if nothing can be served any more
        self._identities: dict[InstanceId, str] = {}  # the processes of those that are up
        self._lost: dict[InstanceId, int] = {}  # the last incarnation known to be gone
        self._foreign: dict[InstanceId, ForeignLoad] = {}  # the last reports of the node
        self._outbox = Outbox(link, lambda instance: self._identities[instance], clock, decisions)

    # --- what the HTTP layer asks -------------------------------------------------------------------------------------

    @property
    def queries(self) -> ServerQueries:
        return self._node.queries

    def models(self) -> Mapping[str, Served]:
        return self._node.models()

    def coming(self) -> Mapping[str, RegisteringModel]:
        return self._node.coming()

    def want(self, model: ModelId) -> None:
        self._node.notify(ModelWanted(model))

    async def permit(self, caller: Caller | None, model: ModelId | None) -> Permit:
        scopes = [Scope("key", caller.name, caller.limits)] if caller else []
        if model is not None and (served := self._node.models().get(model)):
            scopes.append(Scope("model", model, served.limits))
        return await self._permits.ask(tuple(scopes))

    @contextmanager
    def together(self) -> Iterator[None]:
        self._gathering += 1
        try:
            yield
        finally:
            self._gathering -= 1
            self._outbox.flush()

    def submit(
        self,
        model: ModelId,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        sent: tuple[int, ...] = (),
        first_choice: SequenceHandle | None = None,
        among: SequenceHandle | None = None,
    ) -> LiveSequenceHandle:
        served = self._node.models().get(model)
        if served is None:
            raise UserError(f"model '{model}' was removed", status=404, param="model", code="model_not_found")
        if served.state == "failed":
            raise UserError(f"model '{model}' cannot be served: {served.detail}", status=503)
        if why := self._unavailable():
            raise UserError(why, status=503, code=Failure.SHUTTING_DOWN if self.draining else None, kind="server_error")
        ranked = min(max(priority + served.priority, -PRIORITY_MAX), PRIORITY_MAX)
        self._next_request += 1
        request, now_ns = nth_request(self.number, self._next_request), self._clock.now_ns()
        slo = served.spec.slo
        refusable = self._refuses_late and not (sent or first_choice or among)  # what was begun goes on
        if refusable:
            late_ns = self._core.admission.late_ns(Work(served.spec.base or model, len(prompt)), ranked, now_ns)
            if late_ns is not None:
                log, tokens = self._history.requests, sampling.max_tokens
                log.arrived(request, model, slo, now_ns, prompt_tokens=len(prompt), max_tokens=tokens)
                log.end(request, REFUSED)
                raise _late(model, late_ns)
        handle = self._handles[request] = LiveSequenceHandle(
            request,
            self._happened,
            self._core.waiting_before,
            self._unread_answers,
            among if isinstance(among, LiveSequenceHandle) else None,
        )
        self._node.notify(ModelUsed(model))
        most = sampling.max_tokens - len(sent)  # the others have been counted where it was begun
        for watcher in (self._metrics, self._history.requests):
            watcher.arrived(request, model, slo, now_ns, prompt_tokens=len(prompt), max_tokens=most)
        if self._stages:
            self._stages.arrived(request, model, slo, now_ns, prompt_tokens=len(prompt))
        base, adapter = (served.spec.base, model) if served.spec.base else (model, None)
        job = Job(request, 1, base, tuple(prompt), sampling, now_ns, sent, ranked, adapter=adapter)
        first = first_choice.request if isinstance(first_choice, LiveSequenceHandle) else None
        self._happened(RequestArrived(job, first, refusable))
        return handle

    @property
    def registry(self) -> CollectorRegistry:
        """The registry of its metrics."""
        return self._metrics.registry

    def answered(self, path: str, code: int, refused: str | None) -> None:
        self._metrics.answered(path, code, refused)

    @property
    def busy(self) -> bool:
        return bool(self._handles)

    def flush(self) -> None:
        """Sends what waited for a look-up of kept KV."""
        self._outbox.flush()

    def abandon(self) -> None:
        """Fails every request that has not ended: the server is about to end, or no instance is left to serve them."""
        for request in list(self._handles):
            self._happened(ClientLeft(request))

    def _unavailable(self) -> str:
        """The reason why no request can be served, if none can."""
        return "the server is shutting down; try another one" if self.draining else self._unserved

    # --- what the node says -------------------------------------------------------------------------------------------

    def deliver(self, message: ToProxy) -> None:
        match message:
            case ModelUp() | ModelAway() | ModelRemoved() | SloSet() | MoveModel() | PlacesSet():
                self._happened(message)
            case ForeignLoad(instance):
                self._foreign[instance] = message
                self._happened(message)
            case InstanceLost(instance, incarnation, requested):
                self._lost[instance] = incarnation
                if self._identities.get(instance) == f"{instance}/{incarnation}":
                    self._down(instance, requested=requested)
                    self._outbox.flush()
                self._node.notify(Noted(instance, incarnation))
            case InstanceGivenUp(instance):
                self._happened(InstanceDown(instance, for_good=True))
            case KeysSet(keys):
                self.keys = keys
            case Unserved(why):
                self._unserved = why
                if why:
                    self.abandon()
            case Drain():
                self.draining = True
            case Registering():
                pass  # the node's catalogue is at hand
            case PermitAnswer():
                self._permits.answered(message)
            case _:
                raise AssertionError(f"not for a proxy: {message}")

    async def cancel_response(self, key: str) -> bytes | None:
        ended = await self.running_responses.cancel(key)
        return None if ended is None else encode(ended)

    async def scrape(self) -> tuple[Family, ...]:
        return await in_slices(scrape(self._metrics.registry))

    def report(self) -> ProxyReport:
        """The report that the other proxies get a few times a second, if there are any."""
        return ProxyReport(tuple(self._core.loads()), tallies=tuple(self._metrics.changed_tallies()))

    def tallies(self) -> list[Tally]:
        return self._metrics.tallies()

    # --- what instances say -------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Runs until it is cancelled."""
        while True:
            identity, messages = await self._link.receive()
            name, _, incarnation = identity.rpartition("/")
            self._on_messages(InstanceId(name), int(incarnation), messages)
            self._outbox.flush()

    def _on_messages(self, instance: InstanceId, incarnation: int, messages: Sequence[FromInstance]) -> None:
        """Messages of a process that is gone are ignored, however many there are."""
        identity = f"{instance}/{incarnation}"
        for message in messages:
            if isinstance(message, Greeting):
                self._greeted(instance, incarnation, message.role)
            elif self._identities.get(instance) == identity:
                self._observe(message)
                self._perform(MessageReceived(instance, message))

    def _greeted(self, instance: InstanceId, incarnation: int, role: Role) -> None:
        if incarnation <= self._lost.get(instance, 0):
            return
        if instance in self._identities:  # the news of its end is on its way
            self._down(instance, requested=False)
        self._identities[instance] = f"{instance}/{incarnation}"
        self._perform(InstanceUp(instance, role))
        if instance in self._foreign:
            self._perform(self._foreign[instance])

    def _down(self, instance: InstanceId, *, requested: bool) -> None:
        del self._identities[instance]
        self._outbox.forget(instance)
        self._perform(InstanceDown(instance, requested=requested))

    def _observe(self, message: FromInstance) -> None:
        match message:
            case Started(request, _) if request in self._handles:
                self._metrics.started(request, self._clock.now_ns())
                if self._stages:
                    self._stages.started(request, self._clock.now_ns())
            case Phase(requests, running):
                self._metrics.phase(requests, running=running)
                if self._stages:
                    self._stages.phase(requests, self._clock.now_ns(), running=running)

    # --- doing --------------------------------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        """Takes an event that comes from outside the instances."""
        self._perform(event)
        if not self._gathering:
            self._outbox.flush()

    def _perform(self, event: Event) -> None:
        now_ns = self._clock.now_ns()
        for effect in self._core.on(event, now_ns):
            match effect:
                case To(instance, Submit() as submit):
                    self._submit(instance, submit)
                case To(instance, message):
                    self._outbox.put(instance, message)
                    if self._stages and isinstance(message, Adopt):
                        self._stages.handed_over(message.job.request, now_ns)
                case Deliver(request, _, tokens):
                    self._metrics.token(request, now_ns, len(tokens))
                    self._history.requests.tokens(request, now_ns, len(tokens))
                    if self._stages:
                        self._stages.tokens(request, now_ns, len(tokens))
                    self._handles[request].put(Delta(tokens))
                case DeliverPrompt(request, tokens):
                    self._handles[request].put(PromptScores(tokens))
                case DeliverReused(request, tokens):
                    self._handles[request].put(Reused(tokens))
                case Replayed(request):
                    self._metrics.replayed(request)
                    if self._stages:
                        self._stages.replayed(request, now_ns)
                case ModelMoved():
                    self._node.notify(effect)
                case Ended():
                    self._end(effect, now_ns)
                case Decision():
                    self._decided(effect)

    def _submit(self, instance: InstanceId, submit: Submit) -> None:
        """Submits it with the kept KV of its prompt. Messages that are sent there meanwhile come after it."""
        placeholder = self._outbox.reserve(instance)
        self._node.look_up(instance, submit.job, lambda kept: self._outbox.fill(placeholder, with_prefix(submit, kept)))

    def _decided(self, decision: Decision) -> None:
        self._history.decisions.add((decision,))
        if self._decisions:
            self._decisions.explained(decision)

    def _end(self, ended: Ended, now_ns: int) -> None:
        handle = self._handles.pop(ended.request)
        if self._stages:
            self._stages.end(ended.request, ended.state.value, now_ns)
        if ended.state is State.FINISHED and ended.reason is not None:
            self._metrics.finished(ended.request, ended.reason, now_ns)
            self._history.requests.end(ended.request, "finished")
            handle.put(Finished(ended.reason))
        elif ended.state is State.FAILED:
            refused = ended.failure is Failure.WOULD_BE_LATE
            self._metrics.failed(ended.request, refused=refused)
            self._history.requests.end(ended.request, REFUSED if refused else "failed")
            handle.put(Failed(ended.message, kind=ended.failure, retry_after_s=ended.retry_s or None))
        else:
            self._metrics.cancelled(ended.request)
            self._history.requests.end(ended.request, "cancelled")
            why = self._unavailable()
            kind = Failure.SHUTTING_DOWN if self.draining else Failure.GENERATION
            handle.put(Failed(why, 503, kind) if why else Failed("cancelled", 499))


def _late(model: ModelId, late_ns: int) -> UserError:
    retry_s = retry_after_s(late_ns)
    return too_many(no_time_for(model, retry_s), retry_s, Failure.WOULD_BE_LATE)

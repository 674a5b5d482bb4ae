"""The session core: every request from its arrival to its one terminal reply, whatever dies meanwhile.

`on(event, now_ns) -> effects`; no clock, no I/O. It places requests on prefill instances, carries the KV's address from
prefill to decode, delivers tokens in order and each exactly once, and replays requests whose instance was lost.

Laws: (1) tokens of a request are delivered as indices 0, 1, 2 …, none twice, none left out, over all its attempts; (2)
exactly one `Ended` per request, and nothing after it; (3) every `KvHandle` is released to a living owner exactly once,
by whoever adopted it or, if the adopter died, by this core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State, Step, advance
from aegis.core.messages import (
    Adopt,
    Broken,
    Cancel,
    FromInstance,
    GaveUp,
    KvReleased,
    Phase,
    Prefilled,
    PromptLogprobs,
    ReleaseKv,
    Started,
    Submit,
    SwitchDone,
    Tokens,
)
from aegis.core.request import FinishReason, Job, KvHandle, Token
from aegis.core.views import DecodePolicy, PrefillPolicy
from proxy.dispatch import DecodeMirror, PrefillMirror
from proxy.events import (
    Arrived,
    ClientLeft,
    Deliver,
    DeliverPrompt,
    Effect,
    Ended,
    Event,
    Heard,
    InstanceDown,
    InstanceUp,
    ModelGone,
    ModelUp,
    Replayed,
    To,
)

MAX_LOSSES = 3
"""A request that has seen so many instances die while it was running on them is failed: it may be what kills them."""

MAX_REPLAYS = 10
"""The same for deaths of whatever it was waiting on: what was running may not have had the time to say so."""


@dataclass(slots=True)
class _Session:
    job: Job
    state: State = State.QUEUED
    sent: list[int] = field(default_factory=list)
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    kv: KvHandle | None = None  # handed over and not adopted yet
    prompt_reported: bool = False
    losses: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class _Handle:
    owner: InstanceId
    adopter: InstanceId


class SessionCore:
    """All requests of one proxy."""

    def __init__(self, prefill_policy: PrefillPolicy, decode_policy: DecodePolicy, hardware: Hardware) -> None:
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._hardware = hardware
        self._sessions: dict[RequestId, _Session] = {}
        self._prefills: dict[InstanceId, PrefillMirror] = {}
        self._decodes: dict[InstanceId, DecodeMirror] = {}
        self._latency: dict[ModelId, Latency] = {}
        self._capacity: dict[ModelId, int] = {}
        self._handles: dict[tuple[RequestId, int], _Handle] = {}  # adopted and not released
        self._out: list[Effect] = []

    def on(self, event: Event, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order. `now_ns` is part of every core's interface; this one's
        decisions do not depend on it yet."""
        del now_ns
        match event:
            case Arrived(job):
                assert job.request not in self._sessions
                self._sessions[job.request] = _Session(job)
                self._place_prefill(job.request)
            case ClientLeft(request, satisfied):
                if request in self._sessions:
                    self._stop_work(request)
                    self._end(request, Step.FINISH if satisfied else Step.CANCEL, reason=FinishReason.STOP)
            case Heard(instance, message):
                self._heard(instance, message)
            case InstanceUp(instance, prefill):
                self._up(instance, prefill)
            case InstanceDown(instance):
                self._down(instance)
            case ModelUp(spec, capacity_tokens):
                self._latency[spec.model] = Latency(spec.manifest, self._hardware)
                self._capacity[spec.model] = capacity_tokens
                self._place_waiting()
            case ModelGone(model, why):
                self._model_gone(model, why)
        out, self._out = self._out, []
        return out

    def states(self) -> Mapping[RequestId, tuple[ModelId, State]]:
        """For the metrics and the tests: the requests that have not ended."""
        return {request: (s.job.model, s.state) for request, s in self._sessions.items()}

    # --- placing --------------------------------------------------------------------------------------------------

    def _place_prefill(self, request: RequestId) -> None:
        session = self._sessions[request]
        job = session.job
        if not self._prefills or job.model not in self._latency:
            return  # placed when an instance, or the model, comes up
        queues = [mirror.view() for _, mirror in sorted(self._prefills.items())]
        chosen = self._prefill_policy.place(job.model, queues, self._latency)
        group = self._prefills[chosen.instance].add(request, job.model, job.prefill_tokens, chosen.group)
        session.prefill = chosen.instance
        self._out.append(To(chosen.instance, Submit(job, group)))

    def _place_waiting(self) -> None:
        waiting = [r for r, s in self._sessions.items() if s.state is State.QUEUED and s.prefill is None]
        for request in sorted(waiting):
            self._place_prefill(request)

    def _place_decode(self, request: RequestId) -> None:
        session = self._sessions[request]
        if not self._decodes or session.kv is None:
            return
        job, tokens = session.job, len(session.job.prompt) + len(session.sent)
        views = [m.view(self._capacity, job.model, tokens) for _, m in sorted(self._decodes.items())]
        session.decode = self._decode_policy.place(job.model, views)
        self._decodes[session.decode].add(request, job.model, tokens)
        self._handles[(request, job.attempt)] = _Handle(session.kv.owner, session.decode)
        self._out.append(To(session.decode, Adopt(job, tuple(session.sent), session.kv)))
        session.kv = None

    # --- what instances say ---------------------------------------------------------------------------------------

    def _heard(self, instance: InstanceId, message: FromInstance) -> None:
        match message:
            case Tokens():
                self._tokens(message)
            case Prefilled():
                self._prefilled(message)
            case KvReleased():
                self._released(message)
            case Started():
                self._step(message.request, message.attempt, Step.START)
            case Phase():
                for request in message.requests:
                    session = self._sessions.get(request)
                    if session and session.decode == instance:
                        session.state = advance(session.state, Step.RESUME if message.running else Step.PREEMPT)
            case PromptLogprobs():
                session = self._current(message.request, message.attempt)
                if session and not session.prompt_reported:
                    session.prompt_reported = True
                    self._out.append(DeliverPrompt(message.request, message.tokens))
            case GaveUp():
                if self._current(message.request, message.attempt):
                    self._replay(message.request)
            case Broken():
                if self._current(message.request, message.attempt):
                    self._stop_work(message.request)
                    self._end(message.request, Step.FAIL, message=message.reason)
            case SwitchDone():
                self._switched(instance, message)

    def _switched(self, instance: InstanceId, message: SwitchDone) -> None:
        if instance in self._prefills:
            self._prefills[instance].running = message.model
        if message.model in self._latency and not message.prefetched:
            self._latency[message.model].saw_switch(message.copy_ns)

    def _current(self, request: RequestId, attempt: int) -> _Session | None:
        session = self._sessions.get(request)
        return session if session and session.job.attempt == attempt else None

    def _step(self, request: RequestId, attempt: int, step: Step) -> None:
        session = self._current(request, attempt)
        if session:
            session.state = advance(session.state, step)

    def _deliver(self, request: RequestId, session: _Session, first: int, tokens: tuple[Token, ...]) -> None:
        assert first == len(session.sent), f"tokens from {first}, {len(session.sent)} were sent"
        session.sent += [token.id for token in tokens]
        self._out.append(Deliver(request, first, tokens))

    def _tokens(self, message: Tokens) -> None:
        session = self._current(message.request, message.attempt)
        if session is None:
            return
        self._deliver(message.request, session, message.first, message.tokens)
        if message.finish:
            self._unmirror(message.request, session)
            self._end(message.request, Step.FINISH, reason=message.finish)

    def _prefilled(self, message: Prefilled) -> None:
        session = self._current(message.request, message.attempt)
        if session is None or session.prefill is None:
            self._release(message.kv.owner, message.request, message.attempt)
            return
        self._latency[session.job.model].saw_prefill(session.job.prefill_tokens, message.duration_ns)
        self._prefills[session.prefill].remove(message.request)
        session.state = advance(session.state, Step.FIRST_TOKEN)
        session.kv = message.kv
        self._deliver(message.request, session, len(session.job.sent), (message.token,))
        self._place_decode(message.request)

    def _released(self, message: KvReleased) -> None:
        if self._handles.pop((message.request, message.attempt), None):
            self._release(message.kv.owner, message.request, message.attempt)

    def _release(self, owner: InstanceId, request: RequestId, attempt: int) -> None:
        if owner in self._prefills:
            self._out.append(To(owner, ReleaseKv(request, attempt)))

    # --- coming and going -----------------------------------------------------------------------------------------

    def _up(self, instance: InstanceId, prefill: bool) -> None:
        if prefill:
            self._prefills[instance] = PrefillMirror(instance)
            self._place_waiting()
        else:
            self._decodes[instance] = DecodeMirror(instance)
            for request in sorted(r for r, s in self._sessions.items() if s.kv is not None):
                self._place_decode(request)

    def _down(self, instance: InstanceId) -> None:
        """Whatever the lost process held is prefilled again elsewhere, from prompt and tokens sent."""
        self._prefills.pop(instance, None)
        self._decodes.pop(instance, None)
        lost = {
            r for r, s in self._sessions.items() if instance in (s.prefill, s.decode) and self._held_by(instance, r)
        }
        for (request, attempt), handle in list(self._handles.items()):
            if instance in (handle.owner, handle.adopter):
                del self._handles[(request, attempt)]
                if handle.adopter == instance:
                    self._release(handle.owner, request, attempt)
        for request in sorted(lost):
            session = self._sessions[request]
            session.deaths += 1
            session.losses += session.state in (State.PREFILLING, State.DECODING)
            self._stop_work(request)
            if session.losses >= MAX_LOSSES or session.deaths >= MAX_REPLAYS:
                message = f"the instance serving this request was lost {session.deaths} times"
                self._end(request, Step.FAIL, message=message)
            else:
                self._replay(request)

    def _held_by(self, instance: InstanceId, request: RequestId) -> bool:
        """Whether losing the instance loses the request's progress. A prefill instance matters until its KV arrived."""
        session = self._sessions[request]
        if session.decode is None or session.decode == instance:
            return True
        handle = self._handles.get((request, session.job.attempt))
        return handle is not None and handle.owner == instance

    def _model_gone(self, model: ModelId, why: str) -> None:
        for request in sorted(r for r, s in self._sessions.items() if s.job.model == model):
            self._stop_work(request)
            self._end(request, Step.FAIL, message=f"model '{model}' {why}")
        self._latency.pop(model, None)
        self._capacity.pop(model, None)

    def _replay(self, request: RequestId) -> None:
        session = self._sessions[request]
        self._unmirror(request, session)
        session.state = advance(session.state, Step.REPLAY)
        session.job = replace(session.job, attempt=session.job.attempt + 1, sent=tuple(session.sent))
        session.prefill = session.decode = session.kv = None
        self._out.append(Replayed(request))
        self._place_prefill(request)

    def _stop_work(self, request: RequestId) -> None:
        """Whoever still works on the request is told to stop. An adopter releases the KV it was given by itself."""
        session = self._sessions[request]
        attempt = session.job.attempt
        if session.decode is not None:
            if session.decode in self._decodes:
                self._out.append(To(session.decode, Cancel(request, attempt)))
        elif session.kv is not None:
            self._release(session.kv.owner, request, attempt)
        elif session.prefill in self._prefills:
            self._out.append(To(session.prefill, Cancel(request, attempt)))
        self._unmirror(request, session)

    def _unmirror(self, request: RequestId, session: _Session) -> None:
        if session.prefill in self._prefills:
            self._prefills[session.prefill].remove(request)
        if session.decode in self._decodes:
            self._decodes[session.decode].remove(request, session.job.model)

    def _end(self, request: RequestId, step: Step, *, reason: FinishReason | None = None, message: str = "") -> None:
        session = self._sessions.pop(request)
        self._out.append(Ended(request, advance(session.state, step), reason, message))

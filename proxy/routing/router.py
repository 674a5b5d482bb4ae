"""The router: it has every request from its arrival to its one terminal reply, whatever dies meanwhile.

`on(event, now_ns) -> effects`; no clock, no I/O. It places requests on prefill instances, carries the KV's address from
prefill to decode, delivers tokens in order and each exactly once, and replays requests whose instance was lost. In a
pool without prefill instances requests are placed on mixed ones, where they stay.

Laws: (1) tokens of a request are delivered as indices 0, 1, 2 … (from `sent` on, if it was begun elsewhere), none
twice, none left out, over all its attempts; (2) exactly one `Ended` per request, and nothing after it; (3) every
`KvHandle` is released to a living owner exactly once, by its adopter or, if the adopter died, by this core.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State, Step, advance
from aegis.core.messages import (
    Adopt,
    BringIn,
    Broken,
    BroughtIn,
    Cancel,
    FromInstance,
    GaveUp,
    HandedOver,
    HandOver,
    KvReleased,
    Phase,
    Prefilled,
    PromptLogprobs,
    ReleaseKv,
    Reused,
    Started,
    StepsTook,
    Submit,
    SwitchDone,
    Tokens,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import PLACES_NEED, Failure, FinishReason, Token
from aegis.core.role import Role
from aegis.core.views import MAX_BATCH, PPM, DecodePolicy, PrefillPolicy, Work
from proxy.routing.admission import Admission
from proxy.routing.decode_lists import DecodeLists
from proxy.routing.demand import Demand, demand
from proxy.routing.events import (
    ClientLeft,
    Deliver,
    DeliverPrompt,
    DeliverReused,
    Effect,
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
from proxy.routing.first_tokens import FirstTokens
from proxy.routing.moves import Moves, Placed, Places, kv_is_cheaper
from proxy.routing.patience import Patience
from proxy.routing.placement_views import PlacedLoad
from proxy.routing.pool_sample import Arrivals, ModelSample, loads_of, model_samples
from proxy.routing.prefill_queues import PrefillQueues
from proxy.routing.reasons import PlaceReasons, refusal
from proxy.routing.sessions import BEFORE_FIRST_TOKEN, MAX_LOSSES, MAX_REPLAYS, Handle, Session


class Router:
    """All requests of one proxy."""

    def __init__(
        self,
        prefill_policy: PrefillPolicy,
        decode_policy: DecodePolicy,
        hardware: Hardware,
        *,
        max_batch: int = MAX_BATCH,
        give_up_ns: int | None = None,
        explains: bool = False,
    ) -> None:
        """A request that has no token after `give_up_ns` fails when the next one arrives. If it `explains`, there is a
        `Decision` among the effects for each request that is placed, and for each that fails."""
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._hardware = hardware
        self._sessions: dict[RequestId, Session] = {}
        self._latency: dict[ModelId, Latency] = {}
        self._capacity: dict[ModelId, int] = {}
        self._ttft_ns: dict[ModelId, int] = {}
        self._prefills = PrefillQueues(prefill_policy.max_group_size, self._latency, self._ttft_ns)
        self._specs: dict[ModelId, ModelSpec] = {}
        self._weight_bytes: dict[ModelId, int] = {}
        self._decodes = DecodeLists(
            self._capacity, self._weight_bytes, self._demand_of, self._specs, max_batch=max_batch
        )
        self._first_tokens = FirstTokens(self._latency)
        self._mixed: set[InstanceId] = set()
        self._away: set[ModelId] = set()  # whose weights cannot be loaded at the moment
        self._absent: set[InstanceId] = set()  # lost, and being started again
        self._reasons = PlaceReasons(prefill_policy, decode_policy) if explains else None
        self._now_ns = 0  # of the event
        self._handles: dict[tuple[RequestId, int], Handle] = {}  # adopted and not released
        self._arrivals = Arrivals()
        self.admission = Admission(
            prefill_policy,
            self._specs,
            self._latency,
            self._prefills,
            self._decodes,
            self._first_tokens,
            self._mixed,
            self._demand_of,
        )
        self._patience = Patience(self._sessions, self._ttft_ns, self.admission, give_up_ns)
        self._places = Places()
        self._moves = Moves()
        self._out: list[Effect] = []

    def on(self, event: Event, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        self._now_ns = now_ns
        self._decodes.grow(now_ns)
        match event:
            case MessageReceived():
                self._on_message(event.instance, event.message)
                self._give_up_late()
            case RequestArrived(job, first_choice, refusable):
                assert job.request not in self._sessions
                self._arrivals.add(job.model, len(job.prompt))
                self._sessions[job.request] = Session(job, first_choice=first_choice, sent=list(job.sent))
                self._give_up_late(arrival=True)
                self._patience.watch(job, refusable=refusable)
                self._place(job.request)
            case ClientLeft(request, satisfied):
                if request in self._sessions:
                    self._stop_work(request)
                    self._end(request, Step.FINISH if satisfied else Step.CANCEL, reason=FinishReason.STOP)
            case InstanceUp(instance, role):
                self._up(instance, role)
            case InstanceDown(instance, for_good, requested):
                self._absent = self._absent - {instance} if for_good else self._absent | {instance}
                self._down(instance, blameless=requested)
                if for_good:
                    self._place_waiting()
            case ModelUp():
                self._model_up(event)
            case ModelAway(model):
                self._away.add(model)
            case SloSet(model, slo):
                self._set_slo(model, slo)
            case ModelRemoved(model, why, returns):
                self._model_removed(model, why, Failure.MODEL_NOT_FETCHED if returns else Failure.MODEL_REMOVED)
            case ForeignLoad():
                self._set_foreign(event)
            case MoveModel():
                self._move(event)
            case PlacesSet(model, instances):
                self._places.set(model, instances)
        if self._moves:
            self._out += self._moves.ended()
        out, self._out = self._out, []
        return out

    def states(self) -> Mapping[RequestId, tuple[ModelId, State]]:
        """The requests that have not ended, for the metrics and the tests."""
        return {request: (s.job.model, s.state) for request, s in self._sessions.items()}

    def loads(self) -> list[ForeignLoad]:
        """The load of this proxy's requests for other proxies: one for each instance."""
        prefills = [ForeignLoad(name, self._prefills.own_ns(name), ()) for name in self._prefills.instances()]
        return prefills + [
            ForeignLoad(name, self._waiting_ns(name), self.admission.own(name)) for name in self._decodes.instances()
        ]

    def load_ppm(self) -> dict[InstanceId, int]:
        """The load of each instance: of a prefill instance its queue, as a part of the shortest TTFT of a model; of
        others the steps that their requests want, as a part of the time between two tokens."""
        ttft_ns = min(self._ttft_ns.values(), default=1)
        queues = {name: PPM * self._prefills.load_ns(name) // ttft_ns for name in self._prefills.instances()}
        return queues | {name: self._decodes.load_ppm(name) for name in self._decodes.instances()}

    def sample(self) -> tuple[tuple[ModelSample, ...], dict[InstanceId, tuple[PlacedLoad, ...]]]:
        """Models that serve, as this proxy knows them, and what all requests want of the instances that decode."""
        return model_samples(self._specs, self._latency, self._arrivals), loads_of(self._decodes, self._sessions)

    def waiting_before(self, request: RequestId) -> int | None:
        """The number of this proxy's earlier requests that wait at the same place for their first token; None if the
        request has one, or no place yet."""
        return self._first_tokens.before(request)

    # --- placing ------------------------------------------------------------------------------------------------------

    def _place(self, request: RequestId) -> None:
        session = self._sessions[request]
        job = session.job
        if job.model not in self._latency or not self._away.isdisjoint((job.model, job.served)):
            return  # placed when the model, or an instance, comes up
        work = Work(job.model, job.prefill_tokens)
        first = self._sessions.get(session.first_choice) if session.first_choice is not None else None
        if self._prefills:
            at = first.prefill if first and first.prefill in self._prefills else None
            joined = self._prefills.group_of(at, first.job.request) if first and at else None
            chosen = joined or self._prefill_policy.place(work, self._prefills)
            if self._reasons and not joined:
                self._out.append(self._reasons.group(job, work, self._prefills, chosen, self._now_ns))
            group = self._prefills.add(chosen, request, work)
            session.prefill = chosen.instance
            self._first_tokens.add(chosen.instance, request)
            self._out.append(To(chosen.instance, Submit(job, group)))
        elif self._mixed:
            joined_at = first.decode if first and first.decode in self._mixed else None
            session.decode, session.target = joined_at or self._chosen(work, session.target), None
            if session.decode is None:
                self._refuse(request)
                return
            self._put(session.decode, request, work)
            self._first_tokens.add(session.decode, request, work)
            self._out.append(To(session.decode, Submit(job)))

    def _place_waiting(self) -> None:
        waiting = [r for r, s in self._sessions.items() if s.state is State.QUEUED and not (s.prefill or s.decode)]
        for request in sorted(waiting):
            self._place(request)
        for request in sorted(r for r, s in self._sessions.items() if s.kv is not None):
            self._place_decode(request)

    def _place_decode(self, request: RequestId) -> None:
        session = self._sessions[request]
        job = session.job
        if not self._decodes or session.kv is None or not self._away.isdisjoint((job.model, job.served)):
            return
        work = Work(job.model, len(job.prompt) + len(session.sent), session.kv.owner)
        session.decode, session.target = self._chosen(work, session.target), None
        if session.decode is None:
            self._refuse(request)
            return
        self._put(session.decode, request, work)
        self._decodes.makes_tokens(session.decode, request)
        if session.kv.owner != session.decode:  # who takes its own KV back does not say so
            self._handles[(request, job.attempt)] = Handle(session.kv.owner, session.decode)
        self._out.append(To(session.decode, Adopt(job, tuple(session.sent), session.kv)))
        session.kv = None

    def _chosen(self, work: Work, target: InstanceId | None) -> InstanceId | None:
        home = target if target in self._decodes else self._places.of(work.model, self._decodes, self._decodes)
        return home or self._decode_policy.place(work, self._decodes)

    def _put(self, instance: InstanceId, request: RequestId, work: Work) -> None:
        if self._reasons:
            placed = self._reasons.place_at_home if self._places.has(work.model, instance) else self._reasons.place
            self._out.append(placed(self._sessions[request].job, work, self._decodes, instance, self._now_ns))
        self._decodes.add(instance, request, work)
        self.admission.placed(instance, self._sessions[request].job)

    def _refuse(self, request: RequestId) -> None:
        """Fails the request, unless an instance is to come back, which may have a place."""
        if self._absent:
            return
        self._stop_work(request)
        lacks = f"no instance has a place for model '{self._sessions[request].job.model}'"
        self._end(request, Step.FAIL, message=f"{lacks}; {PLACES_NEED}", failure=Failure.NO_PLACE)

    def _give_up_late(self, *, arrival: bool = False) -> None:
        for late in self._patience.over(self._now_ns, arrival=arrival):
            self._stop_work(late.request)
            self._end(late.request, Step.FAIL, message=late.why, failure=late.kind, retry_s=late.retry_s)

    # --- what instances say -------------------------------------------------------------------------------------------

    def _on_message(self, instance: InstanceId, message: FromInstance) -> None:
        match message:
            case Tokens():
                self._decodes.tokens_came(instance, self._now_ns)
                self._tokens(message)
            case Prefilled():
                self._decodes.tokens_came(instance, self._now_ns)
                self._prefilled(message)
            case SwitchDone():
                self._switched(instance, message)
            case StepsTook(model, context_tokens, rows, step_ns, work_share):
                self._decodes.worked(instance, work_share)
                if (latency := self._latency.get(model)) and latency.saw_decode(context_tokens, step_ns, rows):
                    self._decodes.reprice(model)
            case KvReleased():
                self._released(message)
            case Started():
                self._step(message.request, message.attempt, Step.START)
            case Phase():
                for request in message.requests:
                    session = self._sessions.get(request)
                    if session and session.decode == instance and session.state not in BEFORE_FIRST_TOKEN:
                        session.state = advance(session.state, Step.RESUME if message.running else Step.PREEMPT)
            case PromptLogprobs():
                session = self._current(message.request, message.attempt)
                if session and not session.prompt_reported:
                    session.prompt_reported = True
                    self._out.append(DeliverPrompt(message.request, message.tokens))
            case Reused():
                self._reused(message)
            case BroughtIn(model):
                self._hand_over(model, instance)
            case HandedOver():
                self._handed_over(instance, message)
            case GaveUp():
                if self._current(message.request, message.attempt):
                    self._replay(message.request)
            case Broken():
                if self._current(message.request, message.attempt):
                    self._stop_work(message.request)
                    self._end(message.request, Step.FAIL, message=message.reason, failure=message.kind)

    def _switched(self, instance: InstanceId, message: SwitchDone) -> None:
        model, latency = message.model, self._latency.get(message.model)
        known = model if latency else None  # it may have been removed meanwhile
        if instance in self._prefills:
            self._prefills.switched(instance, known)
        if instance in self._decodes:
            self._decodes.switched(instance, known)
        self._decodes.worked(instance, message.work_share)
        if latency and not message.prefetched and latency.saw_switch(message.copy_ns):
            self._prefills.reprice(model)
            self._decodes.reprice(model)

    def _current(self, request: RequestId, attempt: int) -> Session | None:
        session = self._sessions.get(request)
        return session if session and session.job.attempt == attempt else None

    def _step(self, request: RequestId, attempt: int, step: Step) -> None:
        session = self._current(request, attempt)
        if session:
            session.state = advance(session.state, step)

    def _deliver(self, request: RequestId, session: Session, first: int, tokens: tuple[Token, ...]) -> None:
        assert first == len(session.sent), f"tokens from {first}, {len(session.sent)} were sent"
        session.sent += [token.id for token in tokens]
        self._first_tokens.remove(request)
        if session.decode is not None:
            self.admission.tokens(session.decode, session.job, len(tokens), self._now_ns)
            if first == len(session.job.sent):
                self._decodes.makes_tokens(session.decode, request)
        self._out.append(Deliver(request, first, tokens))

    def _tokens(self, message: Tokens) -> None:
        request, finish = message.request, message.finish
        session = self._current(request, message.attempt)
        if session is None:
            return
        self._deliver(request, session, message.first, message.tokens)
        if finish:
            self._uncount(request, session)
            self._end(request, Step.FINISH, reason=finish)

    def _prefilled(self, message: Prefilled) -> None:
        request, kv = message.request, message.kv
        session = self._current(request, message.attempt)
        if session is None or (kv and session.prefill is None):
            if kv:
                self._release(kv.owner, request, message.attempt)
            return
        job, model = session.job, session.job.model
        if session.prefill is not None:
            self._prefills.remove(session.prefill, request)
        if self._latency[model].saw_prefill(job.prefill_tokens, message.duration_ns, session.reused):
            self._prefills.reprice(model)
        session.state = advance(session.state, Step.FIRST_TOKEN)
        session.kv = kv
        self._deliver(request, session, len(job.sent), (message.token,))
        self._place_decode(request)

    def _reused(self, message: Reused) -> None:
        """The client does not learn of a replay."""
        session = self._current(message.request, message.attempt)
        if session:
            session.reused = message.tokens
            if message.attempt == 1:
                self._out.append(DeliverReused(message.request, message.tokens))

    def _released(self, message: KvReleased) -> None:
        if self._handles.pop((message.request, message.attempt), None):
            self._release(message.kv.owner, message.request, message.attempt)

    def _release(self, owner: InstanceId, request: RequestId, attempt: int) -> None:
        if owner in self._prefills or owner in self._decodes:
            self._out.append(To(owner, ReleaseKv(request, attempt)))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _move(self, event: MoveModel) -> None:
        model, target = event.model, event.target
        if model not in self._specs or target not in self._decodes:
            why = f"{target} is not up" if model in self._specs else "there is no such model"
            self._out.append(ModelMoved(model, target, 0, 0, why, number=event.number))
            return
        self._out += [*self._moves.begin(event), To(target, BringIn(model))]

    def _hand_over(self, model: ModelId, target: InstanceId) -> None:
        """The target has the model there, or has to wait for its turn: its requests leave where they are."""
        places = self._moves.brought_in(model, target)
        if not places:
            return
        self._places.set(model, places)
        spec, latency = self._specs[model], self._latency[model]
        placed = [
            Placed(request, session.decode, self._decodes.placed_tokens(session.decode, request))
            for request, session in self._sessions.items()
            if session.job.model == model and session.decode and self._moves.leaves(model, session.decode)
        ]
        for request, at, tokens in self._moves.ask(model, placed):
            cheaper = kv_is_cheaper(spec, latency, self._hardware, tokens)
            self._out.append(To(at, HandOver(request, self._sessions[request].job.attempt, with_kv=cheaper)))

    def _handed_over(self, source: InstanceId, message: HandedOver) -> None:
        """The request goes on from its KV, or is prefilled anew. One that has ended meanwhile, or was replayed, leaves
        KV to be released."""
        request, kv = message.request, message.kv
        adopted = self._handles.pop((request, message.attempt), None) if kv and kv.owner != source else None
        session = self._current(request, message.attempt)
        if session is None:
            if kv and (adopted or kv.owner == source):
                self._release(kv.owner, request, message.attempt)
            return
        assert session.decode == source and message.generated == len(session.sent), "tokens are lost"
        session.target = self._moves.handed(session.job.model, request, kv.tokens if kv else None)
        if kv is None:
            self._replay(request)
            return
        self._uncount(request, session)
        session.state = advance(session.state, Step.PREEMPT)
        session.prefill, session.decode, session.kv = kv.owner, None, kv
        self._place_decode(request)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _up(self, instance: InstanceId, role: Role) -> None:
        if role is Role.PREFILL:
            self._prefills.up(instance)
        else:
            self._decodes.up(instance)
            if role is Role.MIXED:
                self._mixed.add(instance)
        self._absent.discard(instance)
        self._place_waiting()

    def _set_foreign(self, load: ForeignLoad) -> None:
        if load.instance in self._prefills:
            self._prefills.set_foreign(load.instance, load.prefill_ns)
        if load.instance in self._mixed:
            self._first_tokens.set_foreign(load.instance, load.prefill_ns)
        if load.instance in self._decodes:
            known = [of_model for of_model in load.models if of_model.model in self._capacity]
            self._decodes.set_foreign(load.instance, known)

    def _down(self, instance: InstanceId, *, blameless: bool) -> None:
        """The requests of the lost process are prefilled again elsewhere, from prompt and tokens sent."""
        self._moves.down(instance)
        if instance in self._prefills:
            self._prefills.down(instance)
        if instance in self._decodes:
            self._decodes.down(instance)
            self.admission.down(instance)
            self._mixed.discard(instance)
            self._first_tokens.set_foreign(instance, 0)
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
            if not blameless:
                session.deaths += 1
                session.losses += session.state in (State.PREFILLING, State.DECODING)
            self._stop_work(request)
            if session.losses >= MAX_LOSSES or session.deaths >= MAX_REPLAYS:
                message = f"the instance serving this request was lost {session.deaths} times"
                self._end(request, Step.FAIL, message=message)
            else:
                self._replay(request)

    def _demand_of(self, model: ModelId, tokens: int) -> Demand:
        return demand(self._specs[model], self._latency[model], self._capacity[model], tokens)

    def _waiting_ns(self, instance: InstanceId) -> int:
        return self._first_tokens.own_ns(instance, self._decodes.active_at(instance)) if instance in self._mixed else 0

    def _held_by(self, instance: InstanceId, request: RequestId) -> bool:
        """Whether losing the instance loses the request's progress. A prefill instance matters until its KV arrived."""
        session = self._sessions[request]
        if session.decode is None or session.decode == instance:
            return True
        handle = self._handles.get((request, session.job.attempt))
        return handle is not None and handle.owner == instance

    def _model_up(self, event: ModelUp) -> None:
        spec, model = event.spec, event.spec.model
        self._away.discard(model)
        if spec.base is not None:  # its requests are its base's to those that place them
            self._place_waiting()
            return
        if self._specs.get(model) != spec:
            self._latency[model] = Latency(spec.manifest, self._hardware)
        self._ttft_ns[model] = spec.slo.ttft_ns
        self._capacity[model] = event.capacity_tokens
        self._specs[model] = spec
        self._weight_bytes[model] = spec.manifest.image_bytes
        self._prefills.reprice(model)
        self._place_waiting()

    def _set_slo(self, model: ModelId, slo: Slo) -> None:
        if model in self._specs:
            self._specs[model] = replace(self._specs[model], slo=slo)
            self._ttft_ns[model] = slo.ttft_ns
            self._decodes.reprice(model)

    def _model_removed(self, model: ModelId, why: str, failure: Failure) -> None:
        self._away.discard(model)
        for request in sorted(r for r, s in self._sessions.items() if model in (s.job.model, s.job.adapter)):
            self._stop_work(request)
            self._end(request, Step.FAIL, message=f"model '{model}' {why}", failure=failure)
        self._moves.forget(model)
        self._places.set(model, ())
        self._arrivals.forget(model)
        self.admission.forget(model)
        self._decodes.forget(model)
        self._prefills.forget(model)
        for known in (self._latency, self._ttft_ns, self._capacity, self._specs, self._weight_bytes):
            known.pop(model, None)

    def _replay(self, request: RequestId) -> None:
        session = self._sessions[request]
        self._uncount(request, session)
        session.state = advance(session.state, Step.REPLAY)
        session.job = replace(session.job, attempt=session.job.attempt + 1, sent=tuple(session.sent))
        session.prefill = session.decode = session.kv = None
        session.reused = 0
        self._out.append(Replayed(request))
        self._place(request)

    def _stop_work(self, request: RequestId) -> None:
        """Tells the instances that still work on the request to stop. An adopter releases the KV it was given by
        itself."""
        session = self._sessions[request]
        attempt = session.job.attempt
        if session.decode is not None:
            if session.decode in self._decodes:
                self._out.append(To(session.decode, Cancel(request, attempt)))
        elif session.kv is not None:
            self._release(session.kv.owner, request, attempt)
        elif session.prefill is not None and session.prefill in self._prefills:
            self._out.append(To(session.prefill, Cancel(request, attempt)))
        self._uncount(request, session)

    def _uncount(self, request: RequestId, session: Session) -> None:
        self._first_tokens.remove(request)
        self._moves.left(session.job.model, request)
        if session.prefill is not None and session.prefill in self._prefills:
            self._prefills.remove(session.prefill, request)
        at = session.decode
        if at is not None and at in self._decodes and self._decodes.remove(at, request):
            self.admission.left(at, session.job, self._now_ns)

    def _end(
        self,
        request: RequestId,
        step: Step,
        *,
        reason: FinishReason | None = None,
        message: str = "",
        failure: Failure = Failure.GENERATION,
        retry_s: int = 0,
    ) -> None:
        session = self._sessions.pop(request)
        if self._reasons and step is Step.FAIL:
            spec = self._specs.get(session.job.model)
            self._out.append(refusal(session, spec.slo if spec else None, message, self._now_ns))
        self._out.append(Ended(request, advance(session.state, step), reason, message, failure, retry_s))

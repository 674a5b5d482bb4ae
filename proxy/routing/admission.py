"""Whether a request that came now could be served in time.

Where the requests of an instance want more than its time, instances keep those models on time that make the most tokens
on time per second (`decode.policies.overload`), so a request waits for the models that come before its own:

(1) Models are in the order of their worth over what they need, the new request being one of its model's. Worth is by
    priority (`aegis.core.views.worth_of`); what they need is a share of the instance's time, as in
    `proxy.routing.demand`, and the prefills that wait, each within its TTFT. Of loads `LOADS_SHARE` counts: many of
    them go on while other batches compute.
(2) What the models before it and the others of its own want of the time goes as their answers end, which have about
    `ANSWER_TOKENS` yet. Until there is room for the steps of all of them, nobody runs it.
(3) Then its prefill and those before it have the time that steps leave.
(4) All that counts in what an instance has time for: as much as steps and prompts were seen to account for
    (`decode.step_times`). That is more than its time where two batches run at a time. It is less where time goes into
    what no estimate knows, or steps take longer than they are said to. But what is missing counts for no more than
    `LATE_WEIGHT` times the part of the tokens that streams lack (`proxy.routing.pace`), as in
    `decode.policies.overload`: if they lack none, there is time yet.

It is late if that takes more than its TTFT on each instance. Once a model has been refused, its next request is taken
if it would wait no more than `BACK_SHARE` of its TTFT, so that the answer does not change with every request that comes
or ends. A request that was taken may wait longer all the same: for others that came after it and make more tokens on
time, or as estimates err. After some time (`proxy.routing.patience`) it is refused, if it has no token yet and its
instance has not the time for all there.

Laws: (1) where an instance is idle, nobody who comes is refused; (2) nor, of models with equal SLOs, where all requests
of an instance, the new one included, want no more than its time, and streams get the tokens they want; (3) of models
with equal SLOs, more that come before it never make a wait shorter; (4) waits are finite; (5) asking changes nothing
but what later requests are held to (`BACK_SHARE`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import Final

from msgspec.structs import replace

from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import Job
from aegis.core.views import ANSWER_TOKENS, LATE_WEIGHT, PPM, PrefillPolicy, Work, worth_of
from proxy.routing.decode_lists import DecodeLists
from proxy.routing.demand import NOTHING, Demand
from proxy.routing.events import ModelLoad
from proxy.routing.first_tokens import FirstTokens
from proxy.routing.pace import Pace
from proxy.routing.prefill_queues import PrefillQueues

BACK_SHARE: Final = 0.8
LOADS_SHARE: Final = 0.5
LEAST_SHARE: Final = 0.05  # of an instance's time is left to everybody, however much those before them want


@dataclass(frozen=True, slots=True)
class Claim:
    """What the requests of a model want of an instance; `prefill_ns` is the time of those that wait there."""

    demand: Demand
    prefill_ns: int
    worth: float
    ttft_ns: int
    tbt_ns: int

    @property
    def density(self) -> float:
        needs = self.demand.load_ppm / PPM + self.prefill_ns / self.ttft_ns
        return self.worth / max(needs * self.tbt_ns, 1.0)


def wait_ns(own: Claim, others: Iterable[Claim], time: float = 1.0) -> int:
    """Until the last of its own requests would have its first token, whose `prefill_ns` has all of them. The instance
    does so much of what they want in its `time`."""
    density = own.density
    together, prefill_ns, steps_ppm, weighed_ns = NOTHING, 0, 0, 0
    for claim in (own, *[claim for claim in others if claim.density >= density]):
        together = together.instead(NOTHING, claim.demand)
        prefill_ns += claim.prefill_ns
        steps_ppm += claim.demand.steps_ppm
        weighed_ns += claim.demand.steps_ppm * claim.tbt_ns
    wanted, alone, room = together.load_ppm / PPM, own.demand.load_ppm / PPM, max(time, LEAST_SHARE)
    if wanted <= room:
        return round(prefill_ns / max(room - wanted + alone, LEAST_SHARE))
    starts_ns = ANSWER_TOKENS * weighed_ns / max(steps_ppm, 1) * log(wanted / room)
    return round(starts_ns + prefill_ns / max(min(alone, room), LEAST_SHARE))


class Admission:
    """The admission of one proxy. It looks at what its router keeps. Itself it only counts what priorities are worth
    and the tokens that come, and notes which models' last requests it refused."""

    def __init__(
        self,
        prefill_policy: PrefillPolicy,
        specs: Mapping[ModelId, ModelSpec],
        latency: Mapping[ModelId, Latency],
        prefills: PrefillQueues,
        decodes: DecodeLists,
        first_tokens: FirstTokens,
        mixed: Collection[InstanceId],
        demand_of: Callable[[ModelId, int], Demand],
    ) -> None:
        self._prefill_policy = prefill_policy
        self._specs = specs
        self._latency = latency
        self._prefills = prefills
        self._decodes = decodes
        self._first_tokens = first_tokens
        self._mixed = mixed
        self._demand_of = demand_of
        self._pace = Pace()
        self._refused: set[ModelId] = set()  # whose last request was
        self._more: defaultdict[tuple[InstanceId, ModelId], float] = defaultdict(float)

    def placed(self, instance: InstanceId, job: Job) -> None:
        if job.priority:
            self._more[instance, job.model] += worth_of(job.priority) - 1

    def tokens(self, instance: InstanceId, job: Job, count: int, now_ns: int) -> None:
        self._pace.tokens(instance, job.request, count, self._specs[job.model].slo, now_ns)

    def left(self, instance: InstanceId, job: Job, now_ns: int) -> None:
        self._pace.left(instance, job.request, now_ns)
        if job.priority:
            self._more[instance, job.model] -= worth_of(job.priority) - 1

    def own(self, instance: InstanceId) -> tuple[ModelLoad, ...]:
        """What this proxy has placed there, for the others."""
        waiting = self._first_tokens.by_model_ns(instance, self._latency) if instance in self._mixed else {}
        return tuple(
            [
                replace(
                    each, prefill_ns=waiting.get(each.model, 0), more_worth=self._more.get((instance, each.model), 0.0)
                )
                for each in self._decodes.own(instance)
            ]
        )

    def down(self, instance: InstanceId) -> None:
        """The instance is gone, with all that was there."""
        self._pace.down(instance)
        self._drop([key for key in self._more if key[0] == instance])

    def forget(self, model: ModelId) -> None:
        """The model is gone, and all its requests."""
        self._refused.discard(model)
        self._drop([key for key in self._more if key[1] == model])

    def late_ns(self, work: Work, priority: int, now_ns: int) -> int | None:
        """By how much its first token would take longer than it may, if the request is to be refused for that; None: it
        is not. It may take its TTFT, and less where its model's last request was refused."""
        expected_ns = None if self._any_idle() else self.expected_ns(work, priority, now_ns=now_ns)
        if expected_ns is None:
            self._refused.discard(work.model)
            return None
        ttft_ns = self._specs[work.model].slo.ttft_ns
        limit_ns = round(BACK_SHARE * ttft_ns) if work.model in self._refused else ttft_ns
        if expected_ns <= limit_ns:
            self._refused.discard(work.model)
            return None
        self._refused.add(work.model)
        return expected_ns - limit_ns

    def given_up_ns(self, job: Job, place: InstanceId | None, now_ns: int) -> int | None:
        """By how much the first token of a request like this one would be late now, if the one that has waited for so
        long at that `place` is to wait no more, because there is not the time for all there; None: it waits on."""
        ttft_ns = self._specs[job.model].slo.ttft_ns
        if place is None or not self._wants_more(place, ttft_ns, now_ns):
            return None
        expected_ns = self.expected_ns(Work(job.model, job.prefill_tokens), job.priority, now_ns=now_ns)
        return max((expected_ns or 0) - ttft_ns, 0)

    def expected_ns(self, work: Work, priority: int = 0, *, now_ns: int) -> int | None:
        """Until its first token, where that comes first; None if there is no estimate."""
        if work.model not in self._latency:
            return None
        waits_ns = [self._wait_ns(work, priority, instance, now_ns) for instance in self._decodes.instances()]
        if not self._prefills:
            return min(waits_ns, default=None) if self._mixed else None
        chosen = self._prefill_policy.place(work, self._prefills)
        return max(self._prefills.expected_ns(chosen, work), min(waits_ns, default=0))

    def _time(self, instance: InstanceId, now_ns: int) -> float:
        """What the instance does of what is wanted, in its time."""
        return max(self._decodes.work_share(instance), 1 - LATE_WEIGHT * self._pace.lack(instance, now_ns))

    def _wants_more(self, instance: InstanceId, ttft_ns: int, now_ns: int) -> bool:
        """Whether those there want more of the instance's time than it has."""
        if instance in self._prefills:
            return self._prefills.load_ns(instance) > ttft_ns
        if instance not in self._decodes:
            return False
        wanted = NOTHING
        for load in self._decodes.placed_loads(instance):
            wanted = wanted.instead(NOTHING, self._demand(load.model, load.requests, load.tokens))
        return wanted.load_ppm > PPM * self._time(instance, now_ns)

    def _drop(self, keys: Iterable[tuple[InstanceId, ModelId]]) -> None:
        for key in keys:
            del self._more[key]

    def _any_idle(self) -> bool:
        """Whether who comes has an instance for itself."""
        if self._prefills and self._prefills.by_load[0].load_ns:
            return False
        return any(
            not self._decodes.batches(n) and not self._first_tokens.foreign_ns(n) for n in self._decodes.instances()
        )

    def _wait_ns(self, work: Work, priority: int, instance: InstanceId, now_ns: int) -> int:
        """Until its first token; where that comes from elsewhere, until its steps have room."""
        model, others = work.model, list[Claim]()
        requests, tokens, worth = 1, work.tokens, worth_of(priority) - 1
        active, mixed = self._decodes.active_at(instance), instance in self._mixed
        foreign = {load.model: load for load in self._decodes.foreign(instance)}
        prefills = self._prefills_ns(instance, active, foreign.values()) if mixed else {}
        for load in self._decodes.placed_loads(instance):
            more = foreign[load.model].more_worth if load.model in foreign else 0.0
            if load.model == model:
                requests, tokens, worth = requests + load.requests, tokens + load.tokens, worth + more
            else:
                waiting_ns = prefills.get(load.model, 0)
                others.append(self._claim(instance, load.model, load.requests, load.tokens, waiting_ns, more))
        prefill_ns = 0
        if mixed:
            latency = self._latency[model]
            switch_ns = 0 if model in active or model in prefills else latency.switch_ns()
            prefill_ns = prefills.get(model, 0) + switch_ns + latency.prefill_ns(work.tokens)
        own = self._claim(instance, model, requests, tokens, prefill_ns, worth)
        return wait_ns(own, others, self._time(instance, now_ns))

    def _prefills_ns(
        self, instance: InstanceId, active: Container[ModelId], foreign: Iterable[ModelLoad]
    ) -> dict[ModelId, int]:
        """To prefill what waits there, by model, of all proxies; models that are not active are brought in once."""
        waiting = self._first_tokens.by_model_ns(instance, self._latency)
        for load in foreign:
            if load.prefill_ns:
                waiting[load.model] = waiting.get(load.model, 0) + load.prefill_ns
        return {m: ns + (0 if m in active else self._latency[m].switch_ns()) for m, ns in waiting.items()}

    def _claim(
        self, instance: InstanceId, model: ModelId, requests: int, tokens: int, prefill_ns: int, more: float
    ) -> Claim:
        """Of all proxies' requests; tokens are those as they were placed. `more` is what those are worth beyond one
        each that this proxy has not placed."""
        slo = self._specs[model].slo
        worth = requests + self._more.get((instance, model), 0.0) + more
        return Claim(self._demand(model, requests, tokens), prefill_ns, worth, slo.ttft_ns, slo.tbt_ns)

    def _demand(self, model: ModelId, requests: int, tokens: int) -> Demand:
        """Each batch has steps of its own: a model whose batches are small, because little of its KV fits, makes fewer
        tokens in the same time."""
        batches = max(self._decodes.batches_of(model, requests, tokens), 1)
        step_ns = self._latency[model].decode_ns(tokens // batches, requests // batches)
        steps_ppm = PPM * batches * step_ns // self._specs[model].slo.tbt_ns
        demand = self._demand_of(model, tokens)
        return demand._replace(steps_ppm=steps_ppm, loads_ppm=round(LOADS_SHARE * demand.loads_ppm))

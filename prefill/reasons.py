"""The reasons why a job is prefilled next, in the words of the policy that orders them, or by the queue as it was made.
And the reasons why weights leave."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.decision import Contender, Decision, DecisionKind, ExplainsOrder, Why, why_before
from aegis.core.ids import InstanceId, ModelId
from aegis.core.request import Job
from aegis.core.views import PrefillJob, PrefillOrder, WaitingJobs
from aegis.core.wording import UNWANTED, count, due, first_in_line, leaves, request_of, since, stays, takes
from prefill.queue import Queue


def next_decision(instance: InstanceId, job: Job, why: Why, made_ns: int, now_ns: int) -> Decision:
    """The job begins."""
    what = f"{request_of(job.request, job.model, job.priority)} is prefilled{since(now_ns - made_ns)}"
    return Decision(now_ns, instance, DecisionKind.PREFILL, job.model, (job.request,), what, why)


class EvictionReasons:
    """The reasons why weights leave the device of one instance. `now_ns` is the time of the current event."""

    def __init__(self, instance: InstanceId, queue: Queue) -> None:
        self.now_ns = 0
        self._instance = instance
        self._queue = queue

    def weights(self, victim: ModelId, spared: ModelId | None, needed: ModelId | None) -> Decision:
        """The weights have left for the `needed` model; None: for another instance. `spared` would have been next to
        go."""
        because = self._next_use(victim)
        if spared is not None:
            because = stays(because, spared, self._next_use(spared))
        what = leaves(f"weights of {victim} leave", needed)
        requests = tuple([job.request for group in self._queue.groups if group.model == victim for job in group.jobs])
        why = Why(because, lost=spared)
        return Decision(self.now_ns, self._instance, DecisionKind.EVICT, victim, requests, what, why)

    def _next_use(self, model: ModelId) -> str:
        models = self._queue.needed()
        if model not in models:
            return UNWANTED
        jobs = sum([len(group.jobs) for group in self._queue.groups if group.model == model])
        return f"its {count(jobs, 'job')} in line are of model number {models.index(model) + 1} of {len(models)}"


def why_group(queue: Queue, job: Job) -> Why:
    """First come, first served, by groups. The job still waits."""
    group, *others = [group for group in queue.groups if group.jobs]
    because = f"{first_in_line(queue.waiting)}, {len(group.jobs)} of them in its group"
    lost = next((other.model for other in others if other.model != job.model), None)
    return Why(f"{because}; then {lost}" if lost else because, lost=lost)


def why_ordered(policy: PrefillOrder, waiting: WaitingJobs, order: Sequence[int], now_ns: int) -> Why:
    """The reason of the job that is first in the order."""
    if isinstance(policy, ExplainsOrder):
        return policy.why_next(waiting, order, now_ns)
    return why(waiting, order, now_ns, first_in_line(len(order)))


def why(waiting: WaitingJobs, order: Sequence[int], now_ns: int, because: str) -> Why:
    """The reason with the numbers of the job and of the first one of another model after it."""
    first = waiting.jobs[order[0]]
    second = next((waiting.jobs[at] for at in order if waiting.jobs[at].model != first.model), None)
    chosen, following = _contender(first, waiting, now_ns), _contender(second, waiting, now_ns) if second else None
    return why_before(f"{because} ({chosen.wants})", chosen, following, then="then")


def _contender(job: PrefillJob, waiting: WaitingJobs, now_ns: int) -> Contender:
    """The job among those that could be next, described like `token due in 1.2 s, prefill 400 ms, weights 450 ms`."""
    load_ns = waiting.load_ns.get(job.model, 0)
    parts = [due("token", job.due_ns - now_ns), takes("prefill", job.prefill_ns)]
    if load_ns:
        parts.append(takes("weights", load_ns))
    cost_ns = load_ns + job.prefill_ns
    return Contender(job.model, ", ".join(parts), job.urgent_ns - cost_ns - now_ns, cost_ns)
